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
from sglang_sm120.tuning.expert_cases import ExpertShape
from sglang_sm120.tuning.limits import expert_floor, floor
from sglang_sm120.tuning.results import ExpertEntry
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
        "left_out_runners": session.left_out_runners,
        "compile_seconds": _rounded(session.compile_seconds),
        "expert_compile_seconds": _rounded(session.expert_compile_seconds),
        "ended": session.ended,
        "kept_in": session.kept_in,
        "cases": [_case(result, facts) for result in session.results],
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {value: round(spent, 2) for value, spent in seconds.items()}


def _case(result: Result, facts: HostFacts) -> dict[str, Any]:
    shape, entry = result.shape, result.entry
    if isinstance(shape, ExpertShape):
        limit = expert_floor(result.m, shape, _limits(facts))
        sizes = {**vars(shape), "active_experts": round(shape.active(result.m), 2)}
        sizes["launches"] = dict(entry.launches) if isinstance(entry, ExpertEntry) else {}
    else:
        limit = floor(result.m, shape.n, shape.k, _limits(facts))
        sizes = {"n": shape.n, "k": shape.k}
    return {
        **sizes,
        "label": shape.label,
        "layers": list(shape.layers),
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
    for label in dict.fromkeys(case["label"] for case in data["cases"]):
        _render_shape([case for case in data["cases"] if case["label"] == label], console)
    for left_out, what in ((data["left_out"], ""), (data["left_out_runners"], " for experts")):
        for value, reason in left_out.items():
            console.print(escape(f"left out{what}: {value} ({reason})"), soft_wrap=True)
    for seconds, what in ((data["compile_seconds"], ""), (data["expert_compile_seconds"], " of experts")):
        spent = ", ".join(f"{value} {spent:.1f} s" for value, spent in seconds.items())
        if spent:
            console.print(f"first calls{what}, compilation included: {spent}")
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
    table = Table("M", *(f"{value}\nµs" for value in values), "of the limit", title=f"{first['label']}{layers}")
    for case in cases:
        cells = [_cell(case, value) for value in values]
        table.add_row(str(case["m"]), *cells, _share(case))
    console.print(table)
    launches = [f"{value} {_span(counts)}" for value in values if (counts := _counts(cases, value))]
    if launches:
        console.print(f"  launches of one layer: {', '.join(launches)}", soft_wrap=True)
    problems = {f"{value}: {reason}" for case in cases for value, reason in case["problems"].items()}
    for problem in sorted(problems):
        console.print(escape(f"  {problem}"), soft_wrap=True)


def _counts(cases: list[dict[str, Any]], value: str) -> list[int]:
    return [case["launches"][value] for case in cases if value in case.get("launches", {})]


def _span(counts: list[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


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
