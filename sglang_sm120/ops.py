"""The operators ``torch.ops.sglang_sm120.*``: one name per job, the backend chosen by an argument.

They are opaque to torch.compile and have fake implementations, allocate nothing but their results, never
wait for the GPU and look at shapes only, so CUDA graphs can capture them.
"""

# torch.library has no annotations.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from sglang_sm120 import layout
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.moe_table import MOE_RUNNERS
from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.reference import ExpertWeights

_LIBRARY = torch.library.Library("sglang_sm120", "DEF")
_LIBRARY.define(
    "nvfp4_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? activation_scale, Tensor alpha, "
    "Tensor? bias, str backend) -> Tensor"
)
_LIBRARY.define(
    "nvfp4_gemm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor alpha, Tensor? bias, "
    "ScalarType out_dtype, str backend) -> Tensor"
)
_LIBRARY.define("nvfp4_quantize(Tensor x, Tensor global_scale, bool swizzled, str backend) -> (Tensor, Tensor)")
_LIBRARY.define(
    "nvfp4_moe(Tensor hidden, Tensor topk_ids, Tensor topk_weights, "
    "Tensor w13, Tensor w13_scale, Tensor w13_alpha, Tensor w13_input_scale, "
    "Tensor w2, Tensor w2_scale, Tensor w2_alpha, Tensor w2_input_scale, "
    "str activation, bool gate_first, int first_expert, str backend) -> Tensor"
)


@cache
def implementation(backend: str) -> ModuleType:
    """Import the module that implements a backend of ours.

    Raises:
        ConfigError: ``backend`` is not one of ours.
    """
    record = BACKENDS.get(backend)
    if record is None or record.implementation is None:
        ours = ", ".join(b.value for b in BACKENDS.values() if b.implementation)
        raise ConfigError(bad_value("backend", backend, f"these operators implement {ours}"))
    return import_module(record.implementation)


@cache
def moe_implementation(backend: str) -> ModuleType:
    """Import the module that implements a MoE runner of ours.

    Raises:
        ConfigError: ``backend`` is not one of ours.
    """
    record = MOE_RUNNERS.get(backend)
    if record is None or record.implementation is None:
        ours = ", ".join(b.value for b in MOE_RUNNERS.values() if b.implementation)
        raise ConfigError(bad_value("backend", backend, f"this operator implements {ours}"))
    return import_module(record.implementation)


def start(backend: str, device: torch.device) -> None:
    """Let a backend of ours load what its first call would load; its module may have a function ``start(device)``.

    Raises:
        ConfigError: ``backend`` is not one of ours.
        UnsupportedError: what it needs is missing on this machine.
    """
    _start(implementation(backend), device)


def start_moe(backend: str, device: torch.device) -> None:
    """:func:`start` for a MoE runner of ours."""
    _start(moe_implementation(backend), device)


def moe_dtypes(backend: str) -> tuple[torch.dtype, ...]:
    """Which activations a MoE runner of ours takes."""
    taken: tuple[torch.dtype, ...] = getattr(moe_implementation(backend), "DTYPES", (torch.bfloat16, torch.float16))
    return taken


def wants_up_first(backend: str) -> bool:
    """Whether a MoE runner of ours takes ``gate_first=False`` alone."""
    return bool(getattr(moe_implementation(backend), "UP_FIRST_ONLY", False))


def wants_one_stream(backend: str) -> bool:
    """Whether calls of a MoE runner of ours must follow one another."""
    return bool(getattr(moe_implementation(backend), "ONE_STREAM", False))


def prepare_moe(backend: str, w13: ExpertWeights, w2: ExpertWeights, top_k: int, activation: str) -> bool:
    """Let a MoE runner of ours make what it keeps for one layer; its module may have a function ``prepare``.

    Args:
        backend: the runner.
        w13, w2: the operands of ``nvfp4_moe``.
        top_k: experts of a token.
        activation: ``silu`` or ``relu2``.

    Returns:
        Whether it keeps anything.

    Raises:
        UnsupportedError: the runner does not take the layer.
    """
    keep: Callable[..., None] | None = getattr(moe_implementation(backend), "prepare", None)
    if keep is not None:
        keep(w13, w2, top_k, activation)
    return keep is not None


def _start(module: ModuleType, device: torch.device) -> None:
    load: Callable[[torch.device], None] | None = getattr(module, "start", None)
    if load is not None:
        load(device)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    activation_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    out: torch.Tensor = implementation(backend).linear(x, weight, weight_scale, activation_scale, alpha, bias)
    return out


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    out: torch.Tensor = implementation(backend).gemm(a, b, a_scale, b_scale, alpha, bias, out_dtype)
    return out


def _quantize(
    x: torch.Tensor, global_scale: torch.Tensor, swizzled: bool, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out: tuple[torch.Tensor, torch.Tensor] = implementation(backend).quantize(x, global_scale, swizzled)
    return out


def _moe(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_alpha: torch.Tensor,
    w13_input_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_alpha: torch.Tensor,
    w2_input_scale: torch.Tensor,
    activation: str,
    gate_first: bool,
    first_expert: int,
    backend: str,
) -> torch.Tensor:
    out: torch.Tensor = moe_implementation(backend).moe(
        hidden,
        topk_ids,
        topk_weights,
        ExpertWeights(w13, w13_scale, w13_alpha, w13_input_scale),
        ExpertWeights(w2, w2_scale, w2_alpha, w2_input_scale),
        activation,
        gate_first,
        first_expert,
    )
    return out


_LIBRARY.impl("nvfp4_linear", _linear, "CompositeExplicitAutograd")
_LIBRARY.impl("nvfp4_gemm", _gemm, "CompositeExplicitAutograd")
_LIBRARY.impl("nvfp4_quantize", _quantize, "CompositeExplicitAutograd")
_LIBRARY.impl("nvfp4_moe", _moe, "CompositeExplicitAutograd")


@torch.library.register_fake("sglang_sm120::nvfp4_linear")
def _linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    activation_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.register_fake("sglang_sm120::nvfp4_gemm")
def _gemm_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@torch.library.register_fake("sglang_sm120::nvfp4_quantize")
def _quantize_fake(
    x: torch.Tensor, global_scale: torch.Tensor, swizzled: bool, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    m, k = x.shape
    rows, blocks = layout.padded_scale_shape(m, k // 16) if swizzled else (m, k // 16)
    packed = x.new_empty((m, k // 2), dtype=torch.uint8)
    return packed, x.new_empty((rows, blocks), dtype=torch.uint8)


@torch.library.register_fake("sglang_sm120::nvfp4_moe")
def _moe_fake(hidden: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


# The overloads themselves: calling torch.ops.<namespace>.<name> would pick the overload again on every call.
nvfp4_linear: Callable[..., torch.Tensor] = torch.ops.sglang_sm120.nvfp4_linear.default
nvfp4_gemm: Callable[..., torch.Tensor] = torch.ops.sglang_sm120.nvfp4_gemm.default
nvfp4_quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.ops.sglang_sm120.nvfp4_quantize.default
nvfp4_moe: Callable[..., torch.Tensor] = torch.ops.sglang_sm120.nvfp4_moe.default
