"""The tuning table: what ``tune`` measured for whole shapes, and what ``sm120_tuned`` reads. No torch.

The file holds times, not orders: which backend, or which MoE runner, serves follows from them by :func:`choose`, among
those that may serve a layer. It can be copied to machines with the same card and versions.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sglang_sm120 import env, records
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.moe_table import CALLABLE_RUNNERS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, RecordError, bad_value
from sglang_sm120.kept import Kept, now
from sglang_sm120.records import Fields, Identity, identity_of
from sglang_sm120.tuning.choice import choose
from sglang_sm120.tuning.expert_cases import ExpertKey
from sglang_sm120.tuning.results import (
    Entry,
    ExpertEntry,
    ExpertsKey,
    Key,
    apart,
    read_entries,
    read_entry,
    read_expert_entry,
)

#: 2 since there are experts in it.
SCHEMA = 2
_KIND = "tuning table"
_KEPT = Kept("tuning")
#: What a call of ``sm120_tuned`` may reach: kernels that take the weights as they are prepared for it. TensorRT-LLM's
#: shuffles them, SGLang's own kernels can only be called by SGLang.
CANDIDATES: tuple[str, ...] = tuple(
    record.value
    for record in BACKENDS.values()
    if not record.per_call and (record.implementation is not None or record.flashinfer_name not in (None, "trtllm"))
)
#: The same for experts, whose runners take the weights as the stand-in of ours keeps them.
RUNNERS: tuple[str, ...] = CALLABLE_RUNNERS
#: N, K and the type of the result.
ShapeKey = tuple[int, int, str]
EntryT = TypeVar("EntryT", Entry, ExpertEntry)


@dataclass(frozen=True)
class TuningTable:
    """Times of one card under one set of versions.

    Attributes:
        identity: the card and the versions.
        dense: one entry for each (N, K, dtype, M) of a dense layer.
        experts: one entry for each geometry, dtype and M of routed experts.
        created: when it was written last.
        command: what wrote it last, without names and paths of that machine.
    """

    identity: Identity
    dense: Mapping[Key, Entry]
    experts: Mapping[ExpertsKey, ExpertEntry]
    created: str
    command: str

    @property
    def digest(self) -> str:
        """Equal for tables that lead to the same choices on the same card."""
        text = json.dumps([self.identity.digest, *self._entries().values()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def shapes(self) -> list[ShapeKey]:
        """The shapes with at least one entry, sorted."""
        return sorted({(n, k, dtype) for n, k, dtype, _ in self.dense})

    @property
    def backends(self) -> set[str]:
        """Every value that an entry of a dense layer has a time for."""
        return {value for entry in self.dense.values() for value in entry.timings}

    @property
    def runners(self) -> set[str]:
        """Every MoE runner that an entry has a time for."""
        return {value for entry in self.experts.values() for value in entry.timings}

    def choices(self, n: int, k: int, dtype: str, usable: Collection[str]) -> dict[int, str]:
        """Return the best of ``usable`` for each measured M of a shape; empty if nothing usable was measured."""
        found = {}
        for (at_n, at_k, at_dtype, m), entry in sorted(self.dense.items()):
            timings = {value: timing for value, timing in entry.timings.items() if value in usable}
            if (at_n, at_k, at_dtype) == (n, k, dtype) and timings:
                found[m] = choose(timings)
        return found

    def runners_by_rows(self, shape: ExpertKey, dtype: str, usable: Collection[str]) -> dict[int, str]:
        """Return the best of ``usable`` for each measured M of experts; empty if nothing usable was measured."""
        found = {}
        for (at_shape, at_dtype, m), entry in sorted(self.experts.items()):
            timings = {value: timing for value, timing in entry.timings.items() if value in usable}
            if (at_shape, at_dtype) == (shape, dtype) and timings:
                found[m] = choose(timings)
        return found

    def _entries(self) -> dict[str, list[dict[str, Any]]]:
        return {
            "dense": [self.dense[key].to_json() for key in sorted(self.dense)],
            "experts": [self.experts[key].to_json() for key in sorted(self.experts)],
        }

    def to_json(self) -> dict[str, Any]:
        """The table as it stands in its file."""
        return {
            "schema": SCHEMA,
            "kind": _KIND,
            "created": self.created,
            "command": self.command,
            "identity": self.identity.to_json(),
            **self._entries(),
        }


def by_rows(choices: Mapping[int, str]) -> list[str]:
    """Spread the choices for measured M over every M: entry ``m`` of the list serves M = m, the last one any larger M.

    An M between two measured ones takes the choice of the next larger one, as kernels work on whole tiles of rows.

    Args:
        choices: by measured M, not empty.
    """
    rows = sorted(choices)
    return [choices[next(row for row in rows if row >= m)] for m in range(rows[-1] + 1)]


def spans(choices: dict[int, str]) -> str:
    """Write choices as spans of M, such as ``M<=8 sm120, above flashinfer_cutlass (not batch-invariant)``."""
    rows = sorted(choices)
    ends = [m for m, following in zip(rows, [*rows[1:], None], strict=True)
            if following is None or choices[following] != choices[m]]  # fmt: skip
    if len(ends) == 1:
        return f"every M {choices[ends[0]]}"
    parts = [f"M<={m} {choices[m]}" for m in ends[:-1]]
    return f"{', '.join(parts)}, above {choices[ends[-1]]} (results of a token depend on M: not batch-invariant)"


def table_path(identity: Identity) -> Path:
    """Return where the table of an identity is kept. Touches no file."""
    return _KEPT.path(identity)


def require_place(identity: Identity, copy: Path | None = None) -> None:
    """Check that :func:`save` will be able to write, before the times cost minutes.

    Raises:
        ConfigError: the cache folder is not safe or cannot be made.
        RecordError: nothing can be written there, or where ``copy`` is to be.
    """
    _KEPT.require_place(identity)
    if copy is not None:
        records.require_writable(copy)


def save(
    identity: Identity, entries: Sequence[Entry | ExpertEntry], arguments: Sequence[str], copy: Path | None = None
) -> TuningTable:
    """Write whole shapes over those of earlier runs; other shapes of the same card and versions stay.

    Args:
        identity: of this machine.
        entries: all measured M of each shape.
        arguments: the command that measured them.
        copy: another file for the same table, to be taken to other machines.

    Raises:
        ConfigError: the cache folder is not safe or cannot be made.
        RecordError: a file cannot be written.
    """
    dense, experts = apart(entries)
    shapes, geometries = {entry.key[:-1] for entry in dense}, {entry.key[:-1] for entry in experts}

    def change(old: TuningTable | None) -> TuningTable:
        kept = {key: entry for key, entry in (old.dense if old else {}).items() if key[:-1] not in shapes}
        others = {key: entry for key, entry in (old.experts if old else {}).items() if key[:-1] not in geometries}
        return TuningTable(
            identity,
            {**kept, **{entry.key: entry for entry in dense}},
            {**others, **{entry.key: entry for entry in experts}},
            now(),
            shlex.join(arguments),
        )

    table = _KEPT.update(identity, read, change)
    if copy is not None:
        records.write_json(copy, table.to_json())
    return table


def read(path: Path) -> TuningTable:
    """Read a table strictly.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is not exactly what :func:`save` writes.
    """
    fields = records.read_json(path)
    fields.schema(SCHEMA)
    fields.text("kind", (_KIND,))
    created, command = fields.text("created"), fields.text("command")
    identity = Identity.from_json(fields.object("identity"))
    dense = read_entries(fields.objects("dense"), partial(_callable, read_entry, CANDIDATES))
    experts = read_entries(fields.objects("experts"), partial(_callable, read_expert_entry, RUNNERS))
    fields.done()
    return TuningTable(identity, dense, experts, created, command)


def _callable(read_one: Callable[[Fields], EntryT], known: Collection[str], fields: Fields) -> EntryT:
    """Read an entry, and refuse values that nothing but a whole server can run."""
    entry = read_one(fields)
    foreign = sorted(set(entry.timings) - set(known))
    if foreign:
        fields.fail(f"names {foreign[0]!r}, which cannot be called for single layers")
    return entry


def find(facts: HostFacts) -> tuple[TuningTable | None, str]:
    """Return the table for this card and these versions, else ``None`` and why there is none, with what to do.

    A table in the cache folder that is spoilt or stale counts as none. One that :data:`env.TUNING_TABLE` names must be
    readable and of this card.

    Raises:
        ConfigError: the named file is missing, cannot be believed, or belongs to another card.
    """
    identity = identity_of(facts)
    named = env.tuning_table()
    if named is not None:
        return _named(named, identity)
    table, problem = _KEPT.find(identity, read)
    if table is not None:
        return table, ""
    if not problem:
        return None, "There is no tuning table for this card and these versions. Run sglang-sm120 tune MODEL."
    return None, f"The tuning table is not used: {problem} Run again: {_command(identity)}"


def _named(path: Path, identity: Identity) -> tuple[TuningTable | None, str]:
    try:
        table = read(path)
    except (RecordError, OSError) as error:
        raise ConfigError(bad_value(env.TUNING_TABLE, str(path), f"{error}")) from error
    if (table.identity.card, table.identity.capability) != (identity.card, identity.capability):
        there = f"{table.identity.card} ({table.identity.capability})"
        here = f"{identity.card} ({identity.capability})"
        remedy = f"it was measured on {there} and this process runs on {here}; run sglang-sm120 tune on such a card"
        raise ConfigError(bad_value(env.TUNING_TABLE, str(path), remedy))
    changed = table.identity.differences(identity)
    if changed:
        return None, (
            f"The tuning table {path.name} is not used: it was made with other versions ({', '.join(changed)}). "
            f"Run again: {table.command}"
        )
    return table, ""


def _command(identity: Identity) -> str:
    """What made the table that is out of date, as far as it can be read."""
    try:
        other = _KEPT.newest_other(identity, read)
    except (ConfigError, RecordError, OSError):
        other = None
    return other.command if other is not None else "sglang-sm120 tune MODEL"
