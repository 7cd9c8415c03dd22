"""Time the experts of one layer with several runners in turn, and count the kernels that a call of each launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sglang_sm120.layout import padded_scale_shape
from sglang_sm120.probing.expert_operations import ExpertOperations, Layer, of_runner
from sglang_sm120.reference import ExpertWeights
from sglang_sm120.tuning.expert_cases import ExpertShape
from sglang_sm120.tuning.timing import CompileBudget, Measured, Subject, copies_beyond_cache, measure_subjects

#: Of ids and router weights. Together with the copies of the weights they bound the memory of a case.
_MOST_BATCHES = 64


@dataclass(frozen=True)
class ExpertsMeasured(Measured):
    """``launches``: kernels of one call, for the runners where they could be counted; none on a CPU."""

    launches: dict[str, int]


def measure(
    values: Sequence[str], m: int, shape: ExpertShape, dtype: torch.dtype, device: torch.device, budget: CompileBudget
) -> ExpertsMeasured:
    """Time what a server runs for the experts of one layer: ``[M, H]`` and the router's choice in, ``[M, H]`` out.

    Each token takes ``top_k`` of all experts at random. Consecutive calls take other experts, in turn over all that
    are there, so that no weight is found in the cache.

    Args:
        values: runners that passed the probe.
        m: tokens.
        shape: of the experts.
        dtype: of activations and result.
        device: where.
        budget: for first calls, which may compile.

    Raises:
        RuntimeError: a CUDA error, after which this process cannot measure any more.
    """
    data = _Data(m, shape, dtype, device)
    operations: dict[str, ExpertOperations] = {}

    def prepare(value: str) -> Subject:
        operations[value] = of_runner(value)
        call = partial(_call, operations[value], data)
        return Subject(call, operations[value].warm_up, operations[value].can_be_captured)

    found = measure_subjects(values, prepare, len(data.batches), device, budget)
    counted = {value: _launches(operations[value], data) for value in found.timings} if device.type == "cuda" else {}
    return ExpertsMeasured(found.timings, found.problems, {value: n for value, n in counted.items() if n})


class _Data:
    """Operands of one case."""

    def __init__(self, m: int, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(7)
        self.device = device
        self.x = torch.randn(m, shape.hidden, generator=self.generator, device=device).to(dtype)
        size = shape.local * shape.weights_per_expert // 2
        self.layers = [self._layer(shape) for _ in range(copies_beyond_cache(size, device))]
        self.batches = self._batches(m, shape)

    def _layer(self, shape: ExpertShape) -> Layer:
        rows = (2 if shape.activation == "silu" else 1) * shape.inner
        w13 = self._stack(shape.local, rows, shape.hidden)
        w2 = self._stack(shape.local, shape.hidden, shape.inner)
        return Layer(w13, w2, shape.activation, shape.experts)

    def _stack(self, experts: int, rows: int, k: int) -> ExpertWeights:
        packed = torch.randint(
            0, 256, (experts, rows, k // 2), dtype=torch.uint8, generator=self.generator, device=self.device
        )
        scales = torch.full((experts, *padded_scale_shape(rows, k // 16)), 0x38, dtype=torch.uint8, device=self.device)
        alpha = torch.full((experts,), 1e-4, dtype=torch.float32, device=self.device)
        return ExpertWeights(packed, scales, alpha, torch.full((), 448.0, dtype=torch.float32, device=self.device))

    def _batches(self, m: int, shape: ExpertShape) -> list[tuple[Layer, torch.Tensor, torch.Tensor]]:
        """Router outputs until every expert of every copy was taken, and the copy that each is for."""
        found: list[tuple[Layer, torch.Tensor, torch.Tensor]] = []
        taken = 0  # of this rank's experts, over all copies one after the other
        everything = shape.local * len(self.layers)
        while len(found) < 2 or (taken < everything and len(found) < _MOST_BATCHES):
            order = torch.rand(m, shape.experts, generator=self.generator, device=self.device).argsort(1)
            ids = order[:, : shape.top_k].to(torch.int32).contiguous()
            here = ids < shape.local
            distinct, place = torch.unique(ids[here], return_inverse=True)
            # Other experts than the last batch took, as many and as often.
            ids[here] = ((taken + place) % shape.local).to(torch.int32)
            weights = torch.rand(m, shape.top_k, generator=self.generator, device=self.device)
            found.append((self.layers[taken // shape.local % len(self.layers)], ids, weights))
            taken += len(distinct)
            if not len(distinct):
                taken += 1  # no token came here; the next batch must not wait for ever
        return found


def _call(operations: ExpertOperations, data: _Data, i: int) -> object:
    layer, ids, weights = data.batches[i]
    return operations.moe(data.x, ids, weights, layer)


def _launches(operations: ExpertOperations, data: _Data) -> int:
    """Kernels of one call as torch's profiler counts them; 0 where it is not allowed to."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            _call(operations, data, 0)
            torch.cuda.synchronize(data.device)
    except RuntimeError:
        torch.cuda.synchronize(data.device)  # if the card itself failed, this raises
        return 0
    names = [event.name.lower() for event in profile.events() if event.device_type.name == "CUDA"]
    return sum("memset" not in name and "memcpy" not in name for name in names)
