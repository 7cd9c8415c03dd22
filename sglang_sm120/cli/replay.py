"""``sglang-sm120 replay``: run a wrong or failed call of a server alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from sglang_sm120.probing.record import Outcome
    from sglang_sm120.verification.failed_file import FailedCall
    from sglang_sm120.verification.reproducer import Reproducer

SCHEMA = 1


def replay(path: Path, backend: str | None, timeout: float) -> tuple[dict[str, Any], int]:
    """Run the call of a file and return the report with the exit code: 0 if the result is right, else 1."""
    from sglang_sm120.device import collect_facts
    from sglang_sm120.records import identity_of
    from sglang_sm120.verification import replay as room
    from sglang_sm120.verification.served import spelled

    case = room.read(path)
    facts = collect_facts()
    outcome = room.run(path, backend, facts, timeout)
    report = {
        "schema": SCHEMA,
        "call": {
            "operation": case.call.operation,
            "layer": case.layer,
            "m": case.call.m,
            **{name.lower(): value for name, value in case.call.sizes},
            "sizes": f"M={case.call.m} {spelled(case.call.sizes)}",
            "backend": case.backend,
            **_found(case),
        },
        "differences": case.identity.differences(identity_of(facts)),
        "backend": backend or case.backend,
        "outcome": vars(outcome),
        "verdict": _verdict(case, outcome),
    }
    return report, 0 if outcome.status == "ok" else 1


def _found(case: Reproducer | FailedCall) -> dict[str, Any]:
    """What the server found."""
    from sglang_sm120.verification.failed_file import FailedCall

    if isinstance(case, FailedCall):
        return {"failed": f"{case.error}: {case.said}", "seed": case.seed}
    return {"wrong": case.wrong}


def _verdict(case: Reproducer | FailedCall, outcome: Outcome) -> str:
    """The outcome in words, beside what the server found."""
    from sglang_sm120.verification.failed_file import FailedCall
    from sglang_sm120.verification.failed_replay import failed_again

    if isinstance(case, FailedCall):
        if outcome.status == "ok":
            return "right here, with these versions and random operands"
        if failed_again(case, outcome):
            return "failed again"
    return outcome.status


def render(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what the server found, what differs here, and what the replay found."""
    console = console or Console()
    call, outcome = report["call"], report["outcome"]
    console.print(escape(f"{call['layer']}: {call['operation']} {call['sizes']}"))
    console.print(escape(f"in the server, {call['backend']}: {call.get('wrong') or call['failed']}"))
    if "seed" in call:
        console.print(f"the operands are random numbers, seed {call['seed']}")
    if report["differences"]:
        console.print(escape(f"differs here: {', '.join(report['differences'])}"))
    colour = "green" if outcome["status"] == "ok" else "yellow" if report["verdict"] == "unsupported" else "red"
    console.print(f"here, {report['backend']}: [{colour}]{report['verdict']}[/]: {escape(outcome['reason'])}")
