"""What the tensor-parallel ranks of a server tell one another before they serve."""

from __future__ import annotations

from typing import Any

import torch


def gather(value: Any) -> list[Any]:
    """Return the value of every tensor-parallel rank, in their order; every rank must call this at the same point.

    The values travel over SGLang's own CPU group of the ranks. With one rank nothing is sent.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    found: list[Any] = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def is_first() -> bool:
    """Whether this process is the one of all ranks that logs what they have in common."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not ready or torch.distributed.get_rank() == 0
