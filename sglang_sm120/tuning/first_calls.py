"""The first calls of a plan, made while weights load: they may compile, tune themselves, or refuse."""

from __future__ import annotations

import torch

from sglang_sm120.errors import BackendError
from sglang_sm120.layout import align_rows, padded_scale_shape
from sglang_sm120.probing.operations import of_subject
from sglang_sm120.tuning.backend import Key, Plan


def first_calls(plan: Plan, key: Key, device: torch.device) -> dict[str, str]:
    """Call each chosen backend once for each measured M, and return those that refused, with the reason.

    Later calls of the same M then neither compile nor tune, which a CUDA graph could not capture. FlashInfer's
    autotuner runs where it ran for the measurement; the largest M comes first, as it tunes all smaller ones too.

    Args:
        plan: not in use yet.
        key: N, K, type, and whether one alpha serves all columns.
        device: where the layer lies.

    Raises:
        BackendError: a CUDA error, after which this process cannot serve any more.
        torch.OutOfMemoryError: there is no room for the operands of the largest M.
    """
    n, k, dtype, one_alpha = key
    rows = sorted(plan.choices, reverse=True)
    x = torch.zeros(rows[0], k, dtype=dtype, device=device)
    weight = align_rows(torch.zeros(n, k // 2, dtype=torch.uint8, device=device))
    weight_scale = torch.zeros(padded_scale_shape(n, k // 16), dtype=torch.uint8, device=device)
    scale = torch.ones((), dtype=torch.float32, device=device)
    alpha = scale if one_alpha else torch.ones(n, dtype=torch.float32, device=device)
    refused: dict[str, str] = {}
    for m in rows:
        value = plan.choices[m]
        if value in refused:
            continue
        problem = ""
        try:
            with of_subject(value).warm_up():
                plan.linears[m](x[:m], weight, weight_scale, scale, alpha, None)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - backends refuse a case by exceptions of any type
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        _require_sound(device, f"{value} for M={m} N={n} K={k} (layer {plan.layers[0]})")
        if problem:
            refused[value] = f"{problem} (M={m})"
    return refused


def _require_sound(device: torch.device, what: str) -> None:
    """Wait for the call; a refusal launches nothing, a CUDA error leaves nothing to fall back to."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise BackendError(f"The first call of {what} ended in a CUDA error: {error}") from error
