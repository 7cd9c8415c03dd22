"""What ``bench`` measured on one card: times and the fastest value, by (N, K, dtype, M) of dense layers and by the
geometry, dtype and M of experts. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sglang_sm120 import records
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.moe_table import MOE_RUNNERS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.kept import Kept, now
from sglang_sm120.records import Fields, Identity, identity_of
from sglang_sm120.tuning.choice import Timing, choose
from sglang_sm120.tuning.expert_cases import ACTIVATIONS, ExpertKey, ExpertShape

#: 2 since there are experts in it.
SCHEMA = 2
_KEPT = Kept("bench")
_DTYPES = ("bfloat16", "float16")
#: The largest that ``--rows`` takes. A server makes a list with an entry for every M up to the largest of the table.
_MOST_ROWS = 999_999
_MOST_EXPERTS = 99_999
_MOST_LAUNCHES = 10**6
Key = tuple[int, int, str, int]
#: Geometry, type of the result, M.
ExpertsKey = tuple[ExpertKey, str, int]


class Keyed(Protocol):
    """A measured case."""

    @property
    def key(self) -> Hashable:
        """What tells it from others."""


KeyedT = TypeVar("KeyedT", bound=Keyed)


@dataclass(frozen=True)
class Entry:
    """One measured case. ``backend`` follows from ``timings`` by :func:`choose`."""

    n: int
    k: int
    dtype: str
    m: int
    backend: str
    timings: Mapping[str, Timing]

    @property
    def key(self) -> Key:
        return self.n, self.k, self.dtype, self.m

    def to_json(self) -> dict[str, Any]:
        """The entry as it stands in the file; times in microseconds."""
        return {**vars(self), "timings": _timings_to_json(self.timings)}


@dataclass(frozen=True)
class ExpertEntry:
    """One measured case of experts. ``backend``, a MoE runner, follows from ``timings`` by :func:`choose`.

    ``launches`` has the kernels of one call for the runners where they could be counted.
    """

    shape: ExpertShape
    dtype: str
    m: int
    backend: str
    timings: Mapping[str, Timing]
    launches: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> ExpertsKey:
        return self.shape.key, self.dtype, self.m

    def to_json(self) -> dict[str, Any]:
        """The entry as it stands in the file; times in microseconds."""
        shape = {name: value for name, value in vars(self.shape).items() if name != "layers"}
        timings = _timings_to_json(self.timings)
        found = {**shape, **vars(self), "timings": timings, "launches": dict(self.launches)}
        del found["shape"]
        return found


@dataclass(frozen=True)
class Results:
    """All entries of one card under one set of versions, with the command that measured them last."""

    identity: Identity
    entries: Mapping[Key, Entry]
    experts: Mapping[ExpertsKey, ExpertEntry]
    created: str
    command: str

    def to_json(self) -> dict[str, Any]:
        """The results as they stand in their file."""
        return {
            "schema": SCHEMA,
            "kind": "bench results",
            "created": self.created,
            "command": self.command,
            "identity": self.identity.to_json(),
            "entries": [self.entries[key].to_json() for key in sorted(self.entries)],
            "experts": [self.experts[key].to_json() for key in sorted(self.experts)],
        }


def results_path(identity: Identity) -> Path:
    """Return where the results of an identity are kept. Touches no file."""
    return _KEPT.path(identity)


def require_place(identity: Identity) -> None:
    """Check that :func:`save` will be able to write, before the times cost minutes; raises as it does."""
    _KEPT.require_place(identity)


def save(identity: Identity, entries: Sequence[Entry | ExpertEntry], arguments: Sequence[str]) -> Results:
    """Write ``entries`` over those of the same cases; the others of the same card and versions stay.

    Raises:
        ConfigError: the cache folder is not safe or cannot be made.
        RecordError: the file cannot be written.
    """

    def merged(old: Results | None) -> Results:
        dense, experts = apart(entries)
        return Results(
            identity,
            {**(old.entries if old else {}), **{entry.key: entry for entry in dense}},
            {**(old.experts if old else {}), **{entry.key: entry for entry in experts}},
            now(),
            shlex.join(arguments),
        )

    return _KEPT.update(identity, read, merged)


def read(path: Path) -> Results:
    """Read results strictly.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is not exactly what :func:`save` writes.
    """
    fields = records.read_json(path)
    fields.schema(SCHEMA)
    fields.text("kind", ("bench results",))
    created, command = fields.text("created"), fields.text("command")
    identity = Identity.from_json(fields.object("identity"))
    entries = read_entries(fields.objects("entries"), read_entry)
    experts = read_entries(fields.objects("experts"), read_expert_entry)
    fields.done()
    return Results(identity, entries, experts, created, command)


def find(facts: HostFacts) -> tuple[Results | None, str]:
    """Return what was measured on this card and these versions, else ``None`` and why a file is not used.

    Never raises for a bad file: it counts as none.
    """
    found, problem = _KEPT.find(identity_of(facts), read)
    return found, f"Earlier results are not used: {problem} They are measured anew." if problem else ""


def apart(entries: Sequence[Entry | ExpertEntry]) -> tuple[list[Entry], list[ExpertEntry]]:
    """Return the entries of dense layers, and those of experts."""
    dense = [entry for entry in entries if isinstance(entry, Entry)]
    return dense, [entry for entry in entries if isinstance(entry, ExpertEntry)]


def read_entries(items: Sequence[Fields], read_one: Callable[[Fields], KeyedT]) -> dict[Any, KeyedT]:
    """Read measured cases, each at most once; raises :class:`RecordError` on anything unexpected."""
    found: dict[Any, KeyedT] = {}
    for item in items:
        entry = read_one(item)
        if entry.key in found:
            item.fail(f"repeats the case {entry.key}")
        found[entry.key] = entry
    return found


def read_entry(fields: Fields) -> Entry:
    """Read one measured case strictly; raises :class:`RecordError` on anything unexpected."""
    found = _timings(fields, BACKENDS)
    entry = Entry(
        n=fields.integer("n", 1),
        k=fields.integer("k", 16),
        dtype=fields.text("dtype", _DTYPES),
        m=fields.integer("m", 1, _MOST_ROWS),
        backend=fields.text("backend", list(found)),
        timings=found,
    )
    _require_choice(fields, entry)
    return entry


def read_expert_entry(fields: Fields) -> ExpertEntry:
    """Read one measured case of experts strictly; raises :class:`RecordError` on anything unexpected."""
    found = _timings(fields, MOE_RUNNERS)
    counted = fields.object("launches")
    launches = {value: counted.integer(value, 1, _MOST_LAUNCHES) for value in found if value in counted.names()}
    counted.done()
    experts = fields.integer("experts", 1, _MOST_EXPERTS)
    activation: Any = fields.text("activation", ACTIVATIONS)
    shape = ExpertShape(
        experts=experts,
        local=fields.integer("local", 1, experts),
        top_k=fields.integer("top_k", 1, experts),
        hidden=fields.integer("hidden", 16),
        inner=fields.integer("inner", 16),
        activation=activation,
    )
    entry = ExpertEntry(
        shape=shape,
        dtype=fields.text("dtype", _DTYPES),
        m=fields.integer("m", 1, _MOST_ROWS),
        backend=fields.text("backend", list(found)),
        timings=found,
        launches=launches,
    )
    _require_choice(fields, entry)
    return entry


def _require_choice(fields: Fields, entry: Entry | ExpertEntry) -> None:
    fields.done()
    if not entry.timings or entry.backend != choose(entry.timings):
        fields.fail(f"names the backend {entry.backend}, which does not follow from its times")


def _timings_to_json(timings: Mapping[str, Timing]) -> dict[str, Any]:
    return {value: vars(timing) for value, timing in timings.items()}


def _timings(fields: Fields, known: Collection[str]) -> dict[str, Timing]:
    timings = fields.object("timings")
    found = {}
    for value in timings.names():
        if value not in known:
            timings.fail(f"names {value!r}, which is no value of this package")
        found[value] = _timing(timings.object(value))
    return found


def _timing(fields: Fields) -> Timing:
    timing = Timing(*(fields.number(name) for name in ("median", "low", "high")))
    fields.done()
    if not timing.low <= timing.median <= timing.high:
        fields.fail("has a median outside its quartiles")
    return timing
