"""Chains of dependent launches in a CUDA graph, replayed with new activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def check_chained_replays(
    live: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[torch.Tensor]],
    expected: Sequence[torch.Tensor],
    launch: Callable[[torch.Tensor], object],
    *,
    calls: int,
    rounds: int,
) -> None:
    """Assert that each replay gives what its activations give alone.

    In the graph a kernel that writes the activations stands directly in front of two launches, and one that spoils them
    directly behind.

    Args:
        live: the buffers of activations that ``launch`` reads.
        inputs: for each set of activations the contents of these buffers.
        expected: the outputs of each set, from launches that depend on nothing.
        launch: launches the kernel under test, as a dependent, on the output that it is given.
        calls: how often all this is repeated inside the graph.
        rounds: replays.
    """
    sources = [buffer.clone() for buffer in live]
    outs = [torch.full_like(expected[0], float("nan")) for _ in range(calls)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            for buffer, source in zip(live, sources, strict=True):
                buffer.copy_(source)
            launch(out)
            launch(out)
            live[0].view(torch.uint8).fill_(0xFF)
    for round_index in range(rounds):
        which = round_index % len(inputs)
        for source, values in zip(sources, inputs[which], strict=True):
            source.copy_(values)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            assert torch.equal(out, expected[which])
