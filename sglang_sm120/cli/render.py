"""Reports as text for a person. The same data as ``--json``, unredacted."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_STATUS = {"ok": "[green]ok[/]", "refused": "[red]refused[/]", "unsupported": "[yellow]no[/]"}
_SEVERITY = {"stop": "[red]stop[/]", "warning": "[yellow]warning[/]"}


def render_backends(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the table of values, and what ``auto`` takes."""
    console = console or Console()
    _print_device(console, report)
    table = Table("value", "here", "why, and what helps", "added by", pad_edge=False)
    for entry in report["backends"]:
        lines = [entry["summary"] + "."]
        if entry["status"] != "ok":
            lines.append(f"{entry['reason']}; {entry['remedy']}." if entry["remedy"] else f"{entry['reason']}.")
        lines += entry["warnings"]
        if entry["source"]:
            lines.append(f"Source: {entry['source']['ref']}")
        why = "\n".join(escape(line) for line in lines)
        table.add_row(entry["value"], _STATUS[entry["status"]], why, entry["offered_by"] or "nobody")
    console.print(table)
    auto = report["auto"]
    console.print(escape(f"auto: {auto['backend']} ({auto['reason']})" if auto["backend"] else auto["reason"] + "."))
    _print_moe(console, report["moe"])


def _print_moe(console: Console, moe: dict[str, Any]) -> None:
    """Print the runners of NVFP4 experts, and what ``--moe-runner-backend auto`` ends in for each kind."""
    table = Table("MoE runner", "experts", "here", "why, and what helps", pad_edge=False)
    for entry in moe["runners"]:
        for position, judged in enumerate(entry["experts"]):
            lines = [entry["summary"] + "."] if position == 0 else []
            if judged["status"] != "ok" or judged["runner"] != entry["value"]:
                lines.append("; ".join(filter(None, (judged["reason"], judged["remedy"]))) + ".")
            lines += judged["warnings"]
            if judged["source"]:
                lines.append(f"Source: {judged['source']['ref']}")
            kinds = "\n".join(judged["quantizations"])
            why = "\n".join(escape(line) for line in lines)
            table.add_row(entry["value"] if position == 0 else "", kinds, _STATUS[judged["status"]], why)
    console.print(table)
    for kind, auto in moe["auto"].items():
        ends_in = f"{auto['value']}: {auto['reason']}" if auto["value"] else auto["reason"]
        console.print(escape(f"auto for {kind} experts: {ends_in}."), soft_wrap=True)


def render_doctor(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the installation, then every finding with its fix."""
    console = console or Console()
    _print_device(console, report)
    versions = [f"sglang-sm120 {report['package']}", f"Python {report['python']}"]
    versions += [f"{name} {version}" for name, version in report["versions"].items()]
    _section(console, "Versions", versions)
    hooks = report["hooks"]
    loaded = [f".pth {'active' if hooks['pth_active'] else 'not active'}"]
    loaded.append(f"SGLang plugin {'registered' if hooks['entry_point'] else 'not registered'}")
    _section(console, "Loaded by", loaded)
    matching = sum(state == "matches" for state in hooks["seams"].values())
    _section(console, "Hooks", [f"{matching} of {len(hooks['seams'])} match the installed SGLang", hooks["note"]])
    _section(console, "Settings", [f"{s['name']} = {s['value']} ({s['origin']})" for s in report["settings"]])
    paths = report["paths"]
    folders = [*(f"package {path}" for path in paths["package"]), f"cache {paths['cache']}"]
    _section(console, "Paths", [*folders, f"site-packages {paths['site_packages']}"])
    here = [f"{e['value']}: {e['status']}" for e in report["backends"]]
    _section(console, "Backends", [*here, "(why: sglang-sm120 backends)"])
    experts = [f"auto for {kind}: {auto['value'] or auto['reason']}" for kind, auto in report["moe"]["auto"].items()]
    _section(console, "MoE runners", [*experts, "(why: sglang-sm120 backends)"])
    operators: dict[str, list[str]] = {}
    for name, implementation in report["operators"].items():
        operators.setdefault(implementation, []).append(name)
    if operators:
        lines = [f"{', '.join(names)}: {implementation}" for implementation, names in operators.items()]
        _section(console, "SGLang's own NVFP4 operators", lines)
    if report["libraries"]:
        _section(console, "Libraries with GPU code", [_library(entry) for entry in report["libraries"]])
    decision = report["decision"]
    if decision is not None:
        chosen = decision["backend"] or "left to SGLang"
        _section(console, "A server started now", [f"{chosen} ({decision['origin']}: {decision['reason']})"])
    for finding in report["findings"]:
        console.print(f"{_SEVERITY[finding['severity']]} {escape(finding['message'])}", soft_wrap=True)
        console.print(f"  fix: {escape(finding['fix'])}", soft_wrap=True)
    stops = sum(finding["severity"] == "stop" for finding in report["findings"])
    console.print("[green]Nothing stops a start.[/]" if report["ok"] else f"[red]{stops} finding(s) stop a start.[/]")


def _library(entry: dict[str, Any]) -> str:
    here = entry["units_for_this_card"]
    runs = "" if here is None else f"; {here} of {entry['units']} files have code for this card"
    return f"{entry['owner']}: {', '.join(entry['targets'])}{runs}"


def _print_device(console: Console, report: dict[str, Any]) -> None:
    device = report["device"]
    capability = f", compute capability {device['capability']}" if device["capability"] else ""
    console.print(escape(f"{device['name']}{capability}"), soft_wrap=True)


def _section(console: Console, title: str, lines: list[str]) -> None:
    console.print(f"[bold]{title}[/]")
    for line in lines:
        if line:
            console.print(f"  {escape(line)}", soft_wrap=True)
