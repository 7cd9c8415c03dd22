"""What ``explain`` says about a model: which flag reaches which bytes, and which reaches none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_sm120.cards import card_of_device, cards, find_card
from sglang_sm120.errors import ConfigError
from sglang_sm120.models.architecture import read_model
from sglang_sm120.models.budget import Setup
from sglang_sm120.models.explain import explain
from sglang_sm120.models.quantization import read_quantization
from sglang_sm120.models.source import load_source, presets


def report(name: str, card: str = "rtx-pro-6000", **setup: int) -> dict[str, Any]:
    source = load_source(name)
    quantization = read_quantization(source.quantization)
    return explain(source, read_model(source), quantization, find_card(card), Setup(**setup))


def flags(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {flag["flag"]: flag for flag in found["flags"]}


class TestQwen35:
    def test_the_dense_flag_reaches_nothing_and_the_runner_does(self) -> None:
        found = report("nvidia/Qwen3.5-397B-A17B-NVFP4", tp=8)
        assert flags(found)["--fp4-gemm-backend"]["no_op"]
        assert flags(found)["--moe-runner-backend"]["bars"] == ["routed experts (NVFP4)"]
        assert flags(found)["--moe-runner-backend"]["share"] == pytest.approx(0.531 / 3.07, abs=0.01)
        assert found["weights"]["fp4_bytes"] == 530_841_600
        assert found["weights"]["other_bytes"] == 2_462_679_040
        assert any("--fp4-gemm-backend has no layer to serve" in note for note in found["notes"])

    def test_the_floor_is_the_bytes_over_the_bandwidth(self) -> None:
        found = report("qwen3.5-397b-a17b", tp=8)
        total = sum(bar["bytes"] for bar in found["bars"])
        assert found["floor_ms"] == pytest.approx(total / 1792e9 * 1e3)
        assert sum(bar["ms"] for bar in found["bars"]) == pytest.approx(found["floor_ms"])
        assert sum(bar["share"] for bar in found["bars"]) == pytest.approx(1)
        assert found["tokens_per_s"] == pytest.approx(1e3 / found["floor_ms"])
        slower = report("qwen3.5-397b-a17b", "rtx-pro-6000-server", tp=8)
        assert slower["floor_ms"] / found["floor_ms"] == pytest.approx(1792 / 1597)

    def test_verifying_more_tokens_reads_more_experts(self) -> None:
        found = report("qwen3.5-397b-a17b", tp=8)
        speculative = found["speculative"]
        experts = 512 * (1 - (1 - 10 / 512) ** 4)
        more = (experts - 10) * 530_841_600 / 10 + 3 * next(
            bar["bytes"] for bar in found["bars"] if bar["name"] == "recurrent state"
        )
        plain = sum(bar["bytes"] for bar in found["bars"])
        assert speculative["verify_bytes"] == pytest.approx(plain + more)
        assert speculative["break_even"] == pytest.approx(
            (speculative["verify_bytes"] + speculative["draft_bytes"]) / plain
        )


def test_a_dense_model_is_the_other_way_round() -> None:
    found = report("qwen3-32b")
    assert "--moe-runner-backend" in flags(found)
    assert flags(found)["--moe-runner-backend"]["no_op"]
    assert flags(found)["--fp4-gemm-backend"]["share"] > 0.8
    assert found["speculative"] is None
    assert not any(name.startswith("--speculative") for name in flags(found))


def test_a_mixed_checkpoint_has_bars_of_each_format() -> None:
    found = report("qwen3.6-35b-a3b")
    levers = {(bar["name"], bar["format"]): bar["changed_by"] for bar in found["bars"]}
    assert levers["attention", "FP8"] == ["--fp8-gemm-backend"]
    assert levers["routed experts", "NVFP4, weights only"] == ["--moe-runner-backend"]
    assert levers["shared expert", "NVFP4, weights only"] == ["--fp4-gemm-backend"]
    assert levers["router", "BF16"] == []
    assert any("weight-only path" in note for note in found["notes"])
    assert not any("weight-only path" in note for note in report("qwen3-32b")["notes"])


def test_prediction_modules_that_sglang_has_no_class_for() -> None:
    found = report("minimax-m2.5")
    assert not found["speculative"]["served"]
    assert found["speculative"]["why_not"]


@pytest.mark.parametrize("name", list(presets()))
@pytest.mark.parametrize("card", list(cards()))
def test_every_preset_is_explained_on_every_card(name: str, card: str) -> None:
    found = report(name, card, tp=4, batch=4)
    json.dumps(found)
    assert found["predicted"]
    assert found["model"]["sources"]
    assert found["card"]["sources"]
    assert 0 < found["floor_ms"] < 200


class TestCards:
    @pytest.mark.parametrize(
        ("device", "key"),
        [
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
            ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-max-q"),
            ("NVIDIA GeForce RTX 5090", "rtx-5090"),
            ("NVIDIA GB10", "dgx-spark"),
            ("NVIDIA H200", "h200"),
        ],
    )
    def test_a_device_is_recognised(self, device: str, key: str) -> None:
        card = card_of_device(device)
        assert card is not None
        assert card.key == key

    @pytest.mark.parametrize(
        "device", ["NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA H100", "no CUDA device"]
    )
    def test_another_device_is_not_taken_for_one(self, device: str) -> None:
        assert card_of_device(device) is None

    def test_an_unknown_name_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"--card='rtx-6090'.*rtx-5090"):
            find_card("rtx-6090")
