"""The content of ``sglang-sm120 backends``, as plain data."""

from __future__ import annotations

from typing import Any

from sglang_sm120.backends import BACKENDS, verdict
from sglang_sm120.backends.record import Backend, HostFacts
from sglang_sm120.backends.verdict import automatic_choice, is_native

SCHEMA = 1


def backends_report(facts: HostFacts) -> dict[str, Any]:
    """Describe every value of the table on this machine."""
    choice = automatic_choice(facts) if facts.is_sm12x else None
    return {
        "schema": SCHEMA,
        "device": device(facts),
        "versions": dict(sorted(facts.versions.items())),
        "problems": dict(sorted(facts.problems.items())),
        "auto": {
            "backend": choice[0].backend if choice else None,
            "reason": choice[1] if choice else "auto is left to SGLang",
        },
        "backends": [_entry(record, facts) for record in BACKENDS.values()],
    }


def device(facts: HostFacts) -> dict[str, Any]:
    """Describe the card."""
    capability = f"{facts.capability[0]}.{facts.capability[1]}" if facts.capability else None
    return {"capability": capability, "name": facts.device_name}


def _entry(record: Backend, facts: HostFacts) -> dict[str, Any]:
    judged = verdict(record.value, facts)
    return {
        "value": record.value,
        "available": judged.status == "ok",
        "status": judged.status,
        "reason": judged.reason,
        "remedy": judged.remedy,
        "source": {"kind": judged.source.kind, "ref": judged.source.ref} if judged.source else None,
        "warnings": list(judged.warnings),
        "summary": record.summary,
        "multiplies": record.provider,
        "offered_by": _offered_by(record, facts),
    }


def _offered_by(record: Backend, facts: HostFacts) -> str | None:
    """Say who makes the value acceptable to the installed SGLang; ``None`` if nobody does."""
    if is_native(record, facts):
        return "sglang"
    return "sglang_sm120" if record.can_be_added else None
