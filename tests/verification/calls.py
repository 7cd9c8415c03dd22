"""Random calls of a backend, right results, and faulty backends that a child process can load."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import torch

from cpu_host.runtime import mutations
from sglang_sm120 import reference, scales
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.layout import ScaleLayout
from sglang_sm120.probing.expert_operations import ExpertOperations, Layer, of_runner
from sglang_sm120.probing.operations import Operations, of_subject
from sglang_sm120.verification.call import Call
from tests.probing.faulty import right_gemm, right_linear, right_quantize
from tests.support.nvfp4 import random_activation, random_nvfp4_weight

M, N, K = 9, 40, 96
OPERATIONS = Operations(quantize=right_quantize, gemm=right_gemm, linear=right_linear, column_alpha=True)


def linear(
    generator: torch.Generator, m: int = M, n: int = N, k: int = K, *, bias: bool = True, scalar: bool = False
) -> Call:
    """A fused call of random numbers, with one alpha for all columns or one in each."""
    x = random_activation(m, k, torch.bfloat16, generator)
    weight = random_nvfp4_weight(n, k, generator)
    encode = scales.encode_scale_from_amax(x.abs().amax().float())
    alpha = torch.rand(1 if scalar else n, generator=generator) * 1e-4 + 1e-5
    add = torch.randn(n, generator=generator).to(torch.bfloat16) if bias else None
    return Call.linear(x, weight.packed, weight.scales, encode, alpha, add)


def gemm(generator: torch.Generator, m: int = M, n: int = N, k: int = K, *, scalar: bool = False) -> Call:
    """A product of operands that the oracle quantized."""
    call = linear(generator, m, n, k, bias=not scalar, scalar=scalar)
    named = call.operands
    a, a_scale = reference.quantize(named["x"], named["activation_scale"], ScaleLayout.SWIZZLE_128X4)
    return Call.gemm(
        a, named["weight"], a_scale, named["weight_scale"], named["alpha"], named.get("bias"), torch.bfloat16
    )


def quantize(generator: torch.Generator, m: int = M, k: int = K) -> Call:
    """A call of the quantizer."""
    named = linear(generator, m, k=k).operands
    return Call.quantize(named["x"], named["activation_scale"])


def negated(subject: str) -> Operations:
    """A factory for a child: right but for the sign of the last column."""

    def spoil(out: torch.Tensor) -> torch.Tensor:
        out = out.clone()
        out[:, -1].neg_()
        return out

    return Operations(
        quantize=right_quantize,
        gemm=lambda *operands: spoil(right_gemm(*operands)),
        linear=lambda *operands: spoil(right_linear(*operands)),
        column_alpha=True,
    )


def swapped_nibbles(subject: str) -> Operations:
    """A factory for a child: the backend itself, given a weight whose two codes in each byte are swapped."""
    operations, mutate = of_subject(subject), mutations.find("nibbles")
    right = operations.linear
    assert right is not None

    def linear(
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        scale: torch.Tensor,
        alpha: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        weight, weight_scale, alpha = mutate(weight, weight_scale, alpha)
        return right(x, weight, weight_scale, scale, alpha, bias)

    return replace(operations, linear=linear)


def shifted_ids(runner: str) -> ExpertOperations:
    """A factory for a child: the runner itself, with each token's experts exchanged for the next ones."""
    right = of_runner(runner)

    def moe(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: Layer) -> torch.Tensor:
        return right.moe(hidden, ids.roll(1, 1), weights, layer)

    return replace(right, moe=moe)


def failing(subject: str) -> Operations:
    """A factory for a child: fails as a kernel does."""
    return Operations(linear=_misaligned, column_alpha=True)


def refusing(subject: str) -> Operations:
    """A factory for a child: refuses every call."""

    def refuse(*_: object) -> torch.Tensor:
        raise UnsupportedError("no kernel")

    return Operations(linear=refuse, column_alpha=True)


def without_memory(subject: str) -> Operations:
    """A factory for a child: the card is full."""

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    return Operations(linear=full, column_alpha=True)


def failing_experts(runner: str) -> ExpertOperations:
    """:func:`failing` for a runner of experts."""
    return ExpertOperations(_misaligned)


def killed_experts(runner: str) -> ExpertOperations:
    """A factory for a child, whose process a call ends."""

    def end(*_: object) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError

    return ExpertOperations(end)


def _misaligned(*_: object) -> torch.Tensor:
    raise RuntimeError("misaligned address")
