"""Time one shape with several backends in turn: CUDA graphs with rotated weights on a GPU, a clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from sglang_sm120.capture import captured
from sglang_sm120.layout import padded_scale_shape
from sglang_sm120.probing.operations import Operations, of_subject
from sglang_sm120.tuning.choice import REPEATS, SECONDS_PER_REPEAT, Timing, summary

Call = Callable[[], object]
#: Backends so slow that one rotation takes longer are not bound by memory.
_SECONDS_PER_ROTATION = 0.1
_MOST_CALLS = 200


@dataclass
class CompileBudget:
    """Seconds that each backend may spend on first calls; one that used them up is left out from then on."""

    seconds: float
    spent: dict[str, float] = field(default_factory=dict)

    def add(self, value: str, seconds: float) -> None:
        self.spent[value] = self.spent.get(value, 0.0) + seconds

    def is_used_up(self, value: str) -> bool:
        return self.spent.get(value, 0.0) > self.seconds


@dataclass(frozen=True)
class Measured:
    """Times of one case by backend, and why the others have none."""

    timings: dict[str, Timing]
    problems: dict[str, str]


def measure(
    values: Sequence[str], m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, budget: CompileBudget
) -> Measured:
    """Time what a server runs for one layer: quantize ``[M, K]`` and multiply with a weight ``[N, K]``.

    Repeats of the backends are interleaved, so that a change of the clock hits all of them.

    Args:
        values: backends that passed the probe.
        m: rows.
        n: output features.
        k: input features.
        dtype: of activations and result.
        device: where.
        budget: for first calls, which may compile.

    Raises:
        RuntimeError: a CUDA error, after which this process cannot measure any more.
    """
    data = _Data(m, n, k, dtype, device)

    def prepare(value: str) -> Subject:
        operations = of_subject(value)
        return Subject(_call(operations, data), operations.warm_up)

    return measure_subjects(values, prepare, len(data.weights), device, budget)


@dataclass(frozen=True)
class Subject:
    """How one value is called.

    Attributes:
        call: runs it with copy ``i`` of the operands.
        warm_up: context of the first call.
        can_be_captured: whether a CUDA graph can hold the calls; else their launches are timed one by one.
    """

    call: Callable[[int], object]
    warm_up: Callable[[], AbstractContextManager[object]] = nullcontext
    can_be_captured: bool = True


def measure_subjects(
    values: Sequence[str], prepare: Callable[[str], Subject], copies: int, device: torch.device, budget: CompileBudget
) -> Measured:
    """Time what ``prepare`` makes of each value. Repeats of the values are interleaved.

    Args:
        values: what to time.
        prepare: makes the calls of a value; it may refuse by an exception of any type.
        copies: of the operands; consecutive calls take consecutive ones.
        device: where.
        budget: for first calls, which may compile.

    Raises:
        RuntimeError: a CUDA error, after which this process cannot measure any more.
    """
    prepared: dict[str, tuple[Call, int]] = {}
    problems: dict[str, str] = {}
    for value in values:
        if budget.is_used_up(value):
            problems[value] = f"its first calls took longer than {budget.seconds:g} s"
            continue
        try:
            subject = prepare(value)
            begin = time.perf_counter()
            with subject.warm_up():
                subject.call(0)
            _wait(device)
            budget.add(value, time.perf_counter() - begin)
            prepared[value] = _repeat(subject, copies, device)
        except Exception as error:  # noqa: BLE001 - backends refuse a case by exceptions of any type
            _wait(device)  # after a CUDA error this raises: nothing can be measured any more
            problems[value] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    times: dict[str, list[float]] = {value: [] for value in prepared}
    for _ in range(REPEATS):
        for value, (run, calls) in prepared.items():
            times[value].append(_time(run, device) / calls * 1e6)
    return Measured({value: summary(found) for value, found in times.items()}, problems)


class _Data:
    """Operands of one case, and enough copies of the weight that none is found in the cache."""

    def __init__(self, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(7)
        self.device, self.dtype = device, dtype
        self.x = torch.randn(m, k, generator=generator, device=device).to(dtype)
        self.scale = torch.full((), 448.0, dtype=torch.float32, device=device)
        copies = copies_beyond_cache(n * k // 2, device)
        shape = padded_scale_shape(n, k // 16)
        self.weights = [
            torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator, device=device)
            for _ in range(copies)
        ]
        self.scales = [torch.full(shape, 0x38, dtype=torch.uint8, device=device) for _ in range(copies)]
        self.alpha = torch.full((), 1e-4, dtype=torch.float32, device=device)
        self.alphas = torch.full((n,), 1e-4, dtype=torch.float32, device=device)


def copies_beyond_cache(weight_bytes: int, device: torch.device) -> int:
    """How many copies of a weight together exceed the L2 cache three times."""
    if device.type != "cuda":
        return 2
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(64, -(-3 * cache // weight_bytes)))


def _call(operations: Operations, data: _Data) -> Callable[[int], object]:
    """Return a function that runs the layer with copy ``i`` of the weight."""
    linear, quantize, gemm = operations.linear, operations.quantize, operations.gemm
    x, scale, alphas, alpha, dtype = data.x, data.scale, data.alphas, data.alpha, data.dtype
    if linear is not None:
        return lambda i: linear(x, data.weights[i], data.scales[i], scale, alphas, None)
    assert quantize is not None
    assert gemm is not None

    def call(i: int) -> object:
        a, a_scale = quantize(x, scale)
        return gemm(a, data.weights[i], a_scale, data.scales[i], alpha, None, dtype)

    return call


def _repeat(subject: Subject, copies: int, device: torch.device) -> tuple[Call, int]:
    """Return a function that makes one repeat, and the number of calls in it."""
    call = subject.call
    estimate = _time(lambda: call(1 % copies), device)
    calls = max(1, min(_MOST_CALLS, int(SECONDS_PER_REPEAT / max(estimate, 1e-7))))
    if estimate * copies < _SECONDS_PER_ROTATION:
        calls = max(calls, copies)  # fewer would find their weights in the cache again

    def run() -> None:
        for i in range(calls):
            call(i % copies)

    if device.type != "cuda" or not subject.can_be_captured:
        return run, calls
    graph, _ = captured(run)
    graph.replay()
    return graph.replay, calls


def _time(run: Call, device: torch.device) -> float:
    """Seconds of one run."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begin_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    _wait(device)
    begin_event.record()
    run()
    end_event.record()
    _wait(device)
    return float(begin_event.elapsed_time(end_event)) * 1e-3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
