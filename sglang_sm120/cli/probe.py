"""``sglang-sm120 probe``: is each backend right on this card?"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_sm120.backends.record import HostFacts
from sglang_sm120.cli.backends_report import device
from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.probing import record
from sglang_sm120.probing.record import FAILED, Outcome

SCHEMA = 1
#: A day; the system's clocks take no infinite wait.
_LONGEST_TIMEOUT = 86400
_COLOURS = {"ok": "green", "wrong": "red", "crash": "red", "timeout": "red", "unsupported": "yellow"}


def probe(values: list[str], timeout: float, *, as_json: bool) -> tuple[dict[str, Any], int]:
    """Probe, keep the record after each verdict, and return the report with the exit code.

    The exit code is 1 if something that was tried did not pass, or if a value that was named cannot run here.
    """
    from sglang_sm120.device import collect_facts
    from sglang_sm120.probing import run
    from sglang_sm120.records import identity_of

    if not timeout <= _LONGEST_TIMEOUT:  # NaN is no number of seconds either
        raise ConfigError(bad_value("--timeout", timeout, f"give seconds, at most {_LONGEST_TIMEOUT}"))
    names = run.subjects(values)
    facts = collect_facts()
    identity = identity_of(facts)
    record.require_place(identity)
    outcomes: dict[str, Outcome] = {}
    experts: dict[str, Outcome] = {}
    runners = run.runners(values)
    console = Console(stderr=True, quiet=as_json)
    with console.status("probing") as status:
        judged = run.probe(names, facts, timeout)
        for position, name in enumerate(names, start=1):
            status.update(escape(f"probing {name} ({position} of {len(names)}), at most {timeout:g} s"))
            _, outcomes[name] = next(judged)
            record.save(identity, {name: outcomes[name]})
        judged = run.probe_experts(runners, facts, timeout)
        for position, name in enumerate(runners, start=1):
            status.update(escape(f"probing experts of {name} ({position} of {len(runners)}), at most {timeout:g} s"))
            _, experts[name] = next(judged)
            record.save(identity, {}, {name: experts[name]})
    failed = any(outcome.status in FAILED for outcome in (*outcomes.values(), *experts.values()))
    missing = any(outcomes[value].status == "unsupported" for value in values)
    return _report(facts, outcomes, experts), 1 if failed or missing else 0


def _report(facts: HostFacts, outcomes: dict[str, Outcome], experts: dict[str, Outcome]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "device": device(facts),
        "versions": dict(sorted(facts.versions.items())),
        "outcomes": {name: vars(outcome) for name, outcome in outcomes.items()},
        "experts": {name: vars(outcome) for name, outcome in experts.items()},
    }


def render(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the verdicts as a table."""
    console = console or Console()
    capability = report["device"]["capability"]
    console.print(escape(report["device"]["name"] + (f", compute capability {capability}" if capability else "")))
    table = Table("what", "verdict", "seconds", "why", pad_edge=False)
    experts = {f"experts: {name}": outcome for name, outcome in report["experts"].items()}
    for name, outcome in {**report["outcomes"], **experts}.items():
        colour = _COLOURS[outcome["status"]]
        verdict = f"[{colour}]{outcome['status']}[/]"
        table.add_row(name, verdict, f"{outcome['seconds']:.1f}", escape(outcome["reason"]))
    console.print(table)
