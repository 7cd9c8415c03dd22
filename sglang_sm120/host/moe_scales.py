"""Gate and up projections of experts that were quantized apart: SGLang multiplies both by the gate's global scale.

The kernels of every runner for NVFP4 experts, ours included, multiply both halves of w13 with one alpha an expert.
Where a checkpoint has two global scales, the up projection is off by their ratio in every forward.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_sm120.backends.moe_verdict import is_ours_to_judge
from sglang_sm120.host import moe_choice
from sglang_sm120.host.conventions import ExpertConvention
from sglang_sm120.host.state import STATE

#: Relative difference below which two scales count as one: what rounding to float32 or bfloat16 may leave.
_SAME = 1e-2


def warn_of_two_scales(layer: Any, convention: ExpertConvention) -> None:
    """Say once, for the first layer that has them, that gate and up have different global scales.

    Nothing is said where this package is not concerned: on other cards than SM12x without a runner of ours.

    Args:
        layer: an expert layer whose weights are loaded and not prepared yet.
        convention: names of its tensors.
    """
    facts = STATE.facts
    if moe_choice.RUNNERS.own is None and (facts is None or not is_ours_to_judge(facts)):
        return
    scales = getattr(layer, convention.w13_global_scale)
    if scales.dim() != 2 or scales.shape[1] != 2:  # no gate, or one scale for both
        return
    gate, up = scales.detach().double().unbind(1)
    ratio = up / gate if convention.decodes else gate / up
    ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)  # absurd scales are check-checkpoint's to find
    off = ratio.log().abs()
    if off.numel() == 0 or float(off.max()) <= _SAME:
        return
    expert = int(off.argmax())
    text = (
        f"gate and up of {_name_of(layer)} have different global scales, by {float(ratio[expert]):.3g} in expert "
        f"{expert}: SGLang takes the gate's for both, so the up projection is wrong by that factor. Export the "
        "checkpoint with one scale for the pair; sglang-sm120 check-checkpoint names every layer."
    )
    STATE.warn_once("gate and up have different global scales", text)


def _name_of(layer: Any) -> str:
    name = getattr(layer, "layer_name", "")  # old releases have the number alone
    return name or f"the experts of layer {getattr(layer, 'layer_id', '?')}"
