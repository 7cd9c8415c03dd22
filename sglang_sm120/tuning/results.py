"""What ``bench`` measured on one card: times and the fastest backend by (N, K, dtype, M). No torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_sm120 import records
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.kept import Kept, now
from sglang_sm120.records import Fields, Identity, identity_of
from sglang_sm120.tuning.choice import Timing, choose

SCHEMA = 1
_KEPT = Kept("bench")
_DTYPES = ("bfloat16", "float16")
#: The largest that ``--rows`` takes. A server makes a list with an entry for every M up to the largest of the table.
_MOST_ROWS = 999_999
Key = tuple[int, int, str, int]


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
        return {**vars(self), "timings": {value: vars(timing) for value, timing in self.timings.items()}}


@dataclass(frozen=True)
class Results:
    """All entries of one card under one set of versions, with the command that measured them last."""

    identity: Identity
    entries: Mapping[Key, Entry]
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
        }


def results_path(identity: Identity) -> Path:
    """Return where the results of an identity are kept. Touches no file."""
    return _KEPT.path(identity)


def require_place(identity: Identity) -> None:
    """Check that :func:`save` will be able to write, before the times cost minutes; raises as it does."""
    _KEPT.require_place(identity)


def save(identity: Identity, entries: Sequence[Entry], arguments: Sequence[str]) -> Results:
    """Write ``entries`` over those of the same cases; the others of the same card and versions stay.

    Raises:
        ConfigError: the cache folder is not safe or cannot be made.
        RecordError: the file cannot be written.
    """

    def merged(old: Results | None) -> Results:
        known = {**(old.entries if old else {}), **{entry.key: entry for entry in entries}}
        return Results(identity, known, now(), shlex.join(arguments))

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
    entries: dict[Key, Entry] = {}
    for item in fields.objects("entries"):
        entry = read_entry(item)
        if entry.key in entries:
            item.fail(f"repeats the case {entry.key}")
        entries[entry.key] = entry
    fields.done()
    return Results(identity, entries, created, command)


def find(facts: HostFacts) -> tuple[Results | None, str]:
    """Return what was measured on this card and these versions, else ``None`` and why a file is not used.

    Never raises for a bad file: it counts as none.
    """
    found, problem = _KEPT.find(identity_of(facts), read)
    return found, f"Earlier results are not used: {problem} They are measured anew." if problem else ""


def read_entry(fields: Fields) -> Entry:
    """Read one measured case strictly; raises :class:`RecordError` on anything unexpected."""
    timings = fields.object("timings")
    found = {}
    for value in timings.names():
        if value not in BACKENDS:
            timings.fail(f"names {value!r}, which is no value of this package")
        found[value] = _timing(timings.object(value))
    entry = Entry(
        n=fields.integer("n", 1),
        k=fields.integer("k", 16),
        dtype=fields.text("dtype", _DTYPES),
        m=fields.integer("m", 1, _MOST_ROWS),
        backend=fields.text("backend", list(found)),
        timings=found,
    )
    fields.done()
    if not found or entry.backend != choose(found):
        fields.fail(f"names the backend {entry.backend}, which does not follow from its times")
    return entry


def _timing(fields: Fields) -> Timing:
    timing = Timing(*(fields.number(name) for name in ("median", "low", "high")))
    fields.done()
    if not timing.low <= timing.median <= timing.high:
        fields.fail("has a median outside its quartiles")
    return timing
