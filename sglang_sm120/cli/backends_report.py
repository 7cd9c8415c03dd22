"""The content of ``sglang-sm120 backends``, as plain data."""

from __future__ import annotations

from typing import Any

from sglang_sm120.backends import BACKENDS, verdict
from sglang_sm120.backends.moe_record import NVFP4_QUANTIZATIONS, Quantization
from sglang_sm120.backends.moe_table import MOE_RUNNERS
from sglang_sm120.backends.moe_verdict import moe_verdict, recommend_moe_runner, route_of
from sglang_sm120.backends.record import Backend, HostFacts, Source, Verdict
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
        "moe": {
            "auto": {quantization: _moe_auto(quantization, facts) for quantization in NVFP4_QUANTIZATIONS},
            "runners": [_moe_entry(record, facts) for record in MOE_RUNNERS.values()],
        },
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
        "source": _source(judged.source),
        "warnings": list(judged.warnings),
        "summary": record.summary,
        "multiplies": record.provider,
        "offered_by": _offered_by(record, facts),
    }


def _moe_auto(quantization: Quantization, facts: HostFacts) -> dict[str, Any]:
    """Say what ``--moe-runner-backend auto`` ends in for one kind of experts."""
    if not facts.is_sm12x:
        return {"value": None, "runner": None, "reason": "auto is left to SGLang", "source": None}
    choice = recommend_moe_runner(facts, quantization)
    if choice is None:
        return {
            "value": None,
            "runner": None,
            "reason": "no runner that auto may take serves them here",
            "source": None,
        }
    return {"value": choice.value, "runner": choice.runner, "reason": choice.reason, "source": _source(choice.source)}


def _moe_entry(record: Backend, facts: HostFacts) -> dict[str, Any]:
    """Describe one runner: one verdict for each kind of experts, kinds with the same verdict together.

    ``runner`` is what SGLang really runs for them, ``None`` if nothing.
    """
    verdicts: dict[tuple[Verdict, str | None], list[str]] = {}
    for quantization in NVFP4_QUANTIZATIONS:
        route, judged = route_of(record.value, quantization, facts), moe_verdict(record.value, quantization, facts)
        if route is not None and judged is not None:
            verdicts.setdefault((judged, route.runner), []).append(quantization)
    return {
        "value": record.value,
        "summary": record.summary,
        "multiplies": record.provider,
        "experts": [
            {
                "quantizations": kinds,
                "runner": runner,
                "status": judged.status,
                "reason": judged.reason,
                "remedy": judged.remedy,
                "source": _source(judged.source),
                "warnings": list(judged.warnings),
            }
            for (judged, runner), kinds in verdicts.items()
        ],
    }


def _source(source: Source | None) -> dict[str, str] | None:
    return {"kind": source.kind, "ref": source.ref} if source is not None else None


def _offered_by(record: Backend, facts: HostFacts) -> str | None:
    """Say who makes the value acceptable to the installed SGLang; ``None`` if nobody does."""
    if is_native(record, facts):
        return "sglang"
    return "sglang_sm120" if record.can_be_added else None
