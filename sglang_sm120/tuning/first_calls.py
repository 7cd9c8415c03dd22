"""The first calls of a plan, made while weights load: they may compile, tune themselves, or refuse."""

from __future__ import annotations

import logging
import sys

import torch

from sglang_sm120.errors import Sm120Error
from sglang_sm120.failures import failed_call
from sglang_sm120.layout import align_rows, padded_scale_shape
from sglang_sm120.probing.operations import Linear, of_subject
from sglang_sm120.tuning.backend import Key, Plan
from sglang_sm120.verification.failed_file import DenseFacts

logger = logging.getLogger("sglang_sm120")


def first_calls(plan: Plan, key: Key, device: torch.device) -> dict[str, str]:
    """Call each chosen backend once for each measured M, and return those that refused, with the reason.

    Later calls of the same M then neither compile nor tune, which a CUDA graph could not capture. FlashInfer's
    autotuner runs where it ran for the measurement; the largest M comes first, as it tunes all smaller ones too.

    Memory: the operands, the result and what a call quantizes take at most half of what is free on the device, because
    8192 rows of a language-model head (N = 150,000) alone are 2.5 GB. An M that does not fit is called with the most
    rows that do, and half of them again where a kernel runs out of memory by itself; one log line names it.

    Args:
        plan: not in use yet.
        key: N, K, type, and whether one alpha serves all columns.
        device: where the layer lies.

    Raises:
        BackendError: a CUDA error, after which this process cannot serve any more.
        torch.OutOfMemoryError: there is no room for one row, nor would there be for serving.
    """
    n, k, dtype, one_alpha = key
    name = str(dtype).removeprefix("torch.")
    rows = sorted(plan.choices, reverse=True)
    most = min(rows[0], _rows_that_fit(n, k, dtype, device))
    x = torch.zeros(most, k, dtype=dtype, device=device)
    weight = align_rows(torch.zeros(n, k // 2, dtype=torch.uint8, device=device))
    weight_scale = torch.zeros(padded_scale_shape(n, k // 16), dtype=torch.uint8, device=device)
    scale = torch.ones((), dtype=torch.float32, device=device)
    alpha = scale if one_alpha else torch.ones(n, dtype=torch.float32, device=device)
    operands = (weight, weight_scale, scale, alpha, None)
    refused: dict[str, str] = {}
    made: set[tuple[str, int]] = set()
    for m in rows:
        value, fitting = plan.choices[m], min(m, most)
        if value in refused or (value, fitting) in made:
            continue
        problem = ""
        try:
            with of_subject(value).warm_up():
                fitting = _call(plan.linears[m], x[:fitting], operands)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - backends refuse a case by exceptions of any type
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        try:
            _wait(device)
        except RuntimeError as error:
            call = DenseFacts("linear", fitting, (n,), k, name, one_alpha, bias=False)
            raise _failed(value, plan, call, error) from error
        if problem:
            refused[value] = f"{problem} (M={m})"
        elif fitting < m:
            logger.info(
                "The first call of %s for M=%d N=%d K=%d was made with M=%d, for which there is memory: what it "
                "compiles or tunes for more rows is done by the first batch that has them.", value, m, n, k, fitting,
            )  # fmt: skip
        made.add((value, fitting))
        most = min(most, fitting) if fitting < m else most
    return refused


def _call(linear: Linear, x: torch.Tensor, operands: tuple[torch.Tensor | None, ...]) -> int:
    """Call a backend with as many rows as its own memory allows, and return how many those were."""
    m = x.shape[0]
    while True:
        try:
            linear(x[:m], *operands)
            return m
        except torch.OutOfMemoryError:
            if m == 1:
                raise
            m //= 2


def _rows_that_fit(n: int, k: int, dtype: torch.dtype, device: torch.device) -> int:
    """The rows for which a call takes half of the free memory, at least 1."""
    free = _free_bytes(device)
    if free is None:
        return sys.maxsize
    weight = n * k // 2 + n * k // 16 + 4 * n
    # Of each row: the input, its codes and block scales, and the result, twice where a bias is added afterwards.
    row = (k + 2 * n) * dtype.itemsize + k // 2 + k // 16
    return max((free // 2 - weight) // row, 1)


def _free_bytes(device: torch.device) -> int | None:
    """Bytes that torch can still give out on the device; ``None`` on the CPU, where nobody has to ask."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _wait(device: torch.device) -> None:
    """Wait for the call; a refusal launches nothing, a CUDA error leaves nothing to fall back to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _failed(value: str, plan: Plan, call: DenseFacts, error: Exception) -> Sm120Error:
    remedy = "Name another backend, or run sglang-sm120 probe and tune again"
    chosen = ", called while weights load,"
    return failed_call(value, plan.layers[0], call, error, remedy, plan.machine, chosen=chosen)
