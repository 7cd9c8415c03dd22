"""The launch command that ``serve-args`` writes for a release, given to that release's own parser."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_sm120.cards import find_card
from sglang_sm120.models.advice import advise, planned_facts
from sglang_sm120.models.architecture import read_model
from sglang_sm120.models.quantization import read_quantization
from sglang_sm120.models.source import load_source
from tests.matrix.conftest import interpreter_of
from tools.envs import RELEASES

pytestmark = pytest.mark.matrix

ROOT = Path(__file__).resolve().parents[2]
#: The first and the last release of every spelling of a flag, with the FlashInfer that each asks for.
BORDERS = {"0.5.9": "0.6.3", "0.5.13.post1": "0.6.12", "0.5.14": "0.6.12", "0.5.20": "0.6.18", "0.5.23": "0.7.2"}


@pytest.mark.parametrize("release", BORDERS)
def test_the_parser_of_a_release_takes_the_command(
    release: str, record_sampled: Callable[[str, int, int], None]
) -> None:
    record_sampled("serve-args parsed", len(BORDERS), len(RELEASES))
    # It has every kind of flag: two runners, speculation, hybrid state, cache dtype, attention, memory.
    model = "nvidia/Qwen3.5-397B-A17B-NVFP4"
    source, card = load_source(model), find_card("rtx-pro-6000")
    facts, _ = planned_facts(card, {"sglang": release, "flashinfer": BORDERS[release]})
    found = advise(model, read_model(source), read_quantization(source.quantization), card, facts, tp=8)
    command = [interpreter_of(release), "-m", "sglang_sm120.host.parse_command", *found.arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
