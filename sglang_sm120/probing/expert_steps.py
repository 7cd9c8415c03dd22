"""The steps of a probe of experts: random and extreme routing on poisoned memory, calls in a row, a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_sm120.capture import captured
from sglang_sm120.layout import swizzle_128x4
from sglang_sm120.probing import expert_bound
from sglang_sm120.probing.checks import check_product
from sglang_sm120.probing.expert_operations import ExpertOperations, Layer
from sglang_sm120.probing.expert_plan import ExpertPlan, Geometry
from sglang_sm120.probing.steps import Step, poison
from sglang_sm120.reference import ExpertWeights

#: Tokens of a problem with a routing of its own: more than one block of eight.
_ROUTED = 9


def planned(operations: ExpertOperations, plan: dict[str, Any], device: torch.device) -> Iterator[Step]:
    """:func:`steps` for the child process, which has the plan as JSON."""
    return steps(operations, ExpertPlan.from_json(plan), device)


def steps(operations: ExpertOperations, plan: ExpertPlan, device: torch.device) -> Iterator[Step]:
    """Yield the name of each step and what it runs."""
    for index, geometry in enumerate(plan.geometries):
        data = ExpertData(geometry, device)
        for name in plan.dtypes if index == 0 else plan.dtypes[:1]:
            dtype: torch.dtype = getattr(torch, name)
            for m in plan.rows:
                problem = partial(_check, operations, data, m, dtype, data.random, plan.repeats)
                yield f"experts M={m} {data.label} {name}", problem
        dtype = getattr(torch, plan.dtypes[0])
        for what, routing in data.routings().items():
            yield f"experts, {what}, {data.label}", partial(_check, operations, data, _ROUTED, dtype, routing, 1)
        yield f"{plan.burst} calls in a row, {data.label}", partial(_burst, operations, data, plan)
        if device.type == "cuda" and operations.can_be_captured:
            yield f"CUDA graph, {data.label}", partial(_graph, operations, data, plan)


#: ``routing(tokens) -> ids int32 [tokens, top_k]``
Routing = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class _Batch:
    """One call, and what is right for it: the exact answer and how far from it a right runner may be."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    exact: torch.Tensor
    bound: torch.Tensor


class ExpertData:
    """A random layer of experts and random batches, from a seed, so that a verdict can be repeated.

    Args:
        geometry: sizes as they reach the kernels. Where fewer experts are here than there are, the rank is the second
            one.
        device: where the tensors lie; the numbers are the same everywhere.
        seed: of the numbers.
    """

    def __init__(self, geometry: Geometry, device: torch.device, seed: int = 22) -> None:
        self.experts, self.local, self.top_k, self.hidden, self.inner, self.activation = geometry
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)
        gated = self.activation == "silu"
        self.layer = Layer(
            w13=self._stack((2 if gated else 1) * self.inner, self.hidden),
            w2=self._stack(self.hidden, self.inner),
            activation="silu" if gated else "relu2",
            experts=self.experts,
            first_expert=self.local % self.experts,
        )

    @property
    def label(self) -> str:
        """The geometry, for the names of steps."""
        held = "" if self.local == self.experts else f"/{self.local}"
        return f"E={self.experts}{held} top {self.top_k} H={self.hidden} I={self.inner} {self.activation}"

    def _stack(self, rows: int, k: int) -> ExpertWeights:
        """Outputs are about one for inputs of about one: random codes have a deviation of 2.9, scales are 0.25 to 2."""
        packed = torch.randint(0, 256, (self.local, rows, k // 2), dtype=torch.uint8, generator=self._generator)
        scales = torch.randint(0x28, 0x40, (self.local, rows, k // 16), dtype=torch.uint8, generator=self._generator)
        encode = torch.rand((), generator=self._generator) * 50 + 37.1
        decode = (0.5 + torch.rand(self.local, generator=self._generator)) / (2.9 * k**0.5)
        swizzled = torch.stack([swizzle_128x4(expert) for expert in scales])
        here = [tensor.to(self.device) for tensor in (packed, swizzled, decode / encode, encode)]
        return ExpertWeights(here[0], here[1], here[2], here[3])

    def tokens(self, m: int, dtype: torch.dtype, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states [M, H] of different size, expert ids [M, top_k], router weights of which some are zero."""
        size = torch.exp2(torch.randn(m, 1, generator=self._generator))
        hidden = (torch.randn(m, self.hidden, generator=self._generator) * size).to(dtype).to(self.device)
        weights = torch.rand(m, self.top_k, generator=self._generator)
        weights[::4, -1] = 0
        return hidden, routing(m).to(self.device), weights.to(self.device)

    def batch(self, m: int, dtype: torch.dtype, routing: Routing, operations: ExpertOperations) -> _Batch:
        """Tokens, and what is right for them."""
        hidden, ids, weights = self.tokens(m, dtype, routing)
        layer = self.layer
        between = dtype if operations.rounds_between else None
        exact, bound = expert_bound.expected(
            hidden, ids, weights, layer.w13, layer.w2, layer.activation, False, layer.first_expert, between=between
        )
        return _Batch(hidden, ids, weights, exact, bound)

    def random(self, tokens: int) -> torch.Tensor:
        """Distinct experts for each token. While tokens are few, most experts have none."""
        order = torch.rand(tokens, self.experts, generator=self._generator).argsort(1)
        return order[:, : self.top_k].to(torch.int32)

    def routings(self) -> dict[str, Routing]:
        """Routing that a router does not make every day, by what is special about it."""
        first = self.layer.first_expert

        def missing(tokens: int) -> torch.Tensor:
            ids = self.random(tokens)
            ids[1::3] = -1
            ids[0, 0] = -1
            return ids

        def twice(tokens: int) -> torch.Tensor:
            ids = self.random(tokens)
            ids[:, -1] = ids[:, 0]
            return ids

        def one(tokens: int) -> torch.Tensor:
            ids = self.random(tokens)
            # The others of a token are any but this one.
            ids[ids == first] = (first + self.local - 1) % self.experts
            ids[:, 0] = first
            return ids

        found: dict[str, Routing] = {
            "ids of -1": missing,
            "an expert twice in a token": twice,
            "one expert for all tokens": one,
        }
        if self.local < self.experts:
            found["no token for this rank"] = lambda tokens: (
                self.random(tokens) * 0 + (first + self.local) % self.experts
            )
        return found


def _check(
    operations: ExpertOperations, data: ExpertData, m: int, dtype: torch.dtype, routing: Routing, repeats: int
) -> None:
    """One problem on memory full of NaN, several times."""
    batch = data.batch(m, dtype, routing, operations)
    for _ in range(repeats):
        poison(data.device, m * data.hidden * dtype.itemsize, m * data.top_k * data.inner)
        with operations.warm_up():
            out = operations.moe(batch.hidden, batch.ids, batch.weights, data.layer)
        check_product(out, batch.exact, batch.bound)


def _burst(operations: ExpertOperations, data: ExpertData, plan: ExpertPlan) -> None:
    """Calls of mixed M without a wait: kernels that overlap where they must not show it only then."""
    batches = _mixed(operations, data, plan)
    results = [operations.moe(b.hidden, b.ids, b.weights, data.layer) for b in batches]
    for out, batch in zip(results, batches, strict=True):
        check_product(out, batch.exact, batch.bound)


def _graph(operations: ExpertOperations, data: ExpertData, plan: ExpertPlan) -> None:
    """The same inside a captured graph, replayed on results that were overwritten."""
    batches = _mixed(operations, data, plan)

    def launch() -> list[torch.Tensor]:
        return [operations.moe(b.hidden, b.ids, b.weights, data.layer) for b in batches]

    graph, results = captured(launch)
    for _ in range(plan.repeats):
        for out in results:
            out.fill_(torch.nan)
        graph.replay()
        for out, batch in zip(results, batches, strict=True):
            check_product(out, batch.exact, batch.bound)


def _mixed(operations: ExpertOperations, data: ExpertData, plan: ExpertPlan) -> list[_Batch]:
    rows = [m for m in plan.rows if m <= 256]
    dtype: torch.dtype = getattr(torch, plan.dtypes[0])
    return [data.batch(rows[i % len(rows)], dtype, data.random, operations) for i in range(plan.burst)]
