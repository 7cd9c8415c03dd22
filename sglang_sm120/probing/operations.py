"""How a probe or a benchmark calls a backend: the way that a server does."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sglang_sm120 import ops
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import QUANTIZER
from sglang_sm120.errors import ConfigError, bad_value

#: SGLang runs FlashInfer's autotuner over the dense FP4 GEMM for the other values (sglang 0.5.23
#: srt/model_executor/runner/flashinfer_autotune.py, which asks two predicates that seam "enum" extends).
_NOT_AUTOTUNED = ("cudnn", "trtllm")

#: ``quantize(x [M, K], encode scale) -> (packed [M, K/2], block scales, 128x4 swizzle)``
Quantize = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
#: ``gemm(a, b, a_scale, b_scale, alpha, bias, out_dtype) -> [M, N]``, operands packed and row-major, as ops.nvfp4_gemm
Gemm = Callable[..., torch.Tensor]
#: ``linear(x, weight, weight_scale, encode scale, alpha [N], bias) -> [M, N]``
Linear = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Operations:
    """What one subject can be asked to compute.

    Attributes:
        quantize: the quantizer that a server would run in front of the product.
        gemm: the product; ``None`` for a subject that is a quantizer alone.
        linear: both in one operator, for backends that quantize themselves.
        column_alpha: whether ``gemm`` takes an alpha per column and a bias; else one alpha and no bias.
        judges_quantizer: whether a wrong quantizer is this subject's own fault.
        warm_up: context of the first call of a shape: FlashInfer's autotuner where SGLang runs it.
    """

    quantize: Quantize | None = None
    gemm: Gemm | None = None
    linear: Linear | None = None
    column_alpha: bool = False
    judges_quantizer: bool = False
    warm_up: Callable[[], AbstractContextManager[object]] = nullcontext


def of_subject(subject: str) -> Operations:
    """Return the operations of a value of the table, or of FlashInfer's quantizer alone.

    Raises:
        ConfigError: SGLang's own kernels, which only a server can call.
        ImportError: FlashInfer is missing or broken.
    """
    if subject == QUANTIZER:
        return Operations(quantize=_flashinfer_quantize(), judges_quantizer=True)
    record = BACKENDS[subject]
    if record.implementation is not None:
        return Operations(
            quantize=lambda x, scale: ops.nvfp4_quantize(x, scale, True, subject),
            gemm=lambda *arguments: ops.nvfp4_gemm(*arguments, subject),
            linear=(lambda *arguments: ops.nvfp4_linear(*arguments, subject)) if record.quantizes_itself else None,
            column_alpha=True,
            judges_quantizer=True,
        )
    if record.flashinfer_name is None:
        raise ConfigError(bad_value("backend", subject, "only a server can call SGLang's own kernels"))
    return Operations(
        quantize=_flashinfer_quantize(),
        gemm=_flashinfer_gemm(record.flashinfer_name),
        warm_up=nullcontext if record.flashinfer_name in _NOT_AUTOTUNED else autotune,
    )


def _flashinfer_quantize() -> Quantize:
    """``fp4_quantize`` as SGLang calls it on SM12x: scale factors swizzled, the CUDA implementation by name from
    FlashInfer 0.6.8 on, which is the first with a choice (sglang 0.5.12 srt/layers/quantization/fp4_utils.py)."""
    function: Any = importlib.import_module("flashinfer").fp4_quantize
    chosen = {"backend": "cuda"} if "backend" in inspect.signature(function).parameters else {}

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed, scales = function(x, scale, **chosen)
        return packed, scales

    return quantize


def _flashinfer_gemm(name: str) -> Gemm:
    """``mm_fp4`` as SGLang's operator calls it: weight and its scales as transposed views of row-major tensors, scales
    of the weight typed e4m3, alpha one float32 (sglang 0.5.9 to 0.5.23 modelopt_quant.py, ``fp4_gemm``)."""
    function: Any = importlib.import_module("flashinfer").mm_fp4

    def gemm(
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor,
        b_scale: torch.Tensor,
        alpha: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        weight_scale = b_scale if b_scale.dtype == torch.float8_e4m3fn else b_scale.view(torch.float8_e4m3fn)
        out: torch.Tensor = function(a, b.T, a_scale, weight_scale.T, alpha, out_dtype, backend=name)
        return out if bias is None else out + bias

    return gemm


def autotune() -> AbstractContextManager[object]:
    """Return FlashInfer's autotuner as a context; it tunes what is called inside."""
    context: AbstractContextManager[object] = importlib.import_module("flashinfer.autotuner").autotune(True)
    return context
