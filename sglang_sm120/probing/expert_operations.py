"""How a probe or a benchmark calls a runner of NVFP4 experts: the way that a server does."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sglang_sm120 import ops
from sglang_sm120.backends.expert_limits import ExpertSizes, beyond_limits
from sglang_sm120.backends.moe_table import CALLABLE_RUNNERS, KERNEL_RUNNERS, MOE_RUNNERS
from sglang_sm120.errors import ConfigError, UnsupportedError, bad_value
from sglang_sm120.probing.operations import autotune
from sglang_sm120.reference import Activation, ExpertWeights


@dataclass(frozen=True)
class Layer:
    """Experts of one rank as SGLang's ``flashinfer_cutlass`` keeps them: scales swizzled, one input scale a GEMM.

    Attributes:
        w13: [E, 2 * I, H / 2], up before gate unless ``gate_first``; [E, I, H / 2] for ``relu2``.
        w2: [E, H, I / 2].
        activation: ``silu`` or ``relu2``.
        experts: of all ranks; E of them are here.
        first_expert: number of the first one here, a multiple of E.
        gate_first: order of the halves of ``w13``, as a server may have kept them.
    """

    w13: ExpertWeights
    w2: ExpertWeights
    activation: Activation
    experts: int
    first_expert: int = 0
    gate_first: bool = False


#: ``moe(hidden [M, H], ids int32 [M, top_k], router weights float32 [M, top_k], layer) -> [M, H]``
Moe = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layer], torch.Tensor]


@dataclass(frozen=True)
class ExpertOperations:
    """What one runner can be asked to compute.

    Attributes:
        moe: the whole layer.
        warm_up: context of the first call: FlashInfer's autotuner where SGLang runs it.
        can_be_captured: whether a CUDA graph can hold a call.
        rounds_between: it hands numbers of the type of ``hidden`` from kernel to kernel, not float32 or better.
        up_first_only: it takes no ``gate_first``.
    """

    moe: Moe
    warm_up: Callable[[], AbstractContextManager[object]] = nullcontext
    can_be_captured: bool = True
    rounds_between: bool = False
    up_first_only: bool = False


def of_runner(runner: str) -> ExpertOperations:
    """Return the operations of a MoE runner.

    Raises:
        ConfigError: a runner that only a server can call.
        ImportError: FlashInfer is missing or broken.
    """
    if runner not in CALLABLE_RUNNERS:
        remedy = f"take one of {', '.join(CALLABLE_RUNNERS)}; a server alone can call the others"
        raise ConfigError(bad_value("runner", runner, remedy))
    record = MOE_RUNNERS[runner]
    if record.implementation is None:
        return ExpertOperations(_flashinfer(), autotune, rounds_between=True, up_first_only=True)

    def moe(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: Layer) -> torch.Tensor:
        local, size, half_inner = layer.w2.packed.shape
        sizes = ExpertSizes(layer.experts, local, ids.shape[1], size, 2 * half_inner)
        if obstacle := beyond_limits(runner, sizes):
            raise UnsupportedError(bad_value("runner", runner, f"{obstacle}; take another one"))
        stacks = [t for s in (layer.w13, layer.w2) for t in (s.packed, s.scales, s.alpha, s.input_global_scale)]
        order = (layer.activation, layer.gate_first, layer.first_expert)
        return ops.nvfp4_moe(hidden, ids, weights, *stacks, *order, runner)

    return ExpertOperations(
        moe,
        can_be_captured=not record.any_device,
        rounds_between=runner not in KERNEL_RUNNERS,
        up_first_only=ops.wants_up_first(runner),
    )


def _flashinfer() -> Moe:
    """``cutlass_fused_moe`` as SGLang's runner calls it with NVFP4 experts: hidden states unquantized, codes as int64,
    block scales as int32, numbers of experts global (sglang 0.5.9 modelopt_quant.py, ``apply``; 0.5.23
    srt/layers/moe/moe_runner/flashinfer_cutlass.py, ``_run_flashinfer_cutlass``, which asks for the unfused finalize
    unless a variable says otherwise). The range of tokens to tune for is FlashInfer's default, which is also the most
    that SGLang 0.5.23 asks for."""
    module: Any = importlib.import_module("flashinfer.fused_moe")
    function = module.cutlass_fused_moe
    activations = {"silu": module.ActivationType.Swiglu, "relu2": module.ActivationType.Relu2}
    chosen = {"use_fused_finalize": False} if "use_fused_finalize" in inspect.signature(function).parameters else {}

    def moe(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: Layer) -> torch.Tensor:
        local = layer.w2.packed.shape[0]
        out: torch.Tensor = function(
            output=torch.empty_like(hidden),
            input=hidden,
            token_selected_experts=ids,
            token_final_scales=weights,
            fc1_expert_weights=layer.w13.packed.view(torch.long),
            fc2_expert_weights=layer.w2.packed.view(torch.long),
            output_dtype=hidden.dtype,
            input_sf=None,
            quant_scales=[
                scale
                for s in (layer.w13, layer.w2)
                for scale in (s.input_global_scale, s.scales.view(torch.int32), s.alpha)
            ],
            ep_size=layer.experts // local,
            ep_rank=layer.first_expert // local,
            tp_size=1,
            tp_rank=0,
            activation_type=activations[layer.activation],
            **chosen,
        )[0]
        return out

    return moe
