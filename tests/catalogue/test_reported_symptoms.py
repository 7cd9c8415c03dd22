"""Reported symptoms that no room of its own protects against: what a recommended command must not lead into."""

from __future__ import annotations

from functools import cache

import pytest

from sglang_sm120.backends.moe_verdict import moe_verdict
from sglang_sm120.cards import Card, cards
from sglang_sm120.errors import ConfigError
from sglang_sm120.models.advice import advise, planned_facts
from sglang_sm120.models.architecture import read_model
from sglang_sm120.models.quantization import read_quantization
from sglang_sm120.models.source import load_source, presets
from tests.dispatch.machines import RTX, machine

CARDS = [card for card in cards().values() if card.is_sm12x]
GIB = 2**30


@cache
def commands(card: Card) -> dict[str, dict[str, str]]:
    """The flags that serve-args recommends for every preset that fits on some number of these cards, by model."""
    found = {}
    facts, _ = planned_facts(card, {})
    for name in presets():
        source = load_source(name)
        for tp in (1, 2, 4, 8):
            try:
                advice = advise(name, read_model(source), read_quantization(source.quantization), card, facts, tp=tp)
            except ConfigError:
                continue  # too large for so few
            found[f"{name} on {tp}"] = {flag.name: flag.value for flag in advice.flags}
    assert found
    return found


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_an_fp8_cache_is_never_left_to_flashinfers_attention(card: Card) -> None:
    """vllm#41651: random text or an illegal access with CUDA graphs, which are on by default."""
    with_fp8 = {model: flags for model, flags in commands(card).items() if "fp8" in flags.get("--kv-cache-dtype", "")}
    assert with_fp8
    assert {flags.get("--attention-backend") for flags in with_fp8.values()} == {"triton"}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_cuda_graphs_have_room_beside_the_memory_that_a_server_takes_at_its_start(card: Card) -> None:
    """sglang#35777: about 5 GB for them; a guide's fraction left less on a 32 GB card. The same report has
    torch.compile beside decode graphs six times slower."""
    for model, flags in commands(card).items():
        left = card.memory_gb * GIB * (1 - float(flags["--mem-fraction-static"]))
        assert left >= min(5e9, 0.19 * card.memory_gb * GIB), model  # the smallest card has no 5 GB to spare
        assert not [flag for flag in flags if "torch-compile" in flag], model


@pytest.mark.parametrize("card", [card for card in CARDS if card.unified_memory], ids=lambda card: card.key)
def test_a_card_that_shares_its_memory_leaves_a_quarter_to_the_system(card: Card) -> None:
    """dgx-spark-playbooks#97: the machine resets when the driver runs out of it, and nothing can be caught then."""
    for model, flags in commands(card).items():
        assert float(flags["--mem-fraction-static"]) <= 0.75, model


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.key)
def test_no_command_stores_keys_and_values_as_fp4(card: Card) -> None:
    """vllm#49011: the scales of V have another layout on SM12x."""
    assert {flags.get("--kv-cache-dtype") for flags in commands(card).values()} <= {None, "fp8_e4m3"}


def test_experts_that_wrote_out_of_bounds_are_refused_there_and_warned_of_in_later_releases() -> None:
    """vllm#50189, flashinfer#5446."""
    for release in ("0.6.17", "0.6.18", "0.7.0"):
        old = moe_verdict("flashinfer_b12x", "modelopt_fp4", machine(RTX, flashinfer=release))
        assert old is not None
        assert old.status == "unsupported", release
    new = moe_verdict("flashinfer_b12x", "modelopt_fp4", machine(RTX))
    assert new is not None
    assert [warning for warning in new.warnings if "flashinfer#5446" in warning]
