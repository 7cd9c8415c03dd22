"""``sglang-sm120 check-checkpoint`` on the screen."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sglang_sm120.models.checkpoint import check_checkpoint

#: Lines of one kind on the screen; --json has more.
_SHOWN = 20
_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


def check_with_progress(path: Path, tp: int | None, *, quiet: bool) -> dict[str, Any]:
    """Check a checkpoint; a progress bar on the error stream shows the bytes of scales, if that is a terminal."""
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("scales"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("scales", total=None)
        return check_checkpoint(path, tp=tp, progress=lambda done, total: bar.update(task, completed=done, total=total))


def render_checkpoint(report: dict[str, Any], console: Console | None = None) -> None:
    """Print one line per finding, a table of their kinds, and a summary."""
    console = console or Console()
    shown: dict[str, int] = defaultdict(int)
    for finding in report["findings"]:
        shown[finding["code"]] += 1
        if shown[finding["code"]] > _SHOWN:
            continue
        text = f"{finding['tensor']} = {finding['value']}: {finding['what']}; {finding['fix']}"
        colour = _COLOURS[finding["severity"]]
        line = f"[{colour}]{finding['severity']}[/] {escape(finding['code'])}: {escape(text)}"
        console.print(line, soft_wrap=True, highlight=False)
    if report["counts"]:
        _print_kinds(console, report["counts"])
    modules = ", ".join(f"{count} {kind}" for kind, count in report["modules"].items())
    console.print(
        escape(
            f"{report['files']} file(s), {report['tensors']} tensors, weights: {modules or 'none'}; "
            f"{report['scale_bytes'] / 1e6:.1f} MB of scales read."
        ),
        soft_wrap=True,
    )
    if report["ok"]:
        console.print(f"[green]No error[/], {report['warnings']} warning(s).")
    else:
        console.print(f"[red]{report['errors']} error(s)[/], {report['warnings']} warning(s).")


def _print_kinds(console: Console, kinds: list[dict[str, Any]]) -> None:
    table = Table("", "finding", "tensors", "", pad_edge=False)
    for kind in kinds:
        rest = kind["count"] - _SHOWN
        more = f"{rest} more than shown; --json lists them" if rest > 0 else ""
        colour = _COLOURS[kind["severity"]]
        table.add_row(f"[{colour}]{kind['severity']}[/]", escape(kind["code"]), str(kind["count"]), more)
    console.print(table)
