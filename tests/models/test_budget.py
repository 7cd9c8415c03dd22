"""The bytes of a step: by hand for the model that people ask about, by its files for a checkpoint that is here."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cpu_host.checkpoints import Format, Spec, make
from sglang_sm120.errors import ConfigError
from sglang_sm120.models import budget
from sglang_sm120.models.advice import largest_tp
from sglang_sm120.models.architecture import Model, read_model
from sglang_sm120.models.budget import Setup
from sglang_sm120.models.headers import read_header
from sglang_sm120.models.quantization import FP4_FORMATS, Quantization, read_quantization
from sglang_sm120.models.source import load_source, presets


def load(name: str) -> tuple[Model, Quantization]:
    source = load_source(name)
    return read_model(source), read_quantization(source.quantization)


class TestQwen35At8Ranks:
    """nvidia/Qwen3.5-397B-A17B-NVFP4 on 8 cards, every factor written out."""

    def test_fp4(self) -> None:
        uses = budget.step(*load("qwen3.5-397b-a17b"), Setup(tp=8))
        layers, experts, w13, w2 = 60, 10, 256 * 4096, 4096 * 128
        expected = layers * experts * (w13 + w2) * (0.5 + 1 / 16)
        assert sum(u.bytes for u in uses if u.format in FP4_FORMATS) == expected == 530_841_600

    def test_bf16(self) -> None:
        uses = budget.step(*load("qwen3.5-397b-a17b"), Setup(tp=8))
        attention = 15 * (2560 * 4096 + 4096 * 1024)
        delta_net = 45 * (2560 * 4096 + 16 * 4096 + 4096 * 1024)
        shared = 60 * (256 * 4096 + 4096 * 128)
        routers = 60 * (512 * 4096 + 1 * 4096)
        head = 31040 * 4096
        expected = 2 * (attention + delta_net + shared + routers + head)
        assert sum(u.bytes for u in uses if u.format == "bf16") == expected == 2_462_679_040

    def test_the_prediction_module(self) -> None:
        uses = budget.draft_step(*load("qwen3.5-397b-a17b"), Setup(tp=8))
        attention = 2560 * 4096 + 4096 * 1024
        experts = 11 * (256 * 4096 + 4096 * 128)  # ten routed and the shared one
        expected = 2 * (4096 * 8192 + attention + experts + 513 * 4096 + 31040 * 4096)
        assert sum(u.bytes for u in uses) == expected
        assert {u.format for u in uses} == {"bf16"}

    def test_context(self) -> None:
        model, _ = load("qwen3.5-397b-a17b")
        setup = Setup(tp=8, context=1000, kv_bytes=1)
        assert budget.kv_traffic(model, setup) == 15 * 2 * 1 * 256 * 1000  # two heads, copied: one on every rank
        state, convolution = 8 * 128 * 128, (2 * 2 * 128 + 8 * 128) * 3
        assert budget.state_traffic(model, setup) == 45 * 2 * (4 * state + 2 * convolution)

    def test_all_reduces(self) -> None:
        model, _ = load("qwen3.5-397b-a17b")
        assert budget.all_reduces(model, 8) == 121
        assert budget.all_reduces(model, 1) == 0

    def test_whole_experts_cost_the_same_on_average(self) -> None:
        described = load("qwen3.5-397b-a17b")
        sizes = [sum(u.bytes for u in budget.step(*described, Setup(tp=8, ep=ep))) for ep in (1, 2, 4, 8)]
        assert sizes == pytest.approx([sizes[0]] * 4)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "modelopt", "modelopt-w4a16", "compressed-tensors"])
def test_a_checkpoint_takes_the_bytes_that_its_files_have(kind: Format, odd: bool, tmp_path: Path) -> None:
    folder = make(tmp_path / "x", Spec(format=kind, odd=odd))
    described = load(str(folder))
    tensors = read_header(folder / "model.safetensors")
    matrices = sum(t.stop - t.start for t in tensors if len(t.shape) == 2)
    assert budget.resident_bytes(*described, Setup()) == matrices
    # A step reads all of it but the embedding, of which it takes single rows.
    embedding = next(t.stop - t.start for t in tensors if "embed_tokens" in t.name)
    assert sum(u.bytes for u in budget.step(*described, Setup())) == matrices - embedding


@pytest.mark.parametrize("name", list(presets()))
def test_ranks_hold_the_whole_model_and_what_they_copy(name: str) -> None:
    described = load(name)
    whole, most = budget.resident_bytes(*described, Setup()), largest_tp(*described, 8)
    assert most >= 4
    for tp in (2, 4, most):
        shared_out = tp * budget.resident_bytes(*described, Setup(tp=tp))
        assert whole <= shared_out < 1.6 * whole


@pytest.mark.parametrize(
    ("name", "published", "rounding"),
    [
        ("nvidia/Kimi-K2.6-NVFP4", 595.148e9 - 0.942e9, 1e-4),  # without the vision tower
        ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", 20.1 * 2**30, 3e-3),
    ],
)
def test_a_model_takes_the_bytes_of_its_published_files(name: str, published: float, rounding: float) -> None:
    assert budget.resident_bytes(*load(name), Setup()) == pytest.approx(published, rel=rounding)


class TestExperts:
    @pytest.mark.parametrize(("experts", "top_k"), [(512, 10), (128, 8), (256, 8), (8, 8)])
    def test_one_token_takes_its_own(self, experts: int, top_k: int) -> None:
        assert budget.expected_experts(experts, top_k, 1) == pytest.approx(top_k)

    @pytest.mark.parametrize("tokens", [1, 4, 16, 100])
    def test_the_expectation_is_that_of_random_tokens(self, tokens: int) -> None:
        random.seed(0)
        trials = 2000
        hit = sum(len({e for _ in range(tokens) for e in random.sample(range(64), 6)}) for _ in range(trials))
        assert budget.expected_experts(64, 6, tokens) == pytest.approx(hit / trials, rel=0.01)


def test_sparse_attention_reads_the_selected_latents_and_all_keys_of_the_index() -> None:
    model, _ = load("glm-5")
    latent, index = 512 + 64, 128
    assert budget.kv_traffic(model, Setup(context=1000)) == 78 * (1000 * latent * 2 + 1000 * index)
    assert budget.kv_traffic(model, Setup(context=9000)) == 78 * (2048 * latent * 2 + 9000 * index)


def test_fused_projections_of_two_formats_are_refused() -> None:
    model, _ = load("qwen3-32b")
    section = {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.7.self_attn.k_proj"]}
    with pytest.raises(ConfigError, match=r"model\.layers\.7\.self_attn\.qkv_proj .* bf16 and nvfp4"):
        budget.step(model, read_quantization(section), Setup())


@pytest.mark.parametrize(
    ("setup", "named"), [({"tp": 0}, "--tp=0"), ({"batch": 0}, "--batch=0"), ({"tp": 8, "ep": 3}, "--ep=3")]
)
def test_a_setup_that_cannot_be_is_named(setup: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Setup(**setup)
