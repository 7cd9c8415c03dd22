"""What a layer does when its weights are written again after they were prepared.

Derived tensors are made by the preparation alone, so a layer that was written without it must not be multiplied.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_sm120 import layout
from sglang_sm120.errors import ConfigError
from sglang_sm120.host.conventions import Convention


def watch(layer: Any, convention: Convention) -> None:
    """Let the weight loaders note what is written, until the next preparation: ``layer.sm120_current`` becomes false.

    Watched is what derived tensors come from: block scales and global scales. The packed weight is multiplied where
    it lies. Block scales that were swizzled in place return to row-major order before their first byte is written.
    """
    for name in (convention.weight_scale, convention.weight_global, convention.input_global):
        if name is not None:
            _watch(layer, getattr(layer, name), is_block_scale=name == convention.weight_scale)


def watch_experts(layer: Any) -> None:
    """Likewise for an expert layer: its alphas and swizzled block scales come from parameters whose loaders remain.

    Releases that replace those parameters, and so cannot load them again, leave nothing to watch.
    """
    for name, parameter in layer.named_parameters(recurse=False):
        if "scale" in name and hasattr(parameter, "weight_loader"):
            _watch(layer, parameter, is_block_scale=False)
    layer.sm120_current = True


def refuse_if_stale(layer: Any) -> None:
    """Refuse to multiply a layer that was written without its preparation.

    Raises:
        ConfigError: names the layer and what to use instead.
    """
    if not getattr(layer, "sm120_current", True):  # unset where weights came prepared
        raise ConfigError(
            f"Weights of {layer_name(layer)} were written without the step that prepares them (as "
            "update_weights_from_tensor does). Use update_weights_from_disk."
        )


def _watch(layer: Any, parameter: Any, *, is_block_scale: bool) -> None:
    loader = parameter.weight_loader
    if getattr(loader, "sm120_watches", False):
        return

    def watching_loader(param: Any, *args: Any, **kwargs: Any) -> Any:
        layer.sm120_current = False
        if is_block_scale and getattr(layer, "sm120_swizzled", False):
            param.data.copy_(layout.unswizzle_128x4(param.data, *param.shape))
            layer.sm120_swizzled = False
        return loader(param, *args, **kwargs)

    watching_loader.sm120_watches = True  # type: ignore[attr-defined]
    _set_loader(parameter, watching_loader)


def refuse_if_padded(layer: Any, convention: Convention, unpadded: torch.Size, backend: str) -> None:
    """Name the reason before a reload dies in an assertion of a weight loader.

    SGLang's preparation replaces a weight whose N or K is not a multiple of 32 by a padded one, into which the
    checkpoint's tensor no longer fits. Nothing has been written when this is raised.
    """
    parameter = getattr(layer, convention.weight)
    if parameter.shape == unpadded:
        return

    def refusing_loader(*args: Any, **kwargs: Any) -> None:
        n, half_k = unpadded
        raise ConfigError(
            f"The weights of {layer_name(layer)} cannot be loaded again: SGLang padded it from N={n}, K={2 * half_k} "
            f"for --fp4-gemm-backend {backend}. Restart the server with the new weights, or serve with torch_reference."
        )

    _set_loader(parameter, refusing_loader)


def refuse_again(layer: Any, why: str) -> None:
    """Let the weight loaders of an expert layer refuse whatever comes after its preparation.

    Args:
        layer: prepared.
        why: its weights cannot be written any more.
    """

    def refusing_loader(*args: Any, **kwargs: Any) -> None:
        text = f"The weights of {layer_name(layer)} cannot be loaded again: {why}."
        raise ConfigError(f"{text} Restart the server with the new weights.")

    for _, parameter in layer.named_parameters(recurse=False):
        if hasattr(parameter, "weight_loader"):
            _set_loader(parameter, refusing_loader)


def layer_name(layer: Any) -> str:
    """The layer's place in the model where SGLang tells it, else its class and size."""
    prefix: str = getattr(layer, "prefix", "")
    if prefix or not hasattr(layer, "logical_widths"):  # experts have none
        return prefix or f"{type(layer).__name__} {getattr(layer, 'layer_id', '')}".rstrip()
    return f"{type(layer).__name__} (N={sum(layer.logical_widths)})"


def _set_loader(parameter: Any, loader: Any) -> None:
    # A property without a setter on SGLang's own parameters, an attribute on torch's.
    setattr(parameter, "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader", loader)
