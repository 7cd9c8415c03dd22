"""Who computed what a watched seam saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_sm120 import ops
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import QUANTIZER
from sglang_sm120.host.layers import Prepared
from sglang_sm120.host.state import STATE
from sglang_sm120.probing.operations import of_subject
from sglang_sm120.tuning import backend as tuned
from sglang_sm120.verification.call import Call
from sglang_sm120.verification.judge import Quantize


@dataclass(frozen=True)
class Source:
    """Where a result comes from.

    Attributes:
        value: of the table, ``quantizer``, or the name of a function of SGLang's.
        quantize: what quantized the input of a fused call.
        bias_afterwards: the product was rounded before the bias was added.
    """

    value: str
    quantize: Quantize | None = None
    bias_afterwards: bool = False


def served_by(value: str, call: Call) -> Source:
    """Who served a call of a layer of ours: its backend, or for a per-call one the backend of this N, K and M."""
    value = _chosen(value, call.n, call.k, call.m, call.out_dtype, one_alpha=call.operands["alpha"].numel() == 1)
    if BACKENDS[value].implementation is not None:
        return Source(value, _ours(value))
    ours = STATE.quantizer_of_ours
    return Source(value, of_subject(value).quantize if ours is None else _ours(ours), bias_afterwards=True)


def value_of_layer(layer: Any, m: int) -> str:
    """The value that multiplies in a layer of ours; of its first group of shards, if there are several."""
    prepared: Prepared = layer.sm120_prepared
    group = prepared.groups[0]
    n, one_alpha = group.stop - group.start, isinstance(group.alpha, int)
    return _chosen(prepared.backend, n, layer.input_size_per_partition, m, layer.sm120_dtype, one_alpha=one_alpha)


def _chosen(value: str, n: int, k: int, m: int, dtype: torch.dtype, *, one_alpha: bool) -> str:
    if not BACKENDS[value].per_call:
        return value
    plan = tuned.plan_of((n, k, dtype, one_alpha))
    assert plan is not None
    return plan.values[m if m < len(plan.values) else -1]


def foreign(flashinfer_name: str) -> Source:
    """Who stands behind a name that SGLang passes to FlashInfer, or to us in its place."""
    if STATE.tuning is not None:
        flashinfer_name = STATE.tuning.flashinfer_name
    for record in BACKENDS.values():
        # ``cutlass`` alone is a value of SGLang's own; FlashInfer's of that name has a prefix.
        if flashinfer_name == (record.value if record.implementation is not None else record.flashinfer_name):
            return Source(record.value)
    return Source(flashinfer_name)


def quantizer_in_force() -> Source:
    """What quantizes activations in front of a GEMM that is not ours."""
    return Source(STATE.quantizer_of_ours or QUANTIZER)


def _ours(value: str) -> Quantize:
    def quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.nvfp4_quantize(x, scale, True, value)

    return quantize
