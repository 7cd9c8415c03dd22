"""Shapes on one rank, compared with the layers that SGLang itself builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_sm120.errors import ConfigError
from sglang_sm120.models.architecture import Model, read_model
from sglang_sm120.models.gemms import Gemm, padded_vocabulary, shard
from sglang_sm120.models.source import load_source, presets

TP = (1, 2, 4, 8)


def model(name: str) -> Model:
    return read_model(load_source(name))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """A stand-in for a group of processes: SGLang's layers only ask for rank and size."""
    import sglang.srt.layers.linear as linear
    import sglang.srt.layers.vocab_parallel_embedding as embedding

    world = {"size": 1}
    for module in (linear, embedding):
        monkeypatch.setattr(module, "get_group_rank_size", lambda _: (0, world["size"]), raising=False)
        monkeypatch.setattr(module, "_resolve_linear_group", lambda group: group, raising=False)
    return world


def build(gemm: Gemm) -> Any:
    """Make SGLang's own layer of this kind, on no device: only the shape of its weight is read."""
    import torch
    from sglang.srt.layers import linear

    with torch.device("meta"):
        if gemm.rule == "qkv":
            assert gemm.heads is not None
            q, kv, dim = gemm.heads
            return linear.QKVParallelLinear(gemm.k, dim, q, kv, bias=False)
        if gemm.rule == "column":
            return linear.MergedColumnParallelLinear(gemm.k, list(gemm.shards), bias=False)
        if gemm.rule == "row":
            return linear.RowParallelLinear(gemm.k, gemm.n, bias=False)
        return linear.ReplicatedLinear(gemm.k, gemm.n, bias=False)


def every_gemm() -> list[Gemm]:
    """One of each shape of every preset; experts and heads have tests of their own."""
    found = {gemm for name in presets() for layer in model(name).layers for gemm in layer.gemms}
    return sorted((g for g in found if not g.is_expert), key=repr)


@pytest.mark.parametrize("tp", TP)
def test_every_layer_of_every_preset_has_the_shape_that_sglang_gives_it(tp: int, ranks: dict[str, int]) -> None:
    ranks["size"] = tp
    for gemm in every_gemm():
        assert tuple(build(gemm).weight.shape) == shard(gemm, tp), (gemm, tp)


@pytest.mark.parametrize("tp", [3, 7, 24])
def test_what_sglang_cannot_divide_is_refused(tp: int, ranks: dict[str, int]) -> None:
    ranks["size"] = tp
    refused = 0
    for gemm in every_gemm():
        try:
            expected = tuple(build(gemm).weight.shape)
        except (AssertionError, ValueError):
            refused += 1
            with pytest.raises(ConfigError, match=r"--tp=.*share equally"):
                shard(gemm, tp)
        else:
            assert shard(gemm, tp) == expected, (gemm, tp)
    assert refused


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 3, 6])
@pytest.mark.parametrize("size", [248320, 151936, 128256, 200064, 154880, 163840, 32000, 1000])
def test_a_vocabulary_is_padded_as_sglang_pads_it(size: int, tp: int) -> None:
    from sglang.srt.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE, pad_vocab_size

    padding = DEFAULT_VOCAB_PADDING_SIZE
    if padding % tp:
        padding *= tp
    assert padded_vocabulary(size, tp) == pad_vocab_size(size, padding)
    assert padded_vocabulary(size, tp) % tp == 0


class TestExperts:
    w13 = Gemm("w13", "routed experts", (1024, 1024), 4096, "expert_column", ("a", "b"))
    w2 = Gemm("w2", "routed experts", (4096,), 1024, "expert_row", ("c",))

    @pytest.mark.parametrize(
        ("tp", "ep", "w13", "w2"),
        [
            (8, 1, (256, 4096), (4096, 128)),  # figures of Qwen3.5-397B at TP 8
            (8, 8, (2048, 4096), (4096, 1024)),
            (8, 2, (512, 4096), (4096, 256)),
            (1, 1, (2048, 4096), (4096, 1024)),
        ],
    )
    def test_tensor_parallelism_divides_an_expert_and_expert_parallelism_does_not(
        self, tp: int, ep: int, w13: tuple[int, int], w2: tuple[int, int]
    ) -> None:
        assert shard(self.w13, tp, ep) == w13
        assert shard(self.w2, tp, ep) == w2

    def test_groups_that_do_not_divide_the_ranks_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="--ep=3"):
            shard(self.w13, 8, 3)


#: Parameters in 1e9 without embedding, as their publishers state them (rounded in the model's name).
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3.5-397b-a17b", 397),
        ("qwen3.5-122b-a10b", 122),
        ("qwen3-235b-a22b", 235),
        ("llama-3.3-70b", 70.6),
        ("deepseek-v3.1", 671),
        ("qwen3-30b-a3b", 30.5),
        ("deepseek-v3-0324", 671),
        ("kimi-k2.5", 1026),
        ("minimax-m2.5", 229),
    ],
)
def test_a_model_has_as_many_weights_as_its_publisher_says(name: str, billions: float) -> None:
    described = model(name)
    layers = sum(g.n * g.k * (described.experts if g.is_expert else 1) for la in described.layers for g in la.gemms)
    both_ends = 2 * described.head.n * described.head.k
    assert (layers + both_ends) / 1e9 == pytest.approx(billions, rel=0.005)


def test_glm_4_7_has_its_358_billion_with_the_prediction_layer_and_its_copies_of_both_ends() -> None:
    described = model("glm-4.7")
    assert described.draft is not None
    layers = (*described.layers, *described.draft.layers)
    weights = sum(g.n * g.k * (described.experts if g.is_expert else 1) for la in layers for g in la.gemms)
    assert (weights + 4 * described.head.n * described.head.k) / 1e9 == pytest.approx(358, rel=0.002)


class TestNemotron:
    @pytest.mark.parametrize("name", [name for name in presets() if "nemotron" in name])
    def test_layers_have_the_order_that_sglang_reads(self, name: str) -> None:
        from sglang.srt.configs.nemotron_h import NemotronHConfig

        kinds = {"mamba": "linear", "attention": "full", "moe": "none"}
        theirs, described = NemotronHConfig(**load_source(name).config), model(name)
        assert [layer.kind for layer in described.layers] == [kinds[block] for block in theirs.layers_block_type]
        draft = described.draft.layers if described.draft is not None else ()
        expected = theirs.mtp_layers_block_type if theirs.num_nextn_predict_layers else []
        assert [layer.kind for layer in draft] == [kinds[block] for block in expected]

    @pytest.mark.parametrize("tp", TP)
    def test_the_state_of_a_layer_has_the_size_that_sglang_gives_it(self, tp: int) -> None:
        from sglang.srt.configs.mamba_utils import Mamba2StateShape

        sizes = {"intermediate_size": 128 * 64, "n_groups": 8, "num_heads": 128, "head_dim": 64, "state_size": 128}
        state = Mamba2StateShape.create(tp_world_size=tp, conv_kernel=4, **sizes)
        heads, dim, size = state.temporal
        channels, taps = state.conv[0]
        memory = model("nemotron-3-super-120b-a12b").memory
        assert memory.state_traffic(tp) == 2 * (4 * heads * dim * size + 2 * channels * taps)
