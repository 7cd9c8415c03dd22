"""SGLang's own runner of NVFP4 experts in one piece.

``cutlass_moe_fp4`` is what calls the operators for experts. Its steps ask the GPU for the rows of each expert and leave
the places of expert id -1 in their maps unwritten, which then index memory. The MoE kernels of this package take the
whole function instead: nothing is asked, such ids are skipped, and a CUDA graph can record it.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_sm120 import ops
from sglang_sm120.sgl_kernel_ops.experts import refuse_capture

#: Waits for the GPU in every call.
_NOT_RECORDED = "torch_reference"


def cutlass_moe_fp4(
    a: torch.Tensor,
    a1_gscale: torch.Tensor,
    w1_fp4: torch.Tensor,
    w1_blockscale: torch.Tensor,
    w1_alphas: torch.Tensor,
    a2_gscale: torch.Tensor,
    w2_fp4: torch.Tensor,
    w2_blockscale: torch.Tensor,
    w2_alphas: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    params: Any,
    apply_router_weight_on_input: bool = False,
    no_combine: bool = False,
    *,
    backend: str,
) -> torch.Tensor:
    """Run the experts of this rank; SGLang's arguments, and one rounding at the end where SGLang has three.

    Args:
        a: bf16/fp16 ``[M, H]``.
        a1_gscale: float32 ``[E]``, encode scales of ``a``.
        w1_fp4: packed e2m1 uint8 ``[E, 2 * I, H / 2]``, gate first.
        w1_blockscale: its block scales, swizzled 128x4, ``[E, 2 * I to 128, H / 16 to 4]``.
        w1_alphas: float32 ``[E]``.
        a2_gscale: float32 ``[E]``, encode scales of the activation's output.
        w2_fp4: packed e2m1 uint8 ``[E, H, I / 2]``.
        w2_blockscale: its block scales likewise.
        w2_alphas: float32 ``[E]``.
        topk_weights: ``[M, top_k]``.
        topk_ids: ``[M, top_k]``, numbers of the experts of this rank; all others (-1) are skipped.
        params: SGLang's buffers for its own kernels; unused.
        apply_router_weight_on_input: the caller has applied ``topk_weights``.
        no_combine: return the experts' results apart and without ``topk_weights``.
        backend: the MoE runner of ours.

    Returns:
        ``[M, H]``, or ``[M, top_k, H]`` with ``no_combine``, in the dtype of ``a``.

    Raises:
        FormatError: an operand breaks these rules, or a size is beyond what the kernels take.
        UnsupportedError: ``torch_reference`` was called while a CUDA graph is captured.
    """
    if backend == _NOT_RECORDED:
        refuse_capture(a, "torch_reference waits for the GPU in every layer")
    ids, weights = topk_ids.to(torch.int32), topk_weights.to(torch.float32)
    if apply_router_weight_on_input or no_combine:
        weights = torch.ones_like(weights)
    top_k = ids.shape[1]
    if no_combine:  # every slot as a token of its own
        a, ids, weights = a.repeat_interleave(top_k, 0), ids.reshape(-1, 1), weights.reshape(-1, 1)
    first = (w1_fp4, w1_blockscale, w1_alphas, a1_gscale)
    second = (w2_fp4, w2_blockscale, w2_alphas, a2_gscale)
    out = ops.nvfp4_moe(a, ids, weights, *first, *second, "silu", True, 0, backend)
    return out.view(-1, top_k, out.shape[1]) if no_combine else out
