"""The MoE runner ``sm120``: our CUDA kernels behind the interface of ``ops.nvfp4_moe``.

One call is two launches: gate and up with the quantization in front and the activation behind it, then down with the
weighted sum. The scratch memory between them is allocated by torch for each call, so a CUDA graph captures it in its
own pool and streams do not share it. Nothing waits for the GPU.

As in ``native.py`` weights are constant while the model runs: the second launch fetches them while the first one runs.
"""

from __future__ import annotations

import torch

from sglang_sm120 import native
from sglang_sm120.backends.expert_limits import MAX_PAIRS, MAX_TOP_K
from sglang_sm120.errors import FormatError, bad_value
from sglang_sm120.native import start as start
from sglang_sm120.reference import Activation, ExpertWeights

#: The kernels are made for few tokens. Where other kernels run too, larger batches go to those. Measured nowhere on
#: SM12x yet; it is the number of tokens up to which every expert's rows fit the smallest token tiles.
MOST_TOKENS = 64
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "relu2": 1}


def moe(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    activation: Activation,
    gate_first: bool,
    first_expert: int,
    *,
    dependent_launch: bool = True,
) -> torch.Tensor:
    """Run the experts that this process holds.

    Args:
        hidden: bfloat16 or float16 [M, H]; copied first where its rows do not start at multiples of 16 bytes.
        topk_ids: int32 [M, top_k], numbers of all experts. Ids outside the range held here are skipped.
        topk_weights: float32 [M, top_k].
        w13: ``packed`` [E, 2 * I, H / 2], for ``relu2`` [E, I, H / 2]; ``scales`` swizzled, [E, ...]; ``alpha`` float32
            [E]; ``input_global_scale`` float32, one value or [E].
        w2: the same with [E, H, I / 2].
        activation: ``silu`` (gate and up) or ``relu2``.
        gate_first: for ``silu``, whether the gate is the first half of w13's rows.
        first_expert: number of the first expert held here.
        dependent_launch: start the first kernel while the one in front still runs, where the card can.

    Returns:
        [M, H] in the dtype of ``hidden``.

    Raises:
        FormatError: an operand breaks these rules, or H, I or top_k is beyond what the kernels take.
        UnsupportedError: the kernels cannot be compiled or loaded here.
    """
    tokens, top_k = topk_ids.shape
    if not 0 < top_k <= MAX_TOP_K:
        raise FormatError(bad_value("top_k", top_k, f"these kernels take 1 to {MAX_TOP_K}; use flashinfer_cutlass"))
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    library, can_depend = native._library(hidden.device)
    inner = 2 * w2.packed.shape[-1]
    rows = native._with_aligned_rows(hidden)
    step = MAX_PAIRS // top_k
    workspace = torch.empty(
        library.nvfp4_moe_workspace(min(tokens, step), top_k, inner), dtype=torch.uint8, device=hidden.device
    )
    try:
        for start_row in range(0, tokens, step):
            part = slice(start_row, start_row + step)
            library.nvfp4_moe(
                rows[part],
                topk_ids[part],
                topk_weights[part],
                w13.packed,
                w13.scales,
                w13.alpha,
                w13.input_global_scale,
                w2.packed,
                w2.scales,
                w2.alpha,
                w2.input_global_scale,
                out[part],
                workspace,
                _ACTIVATIONS[activation],
                gate_first,
                first_expert,
                dependent_launch and can_depend,
            )
    except ValueError as error:
        raise FormatError(str(error)) from error
    return out
