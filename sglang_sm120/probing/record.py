"""The verdicts of ``sglang-sm120 probe`` and the file that keeps them. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args

from sglang_sm120 import env, records
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import QUANTIZER, HostFacts
from sglang_sm120.errors import ConfigError, RecordError
from sglang_sm120.records import Fields, Identity, identity_of

Status = Literal["ok", "wrong", "crash", "timeout", "unsupported"]
STATUSES: tuple[Status, ...] = get_args(Status)
#: What was tried and did not pass.
FAILED: tuple[Status, ...] = ("wrong", "crash", "timeout")
SCHEMA = 1
#: In the cache folder.
_FOLDER = "probe"


@dataclass(frozen=True)
class Outcome:
    """The verdict about one subject.

    Attributes:
        status: ``ok``; ``wrong`` numbers; ``crash`` (signal, CUDA error, out of memory, exception); ``timeout``;
            ``unsupported`` here, so that nothing was tried.
        reason: one line; for a failure the step at which it happened.
        seconds: wall time, compilation included.
    """

    status: Status
    reason: str
    seconds: float = 0.0


@dataclass(frozen=True)
class ProbeRecord:
    """Verdicts of one card under one set of versions, by subject: values of the table, and ``quantizer``."""

    identity: Identity
    outcomes: Mapping[str, Outcome]
    created: str

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in its file."""
        return {
            "schema": SCHEMA,
            "kind": "probe record",
            "created": self.created,
            "identity": self.identity.to_json(),
            "outcomes": {name: vars(outcome) for name, outcome in sorted(self.outcomes.items())},
        }


def now() -> str:
    """The time as records hold it: UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def record_path(identity: Identity) -> Path:
    """Return where the record of an identity is kept. Touches no file."""
    return env.cache_path() / _FOLDER / f"{identity.capability}-{identity.digest}.json"


def require_place(identity: Identity) -> None:
    """Check that :func:`save` will be able to write, before the verdicts cost minutes.

    Raises:
        ConfigError: the cache folder is not safe or cannot be made.
        RecordError: nothing can be written there.
    """
    env.cache_dir(_FOLDER)
    records.require_writable(record_path(identity))


def save(identity: Identity, outcomes: Mapping[str, Outcome]) -> ProbeRecord:
    """Write ``outcomes``, over those of earlier runs on the same card and versions.

    Raises:
        ConfigError: the cache folder is not safe or cannot be made.
        RecordError: the file cannot be written.
    """
    path = record_path(identity)
    with records.locked(env.cache_dir(_FOLDER)):
        try:
            known = dict(read(path).outcomes)
        except (FileNotFoundError, RecordError):
            known = {}
        record = ProbeRecord(identity, {**known, **outcomes}, now())
        records.write_json(path, record.to_json())
    return record


def read(path: Path) -> ProbeRecord:
    """Read a record strictly.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is not exactly what :func:`save` writes.
    """
    fields = records.read_json(path)
    fields.schema(SCHEMA)
    fields.text("kind", ("probe record",))
    created = fields.text("created")
    identity = Identity.from_json(fields.object("identity"))
    outcomes = fields.object("outcomes")
    found = {}
    for name in outcomes.names():
        if name != QUANTIZER and name not in BACKENDS:
            outcomes.fail(f"names {name!r}, which is no value of this package")
        found[name] = _outcome(outcomes.object(name))
    fields.done()
    return ProbeRecord(identity, found, created)


def find(facts: HostFacts) -> tuple[ProbeRecord | None, str]:
    """Return the record of this card and these versions, else ``None`` and why a record that exists is not used.

    Never raises for a bad file: it counts as no record.
    """
    identity = identity_of(facts)
    try:
        path = record_path(identity)
        if not os.path.isdir(path.parent):
            return None, ""
        env.cache_dir(_FOLDER)
        try:
            record = read(path)
        except FileNotFoundError:
            return None, _stale(path, identity)
    except (ConfigError, RecordError, OSError) as error:
        return None, f"{error} It is ignored; run sglang-sm120 probe."
    if record.identity != identity:
        return None, f"{path.name} belongs to another machine; it is ignored. Run sglang-sm120 probe."
    return record, ""


def with_probe(facts: HostFacts) -> tuple[HostFacts, str]:
    """Add the recorded verdicts to the facts; the text says why a record that exists is ignored, or is empty."""
    record, problem = find(facts)
    if record is None:
        return facts, f"The probe record is not used: {problem}" if problem else ""
    return replace(facts, probed={name: outcome.status for name, outcome in record.outcomes.items()}), ""


def _outcome(fields: Fields) -> Outcome:
    status: Any = fields.text("status", STATUSES)
    outcome = Outcome(status, fields.text("reason"), fields.number("seconds"))
    fields.done()
    return outcome


def _stale(path: Path, identity: Identity) -> str:
    """Say how the newest record of this kind of card differs from what is here now."""
    others = sorted(path.parent.glob(f"{identity.capability}-*.json"), key=lambda p: p.lstat().st_mtime)
    if not others:
        return ""
    changed = read(others[-1]).identity.differences(identity)
    return f"it was taken with other versions ({', '.join(changed)}). Run sglang-sm120 probe again."
