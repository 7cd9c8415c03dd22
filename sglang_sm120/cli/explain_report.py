"""``sglang-sm120 explain`` on the screen."""

from __future__ import annotations

from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_BAR_WIDTH = 28


def render_explain(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the bars, the shapes behind them, and what each flag can change."""
    console = console or Console()
    _print_head(console, report)
    _print_bars(console, report)
    _print_flags(console, report)
    _print_gemms(console, report)
    _print_speculative(console, report)
    for note in report["notes"]:
        console.print(f"[bold]→[/] {escape(note)}")
    console.print("[dim]Predicted from bytes and the bandwidth of the data sheet; a real step takes longer.[/]")


def _print_head(console: Console, report: dict[str, Any]) -> None:
    model, card, setup = report["model"], report["card"], report["setup"]
    console.print(
        f"[bold]{escape(model['name'])}[/] ({escape(model['origin'])}, {model['quantization']})", soft_wrap=True
    )
    console.print(
        escape(
            f"{card['name']}, {card['bandwidth_gb_s']:g} GB/s · TP {setup['tp']}, EP {setup['ep']} · "
            f"{setup['batch']} sequence(s), {setup['context']} tokens of context"
        ),
        soft_wrap=True,
    )
    weights = report["weights"]
    console.print(
        f"One decode step reads [bold]{weights['fp4_bytes'] / 1e9:.2f} GB of FP4[/] and "
        f"[bold]{weights['other_bytes'] / 1e9:.2f} GB of other[/] weights on each rank. "
        f"Floor: [bold]{report['floor_ms']:.2f} ms[/], {report['tokens_per_s']:.0f} tokens/s.",
        soft_wrap=True,
    )


def _print_bars(console: Console, report: dict[str, Any]) -> None:
    table = Table("what a step reads", "format", "MB", "ms", "", "changed by", pad_edge=False)
    for column in (2, 3):
        table.columns[column].justify = "right"
    table.columns[5].overflow = "fold"  # a flag that is cut off cannot be copied
    largest = max(bar["share"] for bar in report["bars"])
    for bar in report["bars"]:
        colour = "green" if "FP4" in bar["format"] else "cyan"
        table.add_row(
            bar["name"],
            bar["format"],
            f"{bar['bytes'] / 1e6:.1f}",
            f"{bar['ms']:.3f}",
            Bar(largest, 0, bar["share"], width=_BAR_WIDTH, color=colour),
            ", ".join(bar["changed_by"]) or "[dim]no flag[/]",
        )
    console.print(table)
    reduces = report["all_reduces"]
    waits = f" and {reduces['count']} all-reduces of {reduces['bytes'] / 1024:g} KiB" if reduces["count"] else ""
    console.print(f"At least {report['launches']} kernel launches{waits} per step.", soft_wrap=True)


def _print_flags(console: Console, report: dict[str, Any]) -> None:
    table = Table("flag", "reaches", "can change", "cannot change", pad_edge=False)
    table.columns[0].no_wrap = True
    for flag in report["flags"]:
        share = "[yellow]nothing here[/]" if flag["no_op"] else f"{100 * flag['share']:.0f} %"
        if flag["flag"] == "--speculative-moe-runner-backend":
            share = "the draft"
        table.add_row(flag["flag"], share, flag["can_change"], flag["cannot_change"])
    console.print(table)


def _print_gemms(console: Console, report: dict[str, Any]) -> None:
    table = Table("GEMM on one rank", "N", "K", "format", "layers", "per layer", "MB", pad_edge=False)
    for column in (1, 2, 4, 5, 6):
        table.columns[column].justify = "right"
    table.columns[0].overflow = "fold"
    for gemm in report["gemms"]:
        cells = (gemm["n"], gemm["k"], gemm["format"], gemm["layers"], f"{gemm['per_layer']:g}")
        table.add_row(escape(gemm["name"]), *map(str, cells), f"{gemm['bytes'] / 1e6:.1f}")
    console.print(table)


def _print_speculative(console: Console, report: dict[str, Any]) -> None:
    found = report["speculative"]
    if found is None:
        return
    if not found["served"]:
        console.print(f"Multi-token prediction: {escape(found['why_not'])}.", soft_wrap=True)
        return
    console.print(
        f"Multi-token prediction ({found['steps']} drafts, {found['verified_tokens']} tokens verified): reads "
        f"{found['verify_bytes'] / 1e9:.2f} GB to verify and {found['draft_bytes'] / 1e9:.2f} GB to draft, floor "
        f"{found['floor_ms']:.2f} ms. It pays from {found['break_even']:.2f} accepted tokens per step on.",
        soft_wrap=True,
    )
