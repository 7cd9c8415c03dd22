"""Nemotron-H: its weights beside what its publisher counts, its formats, its flags."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sglang_sm120.cards import find_card
from sglang_sm120.errors import ConfigError
from sglang_sm120.models import budget
from sglang_sm120.models.advice import advise, largest_tp, planned_facts
from sglang_sm120.models.architecture import Model, read_model
from sglang_sm120.models.budget import Setup
from sglang_sm120.models.gemms import shard
from sglang_sm120.models.layer import Layer
from sglang_sm120.models.quantization import Quantization, read_quantization
from sglang_sm120.models.source import ModelSource, load_source
from sglang_sm120.tuning.cases import shapes_of_model
from sglang_sm120.tuning.expert_cases import experts_of_model

NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4"
LIGHTNING = "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"
SUPER = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"
#: An order of layers as the first models of the family have it, dense throughout.
DENSE = {
    "model_type": "nemotron_h",
    "hidden_size": 256,
    "hybrid_override_pattern": "M-M*-",
    "intermediate_size": 512,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
}


def load(name: str) -> tuple[Model, Quantization]:
    source = load_source(name)
    return read_model(source), read_quantization(source.quantization)


def read(**changes: Any) -> Model:
    return read_model(ModelSource("small", "folder", {**DENSE, **changes}, None))


def weights(layers: tuple[Layer, ...], copies: int) -> int:
    return sum(g.n * g.k * (copies if g.is_expert else 1) for layer in layers for g in layer.gemms)


def bytes_of(uses: tuple[budget.Use, ...]) -> Counter[str]:
    found: Counter[str] = Counter()
    for use in uses:
        found[use.format] += use.bytes  # type: ignore[assignment]
    return found


class TestSize:
    """BF16 weights in the headers of the published files; norms and convolutions are what is not counted here."""

    @pytest.mark.parametrize(("name", "published"), [(NANO, 31_577_934_400), (SUPER, 123_611_012_096)])
    def test_all(self, name: str, published: int) -> None:
        model, _ = load(name)
        draft = model.draft.layers if model.draft is not None else ()
        counted = weights((*model.layers, *draft), model.experts) + 2 * model.head.n * model.head.k
        assert counted < published
        assert counted == pytest.approx(published, rel=5e-5)

    def test_of_a_token(self) -> None:
        model, _ = load(SUPER)
        counted = weights(model.layers, model.top_k) + 2 * model.head.n * model.head.k
        assert counted == pytest.approx(12_770_216_960, rel=3e-4)

    def test_of_the_prediction_module(self) -> None:
        model, _ = load(SUPER)
        assert model.draft is not None
        # Published are 2,942,324,736: five norms of the hidden size more.
        assert weights(model.draft.layers, model.experts) + 5 * model.hidden == 2_942_324_736


class TestNanoAt4Ranks:
    """Every factor written out."""

    def test_fp4(self) -> None:
        mamba = 17 * (10304 // 4 * 2688 + 2688 * 4096 // 4)
        experts = 23 * 6 * 2 * 2688 * (1856 // 4)  # no gate: one matrix up, one down
        shared = 23 * 2 * 2688 * (3712 // 4)
        expected = (mamba + experts + shared) * (0.5 + 1 / 16)
        assert bytes_of(budget.step(*load(NANO), Setup(tp=4)))["nvfp4"] == expected

    def test_bf16(self) -> None:
        before_attention = 6 * (10304 // 4 * 2688 + 2688 * 4096 // 4)
        attention = 6 * ((8 + 2) * 128 * 2688 + 2688 * 1024)
        routers, head = 23 * 128 * 2688, 131072 // 4 * 2688
        expected = 2 * (before_attention + attention + routers + head)
        assert bytes_of(budget.step(*load(NANO), Setup(tp=4)))["bf16"] == expected

    def test_context(self) -> None:
        model, _ = load(NANO)
        assert budget.kv_traffic(model, Setup(tp=4, context=1000, kv_bytes=1)) == 6 * 2 * 1 * 128 * 1000
        assert budget.state_traffic(model, Setup()) == 23 * 2 * (4 * 64 * 64 * 128 + 2 * 3 * (4096 + 2 * 8 * 128))

    def test_a_layer_is_reduced_once(self) -> None:
        assert budget.all_reduces(load(NANO)[0], 4) == 1 + 52

    def test_the_layers_before_attention_stay_in_16_bit(self) -> None:
        model, quantization = load(NANO)
        mamba = [(layer, gemm) for layer in model.layers for gemm in layer.gemms if gemm.part == "Mamba2"]
        kept = {la.index for la, gemm in mamba if budget.format_of(gemm, la, quantization) == "bf16"}
        assert kept == {la.index - 1 for la in model.layers if la.kind == "full"}


def test_the_formats_of_super_are_those_that_its_configuration_lists() -> None:
    model, quantization = load(SUPER)
    found: Counter[tuple[str, str]] = Counter()
    for layer in model.layers:
        for gemm in layer.gemms:
            found[gemm.name, budget.format_of(gemm, layer, quantization)] += 1
    assert sum(count for (_, layout), count in found.items() if layout == "fp8") == 139
    assert (found["mixer.in_proj", "fp8"], found["mixer.in_proj", "bf16"]) == (28, 12)
    assert (found["mixer.out_proj", "fp8"], found["mixer.out_proj", "bf16"]) == (29, 11)
    assert found["mixer.qkv_proj", "bf16"] == 8
    assert found["mixer.experts.w13", "nvfp4"] == found["mixer.experts.w2", "nvfp4"] == 40
    assert found["mixer.shared_experts.down_proj", "nvfp4"] == 1
    assert model.draft is not None
    assert {budget.format_of(g, la, quantization) for la in model.draft.layers for g in la.gemms} == {"bf16"}


def test_a_draft_takes_both_layers_of_the_module() -> None:
    uses = {use.gemm.name: use for use in budget.draft_step(*load(SUPER), Setup(tp=4))}
    assert (uses["eh_proj"].n, uses["eh_proj"].k) == (1024, 8192)
    assert {"mixer.qkv_proj", "mixer.experts.w2", "mixer.fc2_latent_proj", "lm_head"} <= set(uses)


class TestRanks:
    def test_half_blocks_of_scales_are_refused(self) -> None:
        """1856 / 8 is 14.5 blocks: SGLang would give a rank 14 of its scales, from the wrong place."""
        with pytest.raises(ConfigError, match=r"--tp=8 .*mixer\.experts\.w2 would have K = 232"):
            budget.step(*load(NANO), Setup(tp=8))
        assert largest_tp(*load(NANO), 8) == 4

    def test_whole_experts_are_not(self) -> None:
        (w2,) = [use for use in budget.step(*load(NANO), Setup(tp=8, ep=8)) if use.gemm.rule == "expert_row"]
        assert (w2.n, w2.k) == (2688, 1856)

    def test_groups_of_heads_stay_together(self) -> None:
        model = read(n_groups=2)
        projection = model.layers[0].gemms[0]
        assert shard(projection, 2) == (2 * 128 + 2 * 16 + 4, 256)
        with pytest.raises(ConfigError, match=r"--tp=4.*groups of heads = 2"):
            shard(projection, 4)


class TestExperts:
    @pytest.mark.parametrize(
        ("name", "tp", "ep", "key"),
        [
            (NANO, 1, 1, (128, 128, 6, 2688, 1920, "relu2")),
            (NANO, 4, 1, (128, 128, 6, 2688, 512, "relu2")),
            (SUPER, 1, 1, (512, 512, 22, 1024, 2688, "relu2")),  # in the latent space
            (SUPER, 4, 4, (512, 128, 22, 1024, 2688, "relu2")),
        ],
    )
    def test_are_measured_without_a_gate(self, name: str, tp: int, ep: int, key: tuple[object, ...]) -> None:
        (found,) = experts_of_model(name, tp, ep)
        assert found.key == key

    def test_beside_the_dense_layers(self) -> None:
        assert {layer for shape in shapes_of_model(NANO, 1) for layer in shape.layers} == {
            "mixer.in_proj",
            "mixer.out_proj",
            "mixer.shared_experts.up_proj",
            "mixer.shared_experts.down_proj",
        }
        assert experts_of_model(LIGHTNING, 1, 1) == shapes_of_model(LIGHTNING, 1) == []  # weight-only


def flags(name: str, tp: int) -> dict[str, str]:
    card = find_card("rtx-pro-6000")
    facts, _ = planned_facts(card, {})
    found = advise(name, *load(name), card, facts, tp=tp)
    return {flag.name: flag.value for flag in found.flags}


def test_the_command_for_each() -> None:
    nano, lightning, large = flags(NANO, 1), flags(LIGHTNING, 1), flags(SUPER, 2)
    assert (nano["--quantization"], nano["--moe-runner-backend"]) == ("modelopt_fp4", "flashinfer_cutlass")
    assert nano["--fp4-gemm-backend"] == "auto"
    assert "--speculative-algorithm" not in nano
    assert (lightning["--quantization"], lightning["--moe-runner-backend"]) == ("modelopt_mixed", "marlin")
    assert "--fp4-gemm-backend" not in lightning
    assert large["--quantization"] == "modelopt_mixed"
    for command in (lightning, large):
        assert command["--speculative-algorithm"] == "NEXTN"
        assert command["--speculative-moe-runner-backend"] == "triton"
        assert command["--mamba-radix-cache-strategy"] == "extra_buffer"


def test_dense_layers_and_words_instead_of_letters() -> None:
    model = read()
    assert [layer.kind for layer in model.layers] == ["linear", "none", "linear", "full", "none"]
    assert (model.layers[1].gemms[0].shards, model.layers[1].gemms[0].part) == ((512,), "dense MLP")
    assert (model.experts, model.draft) == (0, None)
    words = ["mamba", "mlp", "mamba", "attention", "mlp"]
    assert read(layers_block_type=words, hybrid_override_pattern=None).layers == model.layers


@pytest.mark.parametrize("pattern", ["", "MX", ["mamba", "lstm"], ["M", 1], ["M", ["E"]], None, 5, "M" * 5000])
def test_another_pattern_is_refused_by_name(pattern: object) -> None:
    with pytest.raises(ConfigError, match="hybrid_override_pattern of small"):
        read(hybrid_override_pattern=pattern)
