"""The verdicts of ``sglang-sm120 probe`` and the file that keeps them. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sglang_sm120 import records
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.moe_table import CALLABLE_RUNNERS
from sglang_sm120.backends.record import QUANTIZER, HostFacts
from sglang_sm120.kept import Kept, now
from sglang_sm120.records import Fields, Identity, identity_of

Status = Literal["ok", "wrong", "crash", "timeout", "unsupported"]
STATUSES: tuple[Status, ...] = get_args(Status)
#: What was tried and did not pass.
FAILED: tuple[Status, ...] = ("wrong", "crash", "timeout")
#: 2 since there are experts in it.
SCHEMA = 2
_KEPT = Kept("probe")


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
    """Verdicts of one card under one set of versions.

    Attributes:
        identity: the card and the versions.
        outcomes: by value of the table, and ``quantizer``.
        experts: by MoE runner.
        created: when it was written last.
    """

    identity: Identity
    outcomes: Mapping[str, Outcome]
    experts: Mapping[str, Outcome]
    created: str

    def to_json(self) -> dict[str, Any]:
        """The record as it stands in its file."""
        return {
            "schema": SCHEMA,
            "kind": "probe record",
            "created": self.created,
            "identity": self.identity.to_json(),
            "outcomes": {name: vars(outcome) for name, outcome in sorted(self.outcomes.items())},
            "experts": {name: vars(outcome) for name, outcome in sorted(self.experts.items())},
        }


def record_path(identity: Identity) -> Path:
    """Return where the record of an identity is kept. Touches no file."""
    return _KEPT.path(identity)


def require_place(identity: Identity) -> None:
    """Check that :func:`save` will be able to write, before the verdicts cost minutes; raises as it does."""
    _KEPT.require_place(identity)


def save(
    identity: Identity, outcomes: Mapping[str, Outcome], experts: Mapping[str, Outcome] | None = None
) -> ProbeRecord:
    """Write ``outcomes`` and those of ``experts``, over those of earlier runs on the same card and versions.

    Raises:
        ConfigError: the cache folder is not safe or cannot be made.
        RecordError: the file cannot be written.
    """

    def merged(old: ProbeRecord | None) -> ProbeRecord:
        dense = {**(old.outcomes if old else {}), **outcomes}
        return ProbeRecord(identity, dense, {**(old.experts if old else {}), **(experts or {})}, now())

    return _KEPT.update(identity, read, merged)


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
    outcomes = _outcomes(fields.object("outcomes"), (QUANTIZER, *BACKENDS))
    experts = _outcomes(fields.object("experts"), CALLABLE_RUNNERS)
    fields.done()
    return ProbeRecord(identity, outcomes, experts, created)


def find(facts: HostFacts) -> tuple[ProbeRecord | None, str]:
    """Return the record of this card and these versions, else ``None`` and why a record that exists is not used.

    Never raises for a bad file: it counts as no record.
    """
    record, problem = _KEPT.find(identity_of(facts), read)
    return record, f"{problem} It is ignored; run sglang-sm120 probe." if problem else ""


def with_probe(facts: HostFacts) -> tuple[HostFacts, str]:
    """Add the recorded verdicts to the facts; the text says why a record that exists is ignored, or is empty."""
    record, problem = find(facts)
    if record is None:
        return facts, f"The probe record is not used: {problem}" if problem else ""
    return replace(facts, probed=_statuses(record.outcomes), probed_experts=_statuses(record.experts)), ""


def _statuses(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    return {name: outcome.status for name, outcome in outcomes.items()}


def _outcomes(fields: Fields, known: Collection[str]) -> dict[str, Outcome]:
    for name in fields.names():
        if name not in known:
            fields.fail(f"names {name!r}, which is no value of this package")
    return {name: _outcome(fields.object(name)) for name in fields.names()}


def _outcome(fields: Fields) -> Outcome:
    status: Any = fields.text("status", STATUSES)
    outcome = Outcome(status, fields.text("reason"), fields.number("seconds"))
    fields.done()
    return outcome
