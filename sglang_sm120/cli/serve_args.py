"""``sglang-sm120 serve-args``: the recommended launch command, as data and on the screen."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_sm120.cli.card_option import card_for, cards_here
from sglang_sm120.device import installed_versions
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.models.advice import advise, largest_tp, planned_facts
from sglang_sm120.models.architecture import read_model
from sglang_sm120.models.checkpoint import tensor_names
from sglang_sm120.models.quantization import read_quantization
from sglang_sm120.models.source import ModelSource, load_source, presets


def serve_args_report(model: str, *, tp: int | None, gpus: int | None, card: str | None, check: bool) -> dict[str, Any]:
    """Recommend a command; with ``check``, let SGLang's parser judge it.

    Raises:
        Sm120Error: there is no command that would work, or nothing here could check it.
    """
    source = load_source(model)
    described, quantization = read_model(source), read_quantization(source.quantization)
    target = card_for(card)
    facts, assumed = planned_facts(target, installed_versions())
    if tp is None:
        tp = largest_tp(described, quantization, gpus or (cards_here() if card is None else 1))
    tensors = tensor_names(source.folder) if source.folder is not None else None
    advice = advise(_path(model, source), described, quantization, target, facts, tp=tp, tensors=tensors)
    report = {**advice.as_data(), "assumed": list(assumed), "check": None}
    if check:
        report["check"] = _check(advice.arguments)
    return report


def _path(model: str, source: ModelSource) -> str:
    """What goes after ``--model-path``: a folder or a hub id, also where a config.json or a preset was named."""
    if source.origin == "folder":
        return str(source.folder)
    if source.origin == "hub cache":
        return model
    checkpoints: list[str] = presets()[source.label]["checkpoints"]
    return next((name for name in checkpoints if name.lower() == model.lower()), checkpoints[0])


def _check(arguments: list[str]) -> dict[str, Any]:
    if find_spec("sglang") is None:
        raise UnsupportedError("--check cannot be used: it asks SGLang's own parser, and SGLang is not installed here.")
    from sglang_sm120.host.parse_command import objection

    found = objection(arguments)
    return {"accepted": found is None, "objection": found}


def render_serve_args(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the command so that it can be copied, then the reasons."""
    console = console or Console()
    # Not through rich, which would break lines where a shell must not see a break.
    typer.echo(shell_command(report))
    typer.echo()
    table = Table("flag", "why", "source", pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"  # what is cut off can be neither copied nor looked up
    for flag in (*report["environment"], *report["flags"]):
        if flag["source"] != "you":
            table.add_row(f"{flag['name']} {escape(flag['value'])}", escape(flag["reason"]), escape(flag["source"]))
    for entry in report["left_out"]:
        table.add_row(f"[dim]without[/] {entry['name']}", escape(entry["reason"]), escape(entry["source"]))
    console.print(table)
    for need in report["needs"]:
        console.print(f"[yellow]→[/] {escape(need)}.", soft_wrap=True)
    console.print(f"Written for SGLang {report['sglang']}.", soft_wrap=True)
    if report["assumed"]:
        console.print(f"Not installed here, and assumed: {', '.join(report['assumed'])}.", soft_wrap=True)
    check = report["check"]
    if check is not None:
        verdict = (
            "[green]takes it[/]" if check["accepted"] else f"[red]does not take it[/]: {escape(check['objection'])}"
        )
        console.print(f"SGLang's parser {verdict}", soft_wrap=True)


def shell_command(report: dict[str, Any]) -> str:
    """Return the command with one flag on a line, ready for a shell."""
    variables = "".join(f"{entry['name']}={shlex.quote(entry['value'])} " for entry in report["environment"])
    lines = [f"{variables}python -m sglang.launch_server"]
    lines += [f"  {flag['name']} {shlex.quote(flag['value'])}" for flag in report["flags"]]
    return " \\\n".join(lines)
