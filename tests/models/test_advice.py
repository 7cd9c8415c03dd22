"""The launch command: what is recommended, what is left out, and what stops it."""

from __future__ import annotations

import pytest

from sglang_sm120.cards import find_card
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.host.seams import LAST_TESTED
from sglang_sm120.models.advice import ASSUMED, Advice, advise, largest_tp, planned_facts
from sglang_sm120.models.architecture import read_model
from sglang_sm120.models.quantization import Quantization, read_quantization
from sglang_sm120.models.source import load_source, presets

QWEN = "nvidia/Qwen3.5-397B-A17B-NVFP4"
CT_NVFP4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"num_bits": 4},
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}


def advice(
    name: str,
    *,
    tp: int = 8,
    card: str = "rtx-pro-6000",
    quantization: Quantization | None = None,
    tensors: frozenset[str] | None = None,
    **versions: str,
) -> Advice:
    source = load_source(name)
    facts, _ = planned_facts(find_card(card), versions)
    quantization = quantization or read_quantization(source.quantization)
    return advise(name, read_model(source), quantization, find_card(card), facts, tp=tp, tensors=tensors)


def values(found: Advice) -> dict[str, str]:
    return {flag.name: flag.value for flag in found.flags}


def left_out(found: Advice) -> dict[str, str]:
    return {entry.name: entry.reason for entry in found.left_out}


class TestQwen35On8Cards:
    def test_the_configuration_that_ran(self) -> None:
        """As local-inference-lab/rtx6kpro reports it, without the flag that does nothing there."""
        assert values(advice(QWEN)) == {
            "--model-path": QWEN,
            "--tp-size": "8",
            "--quantization": "modelopt_fp4",
            "--moe-runner-backend": "flashinfer_cutlass",
            "--speculative-algorithm": "NEXTN",
            "--speculative-num-steps": "3",
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": "4",
            "--speculative-moe-runner-backend": "triton",
            "--mamba-radix-cache-strategy": "extra_buffer",
            "--page-size": "64",
            "--kv-cache-dtype": "fp8_e4m3",
            "--attention-backend": "triton",
            "--mem-fraction-static": "0.85",
        }

    def test_the_dense_flag_is_left_out_with_its_reason(self) -> None:
        assert "only the routed experts are FP4" in left_out(advice(QWEN))["--fp4-gemm-backend"]

    def test_the_fix_of_the_experts_race_is_named(self) -> None:
        assert any("flashinfer#2913" in need and "0.6.8" in need for need in advice(QWEN).needs)

    def test_a_flashinfer_without_the_fix_stops_it(self) -> None:
        with pytest.raises(UnsupportedError, match=r"FlashInfer 0\.6\.7"):
            advice(QWEN, sglang="0.5.16", flashinfer="0.6.7")

    @pytest.mark.parametrize(
        ("release", "flashinfer", "strategy", "environment"),
        [
            ("0.5.10", "0.6.7.post2", "--mamba-scheduler-strategy", {"SGLANG_ENABLE_SPEC_V2": "1"}),
            ("0.5.11", "0.6.8.post1", "--mamba-scheduler-strategy", {}),
            ("0.5.13.post1", "0.6.12", "--mamba-scheduler-strategy", {}),
            ("0.5.14", "0.6.12", "--mamba-radix-cache-strategy", {}),
            ("0.5.20", "0.6.18", "--mamba-radix-cache-strategy", {}),
        ],
    )
    def test_names_follow_the_release(
        self, release: str, flashinfer: str, strategy: str, environment: dict[str, str]
    ) -> None:
        found = advice(QWEN, sglang=release, flashinfer=flashinfer)
        assert [name for name in values(found) if "mamba" in name] == [strategy]
        assert {entry.name: entry.value for entry in found.environment} == environment

    def test_half_of_the_cards_are_enough_and_a_quarter_is_not(self) -> None:
        assert values(advice(QWEN, tp=4))["--tp-size"] == "4"
        with pytest.raises(ConfigError, match=r"--tp=2 .*take more cards"):
            advice(QWEN, tp=2)


class TestOtherModels:
    def test_a_dense_model_lets_auto_choose(self) -> None:
        found = advice("qwen3-32b", tp=1)
        assert values(found)["--fp4-gemm-backend"] == "auto"
        assert "flashinfer_cutlass" in next(f.reason for f in found.flags if f.name == "--fp4-gemm-backend")
        assert "--moe-runner-backend" not in values(found)
        assert {"--speculative-algorithm", "--kv-cache-dtype"} <= set(left_out(found))
        assert "--attention-backend" not in values(found)

    def test_a_mixed_checkpoint_with_weight_only_experts(self) -> None:
        whole = advice("qwen3.6-35b-a3b", tp=1)
        found = values(whole)
        assert found["--quantization"] == "modelopt_mixed"
        assert "weight-only" in left_out(whole)["--fp4-gemm-backend"]
        assert found["--moe-runner-backend"] == "marlin"
        assert found["--speculative-moe-runner-backend"] == "triton"

    def test_a_mixed_checkpoint_needs_sglang_0_5_10(self) -> None:
        with pytest.raises(UnsupportedError, match=r"0\.5\.9 cannot load mixed"):
            advice("qwen3.6-35b-a3b", tp=1, sglang="0.5.9", flashinfer="0.6.3")

    def test_compressed_tensors_experts_are_left_to_sglang(self) -> None:
        found = values(advice("qwen3-30b-a3b", tp=1, quantization=read_quantization(CT_NVFP4)))
        assert (found["--quantization"], found["--moe-runner-backend"]) == ("compressed-tensors", "auto")

    def test_experts_without_fp4_need_no_runner(self) -> None:
        found = advice("qwen3-30b-a3b", tp=1, quantization=Quantization())
        assert "--moe-runner-backend" not in values(found)
        assert "--quantization" not in values(found)
        assert "no layer is FP4" in left_out(found)["--fp4-gemm-backend"]

    def test_prediction_modules_that_sglang_cannot_use(self) -> None:
        assert "no draft class" in left_out(advice("minimax-m2.5", tp=4))["--speculative-algorithm"]

    @pytest.mark.parametrize(("name", "prefix"), [(QWEN, "mtp.layers.0"), ("deepseek-v3.1", "model.layers.61")])
    def test_prediction_weights_that_were_not_exported(self, name: str, prefix: str) -> None:
        without = advice(name, tensors=frozenset({"lm_head.weight", "model.layers.0.mlp.down_proj.weight"}))
        assert f"no tensor is named {prefix}." in left_out(without)["--speculative-algorithm"]
        assert not any("speculative" in flag for flag in values(without))
        assert "--speculative-algorithm" in values(advice(name, tensors=frozenset({f"{prefix}.mlp.x.weight"})))

    def test_latent_attention_is_left_to_sglang(self) -> None:
        assert "--attention-backend" in left_out(advice("deepseek-v3.1"))

    @pytest.mark.parametrize(
        ("card", "fraction"), [("rtx-5090", "0.8"), ("dgx-spark", "0.75"), ("rtx-pro-6000", "0.85")]
    )
    def test_the_memory_that_is_left_depends_on_the_card(self, card: str, fraction: str) -> None:
        assert values(advice("qwen3-30b-a3b", tp=1, card=card))["--mem-fraction-static"] == fraction

    def test_another_card_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match=r"H200.*capability 9\.0"):
            advice(QWEN, card="h200")


@pytest.mark.parametrize("name", list(presets()))
def test_every_flag_has_a_reason_and_a_source(name: str) -> None:
    source = load_source(name)
    found = advice(name, tp=largest_tp(read_model(source), read_quantization(source.quantization), 8))
    for entry in (*found.flags, *found.environment, *found.left_out):
        assert entry.reason
        assert entry.source
    assert len(found.arguments) == 2 * len(found.flags)


class TestRanks:
    @pytest.mark.parametrize(("gpus", "tp"), [(1, 1), (3, 2), (6, 4), (8, 8), (9, 8)])
    def test_as_many_as_can_share_every_layer(self, gpus: int, tp: int) -> None:
        source = load_source(QWEN)
        assert largest_tp(read_model(source), read_quantization(source.quantization), gpus) == tp

    def test_no_card_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="--gpus=0"):
            largest_tp(read_model(load_source(QWEN)), Quantization(), 0)


def test_what_is_not_installed_is_assumed_and_named() -> None:
    facts, assumed = planned_facts(find_card("dgx-spark"), {"sglang": "0.5.20", "torch": "2.13.0"})
    assert facts.capability == (12, 1)
    assert facts.versions["sglang"] == "0.5.20"
    assert facts.versions["flashinfer"] == ASSUMED["flashinfer"]
    assert set(assumed) == set(ASSUMED) - {"sglang", "torch"}


def test_the_assumed_release_is_the_last_one_that_was_tested() -> None:
    assert ASSUMED["sglang"] == str(LAST_TESTED)
