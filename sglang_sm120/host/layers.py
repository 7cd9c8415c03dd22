"""Prepare and run one NVFP4 linear layer of SGLang with a backend of ours.

SGLang's own preparation pads N and K to multiples of 32, keeps one global scale per layer (the largest of a
fused projection's) and, in some releases, replaces the parameters so that weights cannot be loaded again.
Ours keeps every parameter that the loader fills and adds three of its own:

    sm120_alpha             float32 [N]   global scale of each output column
    sm120_activation_scale  float32 [S]   encode scale of the input, one per group of shards
    sm120_weight_scale[_i]  e4m3 bytes    128x4-swizzled block scales, only where they cannot stand in place

Block scales whose shape is a whole number of tiles (N % 128 == 0, K % 64 == 0) are swizzled in place, so the
scales are held once. The loader hook (``reload.py``) puts them back into row-major order before it writes the first
byte of a reload; a preparation that runs twice, or after a partial reload, then still finds the truth.

On a reload every derived tensor is overwritten in place: a captured CUDA graph keeps its addresses.

Kernels read weights 16 bytes at a time, so rows of K / 2 bytes that are no multiple of 16 are moved once into a buffer
with padded rows. The parameter becomes a view of it and keeps its shape, so a reload writes where the kernels read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from sglang_sm120 import layout, ops, scales
from sglang_sm120.backends import BACKENDS
from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.failures import failed_call
from sglang_sm120.formats import BLOCK_SIZE
from sglang_sm120.host import reload
from sglang_sm120.host.conventions import Convention
from sglang_sm120.host.reload import layer_name
from sglang_sm120.host.state import STATE
from sglang_sm120.verification.failed_file import DenseFacts


@dataclass(frozen=True)
class Group:
    """Adjacent output columns that share one quantized input."""

    start: int
    stop: int
    scale_name: str  # attribute of the layer that holds the swizzled block scales
    alpha: slice | int  # of ``sm120_alpha``: one value for each column, or one for all


@dataclass(frozen=True)
class Prepared:
    """What :func:`forward` needs besides the layer's tensors."""

    backend: str
    weight_name: str
    groups: tuple[Group, ...]
    weight_only: bool
    pre_scaled: bool  # NVFP4_AWQ: the input is multiplied by a per-channel scale first


def scales_differ(layer: torch.nn.Module, convention: Convention, *, inputs: bool) -> bool:
    """Whether the shards of a fused projection have different global scales (of weights and, if asked, inputs)."""
    names = (convention.weight_global, convention.input_global if inputs else None)
    return any(torch.unique(getattr(layer, name).data).numel() > 1 for name in names if name is not None)


def remember_dtype(layer: Any, dtype: torch.dtype) -> None:
    """Keep the model's dtype on the layer. Some classes of SGLang do not, and the default dtype that model code runs
    under is back to float32 when weights are prepared."""
    layer.sm120_dtype = dtype


def mark_unloaded(layer: torch.nn.Module, convention: Convention) -> None:
    """Fill the global scales with NaN right after creation, so that a missing one is seen.

    SGLang allocates them uninitialised. Where a checkpoint stores q, k and v as one tensor, releases up to
    0.5.11 fill the first slot only and the others keep whatever was in memory.
    """
    for name in (convention.weight_global, convention.input_global):
        parameter = getattr(layer, name, None) if name is not None else None
        # A release that starts from a default (1.0 for a checkpoint without input scales) means it.
        if parameter is None or parameter.is_meta or bool((parameter.data == 1).all()):
            continue
        parameter.data.fill_(float("nan"))


def complete_scales(layer: Any, convention: Convention, *, dummy: bool) -> None:
    """Spread the one scale of a projection that is fused on disk over its shards.

    ``dummy`` weights (``--load-format dummy``) are random numbers of either sign, which are no scales: they
    become one, so that the layer can be measured.
    """
    for name in (convention.weight_global, convention.input_global):
        if name is None:
            continue
        data = getattr(layer, name).data.view(-1)
        if dummy:
            data.fill_(1.0)
        elif data.numel() > 1 and not bool(data[0].isnan()):
            spread: dict[str, float] = layer.__dict__.setdefault("sm120_spread", {})
            # A reload writes the first slot again and leaves in the others what was spread into them before.
            stale = name in spread and bool((data[1:] == spread[name]).all())
            if stale or bool(data[1:].isnan().all()):
                spread[name] = data[0].item()
                data.fill_(data[0])


def prepare(layer: Any, method: Any, convention: Convention, backend: str, *, one_alpha: bool = False) -> None:
    """Build the derived tensors of ``layer``; called after every load.

    Args:
        layer: with its weights loaded.
        method: SGLang's, which owns the weights.
        convention: of ``method``.
        backend: of ours.
        one_alpha: hand over one alpha for all columns of a call, as foreign kernels want it (:func:`has_one_alpha`).

    Raises:
        FormatError: a global scale is zero, infinite, NaN or absurd.
        ConfigError: a group size other than 16.
    """
    group_size = getattr(getattr(method, "quant_config", None), "group_size", None) or BLOCK_SIZE
    if group_size != BLOCK_SIZE:
        raise ConfigError(bad_value("group_size", group_size, "NVFP4 has blocks of 16; use another backend"))
    if getattr(layer, "_interleave_for_swiglu_fusion", False):
        raise ConfigError(
            f"{layer_name(layer)} feeds SGLang's fused SwiGLU kernel for capability 10.x, which reads weights that "
            f"--fp4-gemm-backend {backend} does not prepare. Use flashinfer_cutedsl or flashinfer_cutlass there."
        )
    widths = list(layer.logical_widths)
    alpha, activation = _global_scales(layer, convention, widths)
    _derive(layer, "sm120_alpha", alpha)
    shared = activation is None or activation.all_equal
    if activation is not None:
        _derive(layer, "sm120_activation_scale", activation.encode[:1] if shared else activation.encode)
        # SGLang's fused activation kernels read this name when they quantize for the layer (0.5.20+).
        _derive(layer, "input_scale_inv", activation.encode.max())
    bounds = [(0, sum(widths))] if shared else _bounds(widths)
    names = _swizzle_scales(layer, convention, bounds)
    weight = getattr(layer, convention.weight)
    weight.data = layout.align_rows(weight.data)
    layer.sm120_prepared = Prepared(
        backend=backend,
        weight_name=convention.weight,
        groups=tuple(
            Group(a, b, name, a if one_alpha else slice(a, b)) for (a, b), name in zip(bounds, names, strict=True)
        ),
        weight_only=convention.weight_only,
        pre_scaled=bool(getattr(getattr(method, "quant_config", None), "is_awq", False)),
    )
    reload.watch(layer, convention)
    layer.sm120_current = True
    if weight.is_cuda:
        # A kernel launched as a dependent one reads weights before the kernels in front of it have ended, so what
        # writes them must have ended before the next forward.
        torch.cuda.current_stream(weight.device).synchronize()


def group_widths(layer: Any, convention: Convention) -> list[int]:
    """Output columns of each call of the operator that the layer will make; see :func:`forward`."""
    widths = list(layer.logical_widths)
    name = convention.input_global
    shared = name is None or torch.unique(getattr(layer, name).data).numel() == 1
    return [sum(widths)] if shared else widths


def has_one_alpha(layer: Any, convention: Convention) -> bool:
    """Whether all columns of each call of the operator share one global scale."""
    return len(group_widths(layer, convention)) > 1 or not scales_differ(layer, convention, inputs=False)


def require_same_calls(layer: Any, convention: Convention) -> None:
    """Refuse a reload after which a layer of a per-call backend would have to be multiplied in another way.

    Captured CUDA graphs hold kernels that were chosen for one alpha, or for one in each column.

    Raises:
        ConfigError: the new global scales are equal where the old ones differed, or the other way round.
    """
    before: Prepared | None = getattr(layer, "sm120_prepared", None)
    if before is None or not BACKENDS[before.backend].per_call:
        return
    had = (len(before.groups), isinstance(before.groups[0].alpha, int))
    if had != (len(group_widths(layer, convention)), has_one_alpha(layer, convention)):
        raise ConfigError(
            f"The weights of {layer_name(layer)} cannot be loaded again under --fp4-gemm-backend {before.backend}: the "
            "global scales of its fused shards are equal before and differ after, or the other way round, and its "
            "kernels were chosen for the old ones. Restart the server with the new weights."
        )


def forward(layer: Any, x: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Run the layer: one operator call, or one per group of shards whose input scales differ.

    Args:
        x: bf16/fp16 [..., K], or the pair (packed e2m1 [M, K/2], swizzled block scales) that SGLang's fused
            activation kernels hand over.
        bias: [N] or ``None``; added before the one rounding to the output type.

    Raises:
        ConfigError: scales were written since the layer was prepared, or the layer cannot take a quantized input.
        BackendError: the backend failed, without an error of ours.
        Sm120Error: what the backend raised; like the others it names backend, layer and sizes.
    """
    prepared: Prepared = layer.sm120_prepared
    reload.refuse_if_stale(layer)
    try:
        if isinstance(x, tuple):
            return _forward_quantized(layer, prepared, x, bias)
        return _forward_rows(layer, prepared, x, bias)
    except (torch.OutOfMemoryError, ConfigError):
        raise  # they say who and what themselves
    except Exception as error:
        if getattr(error, "names_call", False):  # of the backend that sm120_tuned chose
            raise
        remedy = "Name another --fp4-gemm-backend, or run sglang-sm120 probe"
        call = _facts(layer, prepared, x, bias)
        raise failed_call(prepared.backend, layer_name(layer), call, error, remedy, STATE.facts) from error


def _facts(layer: Any, prepared: Prepared, x: Any, bias: torch.Tensor | None) -> DenseFacts:
    """What a message and a file can say about a call after the device stopped answering."""
    rows = x[0] if isinstance(x, tuple) else x
    return DenseFacts(
        operation="weight-only" if prepared.weight_only else "gemm" if isinstance(x, tuple) else "linear",
        m=rows.numel() // max(1, rows.shape[-1]),
        widths=tuple(group.stop - group.start for group in prepared.groups),
        k=layer.input_size_per_partition,
        dtype=str(layer.sm120_dtype if isinstance(x, tuple) else x.dtype).removeprefix("torch."),
        one_alpha=isinstance(prepared.groups[0].alpha, int),
        bias=bias is not None,
    )


def _forward_rows(layer: Any, prepared: Prepared, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if prepared.pre_scaled:
        x = x * layer.pre_quant_scale
    weight = getattr(layer, prepared.weight_name)
    rows = x.reshape(-1, x.shape[-1])
    outputs = []
    for index, group in enumerate(prepared.groups):
        part = slice(group.start, group.stop)
        outputs.append(
            ops.nvfp4_linear(
                rows,
                weight[part],
                getattr(layer, group.scale_name),
                None if prepared.weight_only else layer.sm120_activation_scale[index],
                layer.sm120_alpha[group.alpha],
                None if bias is None else bias[part],
                prepared.backend,
            )
        )
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return out.view(*x.shape[:-1], out.shape[-1])


def _forward_quantized(
    layer: Any, prepared: Prepared, x: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    packed, block_scales = x
    if len(prepared.groups) != 1 or prepared.weight_only or prepared.pre_scaled:
        raise ConfigError(
            f"{type(layer).__name__} was given a quantized input but needs the original one (different input "
            "scales, weight-only or AWQ weights). Set SGLANG_DISABLE_SILU_FP4_QUANT_FUSION=1."
        )
    group = prepared.groups[0]
    return ops.nvfp4_gemm(
        packed,
        getattr(layer, prepared.weight_name),
        block_scales,
        getattr(layer, group.scale_name),
        layer.sm120_alpha[group.alpha],
        bias,
        layer.sm120_dtype,
        prepared.backend,
    )


def _global_scales(
    layer: Any, convention: Convention, widths: list[int]
) -> tuple[torch.Tensor, scales.ActivationScales | None]:
    weight_global = getattr(layer, convention.weight_global).data
    modelopt = convention.scales == "modelopt"
    if convention.input_global is None:
        # Weight-only: the input is used as it is, its scale is one.
        input_global = torch.ones(1, dtype=torch.float32, device=weight_global.device)
        activation = None
    else:
        input_global = getattr(layer, convention.input_global).data
        read = scales.activation_scales_modelopt if modelopt else scales.activation_scales_compressed_tensors
        activation = read(len(widths), input_global)
    column_alpha = scales.column_alpha_modelopt if modelopt else scales.column_alpha_compressed_tensors
    return column_alpha(widths, input_global, weight_global), activation


def _bounds(widths: list[int]) -> list[tuple[int, int]]:
    stops = [sum(widths[: i + 1]) for i in range(len(widths))]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _swizzle_scales(layer: Any, convention: Convention, bounds: list[tuple[int, int]]) -> list[str]:
    """Return the attribute that holds the swizzled block scales of each group, in order."""
    parameter = getattr(layer, convention.weight_scale)
    rows, blocks = parameter.shape
    if len(bounds) == 1 and layout.padded_scale_shape(rows, blocks) == (rows, blocks):
        if not getattr(layer, "sm120_swizzled", False):
            parameter.data.copy_(layout.swizzle_128x4(parameter.data))
            layer.sm120_swizzled = True
        return [convention.weight_scale]
    names = [f"sm120_weight_scale_{i}" for i in range(len(bounds))]
    for name, (start, stop) in zip(names, bounds, strict=True):
        _derive(layer, name, layout.swizzle_128x4(parameter.data[start:stop]))
    return names


def _derive(layer: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Store a derived tensor as a parameter, in place when it is there already."""
    current = getattr(layer, name, None)
    if isinstance(current, Parameter) and current.shape == value.shape and current.dtype == value.dtype:
        current.data.copy_(value)
    else:
        setattr(layer, name, Parameter(value.detach().clone(), requires_grad=False))
