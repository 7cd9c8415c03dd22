"""humming's experts as a peer: what is handed to it and to SGLang's helpers, with stand-ins that compute what those do.

Neither package's kernels run without a GPU. The stand-in layer follows humming 0.1.19's contract of an indexed GEMM:
row ``id`` of the output is row ``id // top_k`` of the input times the weight of the block's expert.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import moe
from benchmarks.moe import Geometry
from benchmarks.peers import humming_moe
from cpu_host import nvfp4
from sglang_sm120.errors import SelfTestError, UnsupportedError

GEOMETRY = Geometry("small", 1, experts=6, top_k=3, hidden=64, inner=32)
BLOCK = 4


class Humming(torch.nn.Module):
    """A layer that multiplies by its weights as they were loaded."""

    made: list[dict[str, Any]]

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.made.append(settings)
        self.settings = settings

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        assert tensors["weight_scale_2"].shape == (self.settings["num_experts"],)
        codes = [nvfp4.unpack(packed) for packed in tensors["weight"]]
        scales = tensors["weight_scale"].view(torch.uint8).to(torch.int64)
        encode = tensors["weight_scale_2"].flatten().double().reciprocal().tolist()
        self.weights = torch.stack(list(map(nvfp4.dequantize, codes, scales, encode)))
        assert self.weights.shape[1:] == (self.settings["shape_n"], self.settings["shape_k"])

    def transform(self) -> None:
        self.humming_config = "transformed"

    def forward(
        self, inputs: torch.Tensor, *, outputs: torch.Tensor, top_k: int, sorted_ids: torch.Tensor,
        expert_ids: torch.Tensor, num_tokens_padded: torch.Tensor, tuning_config: str, **_: Any,
    ) -> None:  # fmt: skip
        assert json.loads(tuning_config) == {"block_shape": [BLOCK, 64, 64]}  # a table would compile all its kernels
        assert int(num_tokens_padded) == len(sorted_ids)
        for position, pair in enumerate(sorted_ids.tolist()):
            if pair < len(outputs):
                weight = self.weights[expert_ids[position // BLOCK]]
                outputs[pair] = (inputs[pair // top_k].double() @ weight.T).to(outputs.dtype)


def align(ids: torch.Tensor, block: int, experts: int, ignore_invalid_expert: bool) -> tuple[torch.Tensor, ...]:
    """What SGLang's kernel gives: pairs by expert, each expert padded to whole blocks by the number of pairs."""
    assert block == BLOCK
    flat, order, owners = ids.flatten(), [], []
    for expert in range(experts):
        pairs = (flat == expert).nonzero().flatten().tolist()
        blocks = -(-len(pairs) // block)
        order += pairs + [flat.numel()] * (blocks * block - len(pairs))
        owners += [expert] * blocks
    return torch.tensor(order), torch.tensor(owners), torch.tensor([len(order)])


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    gate, up = gate_up.double().chunk(2, -1)
    out.copy_(gate * torch.sigmoid(gate) * up)


def weighted_sum(inputs: torch.Tensor, weights: torch.Tensor, *, topk_ids: torch.Tensor) -> torch.Tensor:
    assert topk_ids.shape == weights.shape
    return (inputs.double() * weights.double().unsqueeze(-1)).sum(1).to(inputs.dtype)


Install = Callable[[type[Humming]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(layer: type[Humming]) -> None:
        layer.made = []
        tuned = [(0, 8, {"block_shape": [2, 64, 64]}), (8, 4096, {"block_shape": [BLOCK, 64, 64]})]
        for name, values in {
            "humming": {},
            "humming.layer": {"HummingLayer": layer},
            "humming.tune": {"get_heuristics_config": lambda config, gemm_type: tuned},
            "sgl_kernel": {"silu_and_mul": silu_and_mul},
            "sglang.kernels.ops.moe.moe_fused_mul_sum": {"moe_fused_mul_sum": weighted_sum},
            "sglang.srt.layers.moe.fused_moe_triton": {"moe_align_block_size": align},
        }.items():
            module = ModuleType(name)
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)

    return put


def test_what_is_handed_over_gives_the_weighted_sum_of_the_experts(install: Install) -> None:
    torch.manual_seed(1)
    install(Humming)
    humming_moe.check(GEOMETRY, "cpu")
    assert [(made["shape_n"], made["shape_k"], made["num_experts"]) for made in Humming.made] == [
        (64, 64, 8),
        (64, 32, 8),
    ]
    assert {made["weight_config"]["quant_algo"] for made in Humming.made} == {"NVFP4"}


class Swapped(Humming):
    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        super().load_from_tensors(tensors)
        self.weights = self.weights.roll(self.settings["shape_n"] // 2, 1)


class Spoilt(Humming):
    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        super().load_from_tensors(tensors)
        self.weights *= float("nan")


@pytest.mark.parametrize("wrong", [Swapped, Spoilt])
def test_a_peer_that_is_wrong_is_not_timed(wrong: type[Humming], install: Install) -> None:
    install(wrong)
    with pytest.raises(SelfTestError, match="do not time them"):
        humming_moe.check(GEOMETRY, "cpu")


def test_a_package_that_is_missing_is_named_and_leaves_the_peer_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)
    with pytest.raises(UnsupportedError, match=r"--peers='humming'.*pip install 'humming-kernels\[cu13\]==0.1.19'"):
        humming_moe.layers(GEOMETRY)
    assert moe.make_contenders(["humming"], GEOMETRY) == {}
    assert "no humming for small TP 1: UnsupportedError: " in capsys.readouterr().out


def test_tokens_beyond_hummings_table_are_an_error() -> None:
    tuned = [(0, 8, {"block_shape": [8]}), (8, 64, {"block_shape": [16]})]
    blocks = [humming_moe.configuration(tuned, pairs)["block_shape"] for pairs in (1, 8, 9, 64)]
    assert blocks == [[8], [8], [16], [16]]
    with pytest.raises(ValueError, match="65"):
        humming_moe.configuration(tuned, 65)
