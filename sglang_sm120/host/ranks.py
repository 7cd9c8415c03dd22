"""What the ranks of a server tell one another.

Two ways. :func:`gather` is a collective of the tensor-parallel ranks, which all come to the same layers. :func:`tell`
and :func:`hear` reach every rank of the server, pipeline stages and other nodes included: over the store in which
torch.distributed keeps the addresses of the ranks, because a collective would hang, or answer another one, where a rank
runs SGLang without this package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

from sglang_sm120 import __version__
from sglang_sm120.errors import ConfigError

#: All ranks have met when the first one asks, and none has loaded a weight: the others come within seconds.
SECONDS = 300.0


def gather(value: Any) -> list[Any]:
    """Return the value of every tensor-parallel rank, in their order; every rank must call this at the same point.

    The values travel over SGLang's own CPU group of the ranks. With one rank nothing is sent.
    """
    if not _is_distributed():
        return [value]
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    found: list[Any] = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def tell(name: str, value: Any) -> dict[int, Any]:
    """Tell every rank of the server, and return what each of them has told under this name by now. Waits for none.

    Args:
        name: of the question.
        value: JSON; an earlier one of this rank is replaced.

    Returns:
        Values by rank, this one's included.
    """
    store = _store()
    if store is None:
        return {0: value}
    store.set(_key(name, torch.distributed.get_rank()), json.dumps(value))
    keys = {rank: _key(name, rank) for rank in range(world_size())}
    return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}


def hear(name: str, value: Any, *, needed_by: str, seconds: float = SECONDS) -> list[Any]:
    """Tell every rank, wait until all of them have told theirs, and return the values in order.

    Args:
        name: of the question.
        value: JSON.
        needed_by: who asks, for the message.
        seconds: to wait.

    Raises:
        ConfigError: a rank did not tell in time.
    """
    told, store = tell(name, value), _store()
    if store is not None and len(told) < world_size():
        missing = [rank for rank in range(world_size()) if rank not in told]
        try:
            store.wait([_key(name, rank) for rank in missing], timedelta(seconds=seconds))
        except torch.distributed.DistStoreError as error:
            silent = [rank for rank in missing if not store.check([_key(name, rank)])]
            raise ConfigError(
                f"{needed_by} needs sglang-sm120 {__version__} on every rank of the server, and {spell(silent)} did "
                f"not answer within {seconds:g} s. If the server ended on that node, its log says why; else install it "
                "there and do not switch it off, or do without on every node."
            ) from error
        told = tell(name, value)
    return [told[rank] for rank in sorted(told)]


def spell(ranks: Sequence[int]) -> str:
    """Write ranks as ``rank 3`` or ``ranks 0, 1, 5``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def world_size() -> int:
    """How many ranks the server has."""
    return torch.distributed.get_world_size() if _is_distributed() else 1


def is_first() -> bool:
    """Whether this process is the one of all ranks that logs what they have in common."""
    return not _is_distributed() or torch.distributed.get_rank() == 0


def stage() -> tuple[str, bool]:
    """Return what messages call this pipeline stage, empty if there is one, and whether this rank speaks for it."""
    if not _is_distributed():
        return "", True
    from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group

    pipeline = get_pp_group()
    label = f" on pipeline stage {pipeline.rank_in_group}" if pipeline.world_size > 1 else ""
    return label, get_tp_group().rank_in_group == 0


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _store() -> Any:
    """The store in which the ranks of the server have met; ``None`` where there is one rank.

    torch has no public name for it; every release since 1.10 has this one.
    """
    if world_size() == 1:
        return None
    c10d: Any = import_module("torch.distributed.distributed_c10d")
    return c10d.PrefixStore("sglang_sm120", c10d._get_default_store())


def _key(name: str, rank: int) -> str:
    return f"{name}/{rank}"
