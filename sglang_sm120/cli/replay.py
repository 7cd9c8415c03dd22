"""``sglang-sm120 replay``: run a wrong call of a server alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

SCHEMA = 1


def replay(path: Path, backend: str | None, timeout: float) -> tuple[dict[str, Any], int]:
    """Run the call of a reproducer and return the report with the exit code: 0 if the result is right, else 1."""
    from sglang_sm120.device import collect_facts
    from sglang_sm120.records import identity_of
    from sglang_sm120.verification import replay as room
    from sglang_sm120.verification import reproducer
    from sglang_sm120.verification.served import spelled

    case = reproducer.read(path)
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
            "wrong": case.wrong,
        },
        "differences": case.identity.differences(identity_of(facts)),
        "backend": backend or case.backend,
        "outcome": vars(outcome),
    }
    return report, 0 if outcome.status == "ok" else 1


def render(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what the server found, what differs here, and what the replay found."""
    console = console or Console()
    call, outcome = report["call"], report["outcome"]
    console.print(escape(f"{call['layer']}: {call['operation']} {call['sizes']}"))
    console.print(escape(f"in the server, {call['backend']}: {call['wrong']}"))
    if report["differences"]:
        console.print(escape(f"differs here: {', '.join(report['differences'])}"))
    colour = "green" if outcome["status"] == "ok" else "yellow" if outcome["status"] == "unsupported" else "red"
    console.print(f"here, {report['backend']}: [{colour}]{outcome['status']}[/] {escape(outcome['reason'])}")
