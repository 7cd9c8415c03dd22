"""The mixture-of-experts oracle against plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sglang_sm120.layout import ScaleLayout, swizzle_128x4
from sglang_sm120.reference import Activation, ExpertWeights, moe
from tests.support import exact
from tests.support.nvfp4 import assert_matches_oracle, random_activation, random_nvfp4_weight

EXPERTS, HIDDEN, INNER = 3, 32, 48


def random_experts(n: int, k: int, generator: torch.Generator, per_column: bool = False) -> ExpertWeights:
    weights = [random_nvfp4_weight(n, k, generator) for _ in range(EXPERTS)]
    shape = (EXPERTS, n) if per_column else (EXPERTS,)
    return ExpertWeights(
        packed=torch.stack([weight.packed for weight in weights]),
        scales=torch.stack([weight.linear_scales for weight in weights]),
        alpha=torch.rand(shape, generator=generator) * 1e-4 + 1e-5,
        input_global_scale=torch.rand(EXPERTS, generator=generator) * 20 + 1,
        layout=ScaleLayout.LINEAR,
    )


def to(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    tensors = {name: value.to(device) for name, value in vars(weights).items() if name != "layout"}
    return ExpertWeights(**tensors, layout=weights.layout)


def swizzled(weights: ExpertWeights) -> ExpertWeights:
    scales = torch.stack([swizzle_128x4(expert) for expert in weights.scales])
    return replace(weights, scales=scales, layout=ScaleLayout.SWIZZLE_128X4)


def loop_linear(x: list[float], weights: ExpertWeights, expert: int) -> list[float]:
    """Return one expert's GEMM of one row, by rational arithmetic up to the last step."""
    encode = float(weights.input_global_scale[expert])
    row: list[float] = []
    for start in range(0, len(x), 16):
        row += map(float, exact.dequantize_block(*exact.quantize_block(x[start : start + 16], encode)))
    out = []
    for n, packed in enumerate(weights.packed[expert].tolist()):
        codes = [code for byte in packed for code in (byte & 15, byte >> 4)]
        scales = weights.scales[expert, n].tolist()
        column = [
            float(value)
            for block, scale in enumerate(scales)
            for value in exact.dequantize_block(scale, codes[16 * block : 16 * block + 16])
        ]
        alpha = weights.alpha[expert] if weights.alpha.dim() == 1 else weights.alpha[expert, n]
        out.append(math.fsum(a * b for a, b in zip(row, column, strict=True)) * float(alpha))
    return out


def silu(x: float) -> float:
    # exp never overflows with this sign
    decay = math.exp(-abs(x))
    return x * (decay if x < 0 else 1.0) / (1 + decay)


def loop_moe(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    router: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    gate_first: bool | None,
) -> torch.Tensor:
    """Return float64 ``[T, H]`` before the last rounding. ``gate_first=None`` means relu2."""
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, row in enumerate(hidden.to(torch.float64).tolist()):
        for expert, share in zip(ids[token].tolist(), router[token].tolist(), strict=True):
            if not 0 <= expert < EXPERTS:
                continue
            first = loop_linear(row, w13, expert)
            if gate_first is None:
                inner = [max(value, 0.0) ** 2 for value in first]
            else:
                halves = first[:INNER], first[INNER:]
                gate, up = halves if gate_first else halves[::-1]
                inner = [silu(g) * u for g, u in zip(gate, up, strict=True)]
            inner = torch.tensor(inner, dtype=torch.float64).to(torch.float32).tolist()
            total[token] += share * torch.tensor(loop_linear(inner, w2, expert), dtype=torch.float64)
    return total


def random_routing(tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids that include experts of other ranks, and weights."""
    ids = torch.randint(-1, EXPERTS + 2, (tokens, 4), generator=generator)
    return ids, torch.rand(tokens, 4, generator=generator)


@pytest.mark.parametrize("gate_first", [True, False, None])
@pytest.mark.parametrize("per_column", [False, True])
def test_moe_is_the_weighted_sum_of_its_experts(
    gate_first: bool | None, per_column: bool, device: torch.device, generator: torch.Generator
) -> None:
    rows = INNER if gate_first is None else 2 * INNER
    w13 = random_experts(rows, HIDDEN, generator, per_column)
    w2 = random_experts(HIDDEN, INNER, generator, per_column)
    hidden = random_activation(5, HIDDEN, torch.float32, generator)
    ids, router = random_routing(5, generator)
    expected = loop_moe(hidden, ids, router, w13, w2, gate_first)
    activation: Activation = "relu2" if gate_first is None else "silu"
    # float32 output and the exp of two libraries; a code that flips would be a thousand times larger
    bound = expected.abs() * 2.0**-23 + expected.abs().amax() * 1e-10
    for first, second in ((w13, w2), (swizzled(w13), swizzled(w2))):
        out = moe(
            hidden.to(device),
            ids.to(device, torch.int32),
            router.to(device),
            to(first, device),
            to(second, device),
            activation,
            gate_first,
        )
        assert out.dtype == torch.float32
        assert_matches_oracle(out.cpu(), expected, bound)


def test_one_input_scale_may_serve_all_experts(generator: torch.Generator) -> None:
    w13, w2 = random_experts(INNER, HIDDEN, generator), random_experts(HIDDEN, INNER, generator)
    one = replace(w13, input_global_scale=torch.tensor(8.0))
    same = replace(w13, input_global_scale=torch.tensor([8.0] * EXPERTS))
    hidden = random_activation(4, HIDDEN, torch.bfloat16, generator)
    ids, router = random_routing(4, generator)
    assert torch.equal(moe(hidden, ids, router, one, w2, "relu2"), moe(hidden, ids, router, same, w2, "relu2"))


def test_an_expert_of_another_rank_adds_nothing_even_with_a_weight_of_nan(generator: torch.Generator) -> None:
    w13, w2 = random_experts(INNER, HIDDEN, generator), random_experts(HIDDEN, INNER, generator)
    hidden = random_activation(2, HIDDEN, torch.bfloat16, generator)
    ids = torch.tensor([[-1, EXPERTS, 1], [-1, -1, 2**31]])
    router = torch.tensor([[math.nan, math.nan, 0.5], [math.nan, 1.0, 1.0]])
    out = moe(hidden, ids, router, w13, w2, "relu2")
    alone = moe(hidden[:1], ids[:1, 2:], router[:1, 2:], w13, w2, "relu2")
    assert torch.equal(out[:1], alone)
    assert not out[1].any()


def test_an_empty_batch_gives_an_empty_result(device: torch.device, generator: torch.Generator) -> None:
    w13, w2 = random_experts(2 * INNER, HIDDEN, generator), random_experts(HIDDEN, INNER, generator)
    hidden = torch.empty(0, HIDDEN, dtype=torch.bfloat16, device=device)
    ids, router = torch.empty(0, 2, dtype=torch.int64, device=device), torch.empty(0, 2, device=device)
    out = moe(hidden, ids, router, to(w13, device), to(w2, device), "silu", gate_first=True)
    assert out.shape == (0, HIDDEN)
    assert out.dtype == torch.bfloat16
