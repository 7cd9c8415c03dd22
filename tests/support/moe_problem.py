"""Random NVFP4 expert stacks as SGLang's ``flashinfer_cutlass`` keeps them, and random routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sm120 import ops
from sglang_sm120.layout import swizzle_128x4
from sglang_sm120.probing import expert_bound
from sglang_sm120.reference import Activation, ExpertWeights


@dataclass
class MoeProblem:
    """Everything that ``ops.nvfp4_moe`` takes."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: ExpertWeights
    w2: ExpertWeights
    activation: Activation = "silu"
    gate_first: bool = False
    first_expert: int = 0

    def arguments(self) -> tuple[object, ...]:
        """The problem as ``expert_bound.expected`` and ``native_moe.moe`` take it."""
        return (
            self.hidden, self.ids, self.weights, self.w13, self.w2, self.activation, self.gate_first, self.first_expert
        )  # fmt: skip

    def run(self, backend: str) -> torch.Tensor:
        """Call the operator."""
        stacks = [
            t for s in (self.w13, self.w2) for t in (s.packed, s.scales, s.alpha, s.input_global_scale)
        ]  # fmt: skip
        return ops.nvfp4_moe(
            self.hidden, self.ids, self.weights, *stacks, self.activation, self.gate_first, self.first_expert, backend
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The answer in float64 and the bound on the error."""
        return expert_bound.expected(*self.arguments())  # type: ignore[arg-type]


def random_stack(
    experts: int, rows: int, k: int, generator: torch.Generator, *, size: float, per_expert: bool = False
) -> ExpertWeights:
    """Return a stack whose outputs are about ``size`` for inputs of about one.

    Random codes have a standard deviation of 2.9, the block scales are 0.25 to 2.
    """
    packed = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0x28, 0x40, (experts, rows, k // 16), dtype=torch.uint8, generator=generator)
    encode = torch.rand(experts if per_expert else 1, generator=generator) * 50 + 37.1
    decode = size / (2.9 * k**0.5) * (0.5 + torch.rand(experts, generator=generator))
    swizzled = torch.stack([swizzle_128x4(expert) for expert in scales])
    return ExpertWeights(packed, swizzled, decode / encode, encode if per_expert else encode[0])


def random_moe(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    *,
    activation: Activation = "silu",
    gate_first: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    per_expert: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> MoeProblem:
    """Return a problem with distinct experts for each token."""
    generator = torch.Generator().manual_seed(seed * 1000003 + tokens * 1009 + hidden + inner)
    rows = 2 * inner if activation == "silu" else inner
    w13 = random_stack(experts, rows, hidden, generator, size=1.0, per_expert=per_expert)
    w2 = random_stack(experts, hidden, inner, generator, size=1.0, per_expert=per_expert)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    order = torch.rand(tokens, experts, generator=generator).argsort(1) if tokens else torch.empty(0, experts)
    ids = order[:, :top_k].to(torch.int32)
    weights = torch.rand(tokens, top_k, generator=generator)
    return to(MoeProblem(x, ids, weights, w13, w2, activation, gate_first), device)


def to(problem: MoeProblem, device: str) -> MoeProblem:
    """Move a problem."""

    def stack(s: ExpertWeights) -> ExpertWeights:
        parts = (s.packed, s.scales, s.alpha, s.input_global_scale)
        return ExpertWeights(*(t.to(device) for t in parts), s.layout)

    moved = (problem.hidden.to(device), problem.ids.to(device).contiguous(), problem.weights.to(device))
    return MoeProblem(
        *moved, stack(problem.w13), stack(problem.w2), problem.activation, problem.gate_first, problem.first_expert
    )
