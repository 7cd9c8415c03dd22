"""Capture calls in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

ResultT = TypeVar("ResultT")


def captured(launch: Callable[[], ResultT]) -> tuple[torch.cuda.CUDAGraph, ResultT]:
    """Return a graph of what ``launch`` does on the current CUDA device, and what it returned while it was captured.

    It runs once before, on a stream of its own: a first call may compile, allocate or choose, which a capture forbids.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = launch()
    return graph, result
