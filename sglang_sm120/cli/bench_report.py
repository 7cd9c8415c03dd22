"""The report of ``sglang-sm120 bench``: as JSON data, and as tables for a person."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_sm120.backends.record import HostFacts
from sglang_sm120.cards import card_of_device
from sglang_sm120.cli.backends_report import device
from sglang_sm120.cli.bench import Session
from sglang_sm120.tuning.limits import floor
from sglang_sm120.tuning.run import Result

SCHEMA = 1
CPU_NOTE = "Times of a CPU: they say nothing about a GPU."


def report(session: Session) -> dict[str, Any]:
    """Describe a session as JSON data; times in microseconds."""
    facts = session.facts
    return {
        "schema": SCHEMA,
        "device": device(facts),
        "versions": dict(sorted(facts.versions.items())),
        "note": CPU_NOTE if facts.capability is None else "",
        "clocks": session.clocks,
        "left_out": session.left_out,
        "compile_seconds": {value: round(seconds, 2) for value, seconds in session.compile_seconds.items()},
        "ended": session.ended,
        "kept_in": session.kept_in,
        "cases": [_case(result, facts) for result in session.results],
    }


def _case(result: Result, facts: HostFacts) -> dict[str, Any]:
    limit = floor(result.m, result.shape.n, result.shape.k, _limits(facts))
    entry = result.entry
    return {
        "n": result.shape.n,
        "k": result.shape.k,
        "layers": list(result.shape.layers),
        "m": result.m,
        "dtype": entry.dtype if entry is not None else None,
        "fastest": entry.backend if entry is not None else None,
        "timings": {value: vars(timing) for value, timing in entry.timings.items()} if entry is not None else {},
        "problems": result.problems,
        "floor_us": limit[0] if limit else None,
        "limit": limit[1] if limit else None,
    }


def _limits(facts: HostFacts) -> dict[str, float]:
    """Figures of the card's data sheet, as far as they are known."""
    card = card_of_device(facts.device_name)
    if card is None:
        return {}
    limits = {"bytes_per_second": card.bandwidth_gb_s * 1e9}
    if card.fp4_tflops is not None:
        limits["fp4_per_second"] = card.fp4_tflops * 1e12
    return limits


def render(data: dict[str, Any], console: Console | None = None) -> None:
    """Print the report: one table for each shape, times in microseconds, the choice marked."""
    console = console or Console()
    console.print(escape(data["device"]["name"]))
    if data["note"]:
        console.print(f"[yellow]{data['note']}[/]")
    shapes = dict.fromkeys((case["n"], case["k"]) for case in data["cases"])
    for n, k in shapes:
        _render_shape([case for case in data["cases"] if (case["n"], case["k"]) == (n, k)], console)
    for value, reason in data["left_out"].items():
        console.print(escape(f"left out: {value} ({reason})"), soft_wrap=True)
    spent = ", ".join(f"{value} {seconds:.1f} s" for value, seconds in data["compile_seconds"].items())
    if spent:
        console.print(f"first calls, compilation included: {spent}")
    for when, text in zip(("before", "after"), data["clocks"], strict=False):
        if text:
            console.print(escape(f"clocks, temperature and power {when}: {text}"), soft_wrap=True)
    if data["kept_in"]:
        console.print(escape(f"kept in {data['kept_in']}"), soft_wrap=True)
    if data["ended"]:
        console.print(f"[red]{escape(data['ended'])}[/]; the same command goes on from here", soft_wrap=True)


def _render_shape(cases: list[dict[str, Any]], console: Console) -> None:
    values = list(dict.fromkeys(value for case in cases for value in case["timings"]))
    first = cases[0]
    layers = f" ({', '.join(first['layers'])})" if first["layers"] else ""
    table = Table(
        "M", *(f"{value}\nµs" for value in values), "of the limit", title=f"N={first['n']} K={first['k']}{layers}"
    )
    for case in cases:
        cells = [_cell(case, value) for value in values]
        table.add_row(str(case["m"]), *cells, _share(case))
    console.print(table)
    problems = {f"{value}: {reason}" for case in cases for value, reason in case["problems"].items()}
    for problem in sorted(problems):
        console.print(escape(f"  {problem}"), soft_wrap=True)


def _cell(case: dict[str, Any], value: str) -> str:
    timing = case["timings"].get(value)
    if timing is None:
        return "–"
    text = f"{timing['median']:.1f} ± {(timing['high'] - timing['low']) / 2:.1f}"
    return f"[bold green]{text}[/]" if value == case["fastest"] else text


def _share(case: dict[str, Any]) -> str:
    if case["floor_us"] is None or case["fastest"] is None:
        return "–"
    return f"{100 * case['floor_us'] / case['timings'][case['fastest']]['median']:.0f} % {case['limit']}"
