"""Runners of experts with one planted fault each, below the interface that a server calls. A child loads them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import torch

from sglang_sm120 import reference
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.probing.expert_operations import ExpertOperations, Layer, Moe
from sglang_sm120.reference import ExpertWeights

Tensor = torch.Tensor


def right(hidden: Tensor, ids: Tensor, weights: Tensor, layer: Layer) -> Tensor:
    """The oracle, with experts of other ranks skipped."""
    order = False if layer.activation == "silu" else None
    local = ids - layer.first_expert
    return reference.moe(hidden, local, weights, layer.w13, layer.w2, layer.activation, order)


def as_grouped_gemms(hidden: Tensor, ids: Tensor, weights: Tensor, layer: Layer) -> Tensor:
    """Each of three kernels hands over 16-bit numbers; sums are 16-bit too. As right as FlashInfer's are."""
    dtype, local = hidden.dtype, ids - layer.first_expert
    out = torch.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(local[token, slot])
            if 0 <= expert < layer.w2.packed.shape[0]:
                first = _gemm(hidden[token : token + 1], layer.w13, expert).to(dtype).float()
                if layer.activation == "silu":
                    up, gate = first.chunk(2, 1)
                    inner = gate * torch.sigmoid(gate) * up
                else:
                    inner = torch.relu(first).square()
                second = _gemm(inner.to(dtype), layer.w2, expert).to(dtype)
                out[token] += (second[0].float() * weights[token, slot]).to(dtype)
    return out


def _gemm(x: Tensor, stack: ExpertWeights, expert: int) -> Tensor:
    return reference.linear(
        x, stack.packed[expert], stack.scales[expert], stack.input_global_scale, stack.alpha[expert],
        out_dtype=torch.float32,
    )  # fmt: skip


def _after(spoil: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Moe:
    """The right result goes through ``spoil(out, ids, weights)``."""
    return lambda hidden, ids, weights, layer: spoil(right(hidden, ids, weights, layer), ids, weights)


def _before(spoil: Callable[[Tensor, Tensor, Layer], tuple[Tensor, Tensor, Layer]]) -> Moe:
    """The operands go through ``spoil(ids, weights, layer)``."""
    return lambda hidden, ids, weights, layer: right(hidden, *spoil(ids, weights, layer))


def _alphas(layer: Layer, change: Callable[[Tensor], Tensor]) -> Layer:
    return replace(layer, w2=replace(layer.w2, alpha=change(layer.w2.alpha)))


def _deduplicated(ids: Tensor, weights: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Layer]:
    again = torch.zeros_like(weights)
    for slot in range(1, ids.shape[1]):
        again[:, slot] = (ids[:, :slot] == ids[:, slot : slot + 1]).any(1).to(weights.dtype)
    return ids, weights * (1 - again), layer


def _swap_halves(layer: Layer) -> Layer:
    if layer.activation != "silu":
        return layer
    w13 = layer.w13
    return replace(layer, w13=replace(w13, packed=torch.cat(w13.packed.chunk(2, 1)[::-1], 1)))


def _some_unwritten(out: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    if len(out) > 8:
        out[8:] = torch.nan
    return out


def _end(*_: object) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def _refuse(*_: object) -> Tensor:
    raise UnsupportedError("no kernel for these experts")


def _refuse_many(hidden: Tensor, ids: Tensor, weights: Tensor, layer: Layer) -> Tensor:
    if len(hidden) == 9:
        raise ValueError("too many tokens")
    return right(hidden, ids, weights, layer)


class _StaleCopy:
    """Gives every batch the numbers of the first one of its size; repeats of that are right."""

    def __init__(self) -> None:
        self.last: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor, layer: Layer) -> Tensor:
        key = (*hidden.shape, layer.first_expert)
        known = self.last.get(key)
        if known is not None and not torch.equal(known[0], hidden):
            return known[1].clone()
        out = right(hidden, ids, weights, layer)
        self.last[key] = hidden, out
        return out


FAULTS: dict[str, Moe] = {
    "none": right,
    "none, 16-bit numbers between kernels": as_grouped_gemms,
    "zeros": _after(lambda out, *_: torch.zeros_like(out)),
    "one NaN": _after(lambda out, *_: out.index_fill_(1, torch.tensor([5]), torch.nan)),
    "unwritten tokens": _after(_some_unwritten),
    "router weights forgotten": _before(lambda ids, weights, layer: (ids, torch.ones_like(weights), layer)),
    "router weights of another slot": _before(lambda ids, weights, layer: (ids, weights.roll(1, 1), layer)),
    "the neighbour's expert": _before(lambda ids, weights, layer: (ids.roll(1, 1), weights, layer)),
    "alpha of another expert": _before(lambda ids, weights, layer: (ids, weights, _alphas(layer, lambda a: a.roll(1)))),
    "one alpha for all experts": _before(
        lambda ids, weights, layer: (ids, weights, _alphas(layer, lambda a: a.mean().expand_as(a).contiguous()))
    ),
    "gate and up swapped": _before(lambda ids, weights, layer: (ids, weights, _swap_halves(layer))),
    "id -1 read as expert 0": _before(lambda ids, weights, layer: (ids.clamp(min=0), weights, layer)),
    "an expert that stands twice counts once": _before(_deduplicated),
    "ids of other ranks read as local": _before(
        lambda ids, weights, layer: (
            torch.where(ids < 0, ids, ids % layer.w2.packed.shape[0] + layer.first_expert),
            weights,
            layer,
        )
    ),  # fmt: skip
    "last expert of a token dropped": _before(
        lambda ids, weights, layer: (ids, weights * (torch.arange(ids.shape[1]) < ids.shape[1] - 1), layer)
    ),
    "the numbers of another batch": _StaleCopy(),
    "only 10 tokens, which no probe tries": lambda hidden, *rest: (
        torch.zeros_like(hidden) if len(hidden) == 10 else right(hidden, *rest)
    ),
    "segfault": _end,
    "refuses": _refuse,
    "refuses 9 tokens only": _refuse_many,
}


def make(fault: str) -> ExpertOperations:
    """The operations with a fault."""
    return ExpertOperations(FAULTS[fault], rounds_between="16-bit" in fault)
