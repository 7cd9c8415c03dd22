"""Time calls in CUDA graphs: shared by the benchmarks of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

WARM_REPLAYS = 3


def capture(call: Callable[[int], Any], calls: int) -> torch.cuda.CUDAGraph:
    """Return a graph of ``call(0)`` to ``call(calls - 1)``, one behind the other."""
    for i in range(min(calls, 3)):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def interleaved_microseconds(
    contenders: dict[str, Callable[[int], Any]], calls: int, repeats: int = 15
) -> dict[str, float]:
    """Median microseconds per call of each contender, their replays taken in turn.

    Clocks and temperature drift; taken in turn, they drift for all alike.
    """
    graphs = {name: capture(call, calls) for name, call in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for repeat in range(repeats + WARM_REPLAYS):
        for name, graph in graphs.items():
            seconds = replay_seconds(graph)
            if repeat >= WARM_REPLAYS:
                times[name].append(seconds)
    return {name: statistics.median(found) / calls * 1e6 for name, found in times.items()}


def read_bandwidth() -> float:
    """Measured read bandwidth in TB/s: the sum of 4 GiB of int64."""
    data = torch.ones(1 << 29, device="cuda", dtype=torch.int64)
    microseconds = interleaved_microseconds({"sum": lambda _: data.sum()}, 3)["sum"]
    return data.numel() * 8 / microseconds * 1e-6


def launches(call: Callable[[], Any]) -> int:
    """Kernels that one call starts, as the profiler of torch counts them."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [e.name.lower() for e in profile.events() if e.device_type.name == "CUDA"]
    return sum("memset" not in name and "memcpy" not in name for name in kernels)
