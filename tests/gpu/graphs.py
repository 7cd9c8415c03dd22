"""A captured call whose inputs change between replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def assert_a_graph_follows(
    run: Callable[..., torch.Tensor],
    batches: Sequence[tuple[torch.Tensor, ...]],
    expected: Sequence[torch.Tensor],
) -> None:
    """Capture ``run`` on the first batch; replayed on each it must give that batch's result."""
    live = [tensor.cuda() for tensor in batches[0]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*live)
    for batch, right in zip(batches, expected, strict=True):
        for tensor, value in zip(live, batch, strict=True):
            tensor.copy_(value)
        graph.replay()
        assert torch.equal(out, right)
