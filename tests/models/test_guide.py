"""The guide shows what the commands really print."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from sglang_sm120.cards import find_card
from sglang_sm120.cli.explain_report import render_explain
from sglang_sm120.cli.serve_args import shell_command
from sglang_sm120.models.advice import advise, planned_facts
from sglang_sm120.models.architecture import read_model
from sglang_sm120.models.budget import Setup
from sglang_sm120.models.explain import explain
from sglang_sm120.models.quantization import read_quantization
from sglang_sm120.models.source import load_source

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")
MODEL = "nvidia/Qwen3.5-397B-A17B-NVFP4"


def test_the_bars_are_those_of_the_command() -> None:
    source = load_source(MODEL)
    quantization = read_quantization(source.quantization)
    setup = Setup(tp=8, kv_bytes=1)
    report = explain(source, read_model(source), quantization, find_card("rtx-pro-6000"), setup)
    screen = io.StringIO()
    render_explain(report, Console(file=screen, width=118))
    printed = [line.rstrip() for line in screen.getvalue().splitlines()]
    shapes = next(i for i, line in enumerate(printed) if "GEMM on one rank" in line) - 1
    assert "\n".join(printed[:shapes]) in GUIDE
    assert "\n".join(line for line in printed[shapes:] if line[0] not in "┏┃┡│└") in GUIDE


def test_the_launch_command_is_that_of_the_newest_release() -> None:
    source, card = load_source(MODEL), find_card("rtx-pro-6000")
    facts, _ = planned_facts(card, {})
    found = advise(MODEL, read_model(source), read_quantization(source.quantization), card, facts, tp=8)
    assert shell_command(found.as_data()) in GUIDE
