"""The value ``sm120_tuned`` behind the interface of ``ops.py``: each call goes to the best backend for its shape.

Plans are made while weights load (:func:`add_plan`) and only read afterwards. A call looks up its plan by the shapes of
its operands and the function by M, which indexes a list: no lock, no allocation, no look at values. The choice is made
inside the operator, where M is a number under torch.compile too, and a CUDA graph captures the kernel that was chosen
for its M.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from sglang_sm120 import ops
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, Sm120Error
from sglang_sm120.failures import failed_call
from sglang_sm120.probing.operations import Gemm, Linear, of_subject
from sglang_sm120.tuning.table import by_rows
from sglang_sm120.verification.failed_file import DenseFacts

#: N, K, type of the result, and whether one alpha serves all columns (else each column has its own).
Key = tuple[int, int, torch.dtype, bool]
Quantize = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Plan:
    """Which backend serves which M of one kind of layer.

    Attributes:
        choices: backend by measured M.
        values: backend by M; the last entry serves any larger M.
        linears, gemms: the functions behind ``values``, in the same order.
        layers: names of the layers, for messages.
        machine: facts from the start of the server, for the file of a call that fails.
    """

    choices: Mapping[int, str]
    values: tuple[str, ...]
    linears: tuple[Linear, ...]
    gemms: tuple[Gemm, ...]
    layers: list[str] = field(default_factory=list)
    machine: HostFacts | None = None


_PLANS: dict[Key, Plan] = {}


def plan_of(key: Key) -> Plan | None:
    """Return the plan for a kind of layer, ``None`` if there is none."""
    return _PLANS.get(key)


def add_plan(key: Key, plan: Plan) -> None:
    """Serve layers of this kind by ``plan`` from now on."""
    _PLANS[key] = plan


def forget_plans() -> None:
    """Drop every plan: this process makes its decision anew."""
    _PLANS.clear()


def make_plan(choices: Mapping[int, str], quantizer: str | None, machine: HostFacts | None = None) -> Plan:
    """Bind the functions behind the choices.

    Args:
        choices: backend by measured M, not empty.
        quantizer: the backend of ours that quantizes for FlashInfer's kernels, ``None`` for FlashInfer's own quantizer.
        machine: facts from the start of the server; without them a call that fails is not kept.

    Raises:
        ImportError: FlashInfer is missing or broken.
    """
    pairs = {value: _functions(value, quantizer) for value in set(choices.values())}
    values = by_rows(choices)
    # Some kernels take no operand without rows.
    linears = [_no_rows_linear, *(pairs[value][0] for value in values[1:])]
    gemms = [_no_rows_gemm, *(pairs[value][1] for value in values[1:])]
    return Plan(dict(choices), tuple(values), tuple(linears), tuple(gemms), machine=machine)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    activation_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Quantize ``x`` and multiply with the backend of this M.

    Args:
        x: bf16/fp16 [M, K].
        weight: packed e2m1 uint8 [N, K/2], contiguous where FlashInfer's kernels are in the plan.
        weight_scale: e4m3 bytes, swizzled 128x4.
        activation_scale: float32 encode scale of ``x``, one value.
        alpha: float32, one value, or [N] for a layer whose columns differ.
        bias: [N] in the dtype of ``x``, or ``None``. FlashInfer's kernels round before it is added, ours after.

    Returns:
        [M, N] in the dtype of ``x``.

    Raises:
        ConfigError: no plan was made for such a layer.
        Sm120Error: the chosen backend failed; a BackendError unless it raised an error of ours.
    """
    m, n, k = x.shape[0], weight.shape[0], x.shape[1]
    plan = _PLANS.get((n, k, x.dtype, alpha.numel() == 1))
    if plan is None:
        raise _no_plan(n, k, x.dtype)
    index = m if m < len(plan.values) else -1
    try:
        out: torch.Tensor = plan.linears[index](x, weight, weight_scale, activation_scale, alpha, bias)
    except torch.OutOfMemoryError:
        raise  # says what it is, and no backend is to blame
    except Exception as error:
        raise _failed(plan, index, _facts("linear", m, n, k, x.dtype, alpha, bias), error) from error
    return out


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply activations that are quantized already: a [M, K/2], swizzled scales; the rest as :func:`linear`."""
    m, n, k = a.shape[0], b.shape[0], 2 * a.shape[1]
    plan = _PLANS.get((n, k, out_dtype, alpha.numel() == 1))
    if plan is None:
        raise _no_plan(n, k, out_dtype)
    index = m if m < len(plan.values) else -1
    try:
        out: torch.Tensor = plan.gemms[index](a, b, a_scale, b_scale, alpha, bias, out_dtype)
    except torch.OutOfMemoryError:
        raise  # says what it is, and no backend is to blame
    except Exception as error:
        raise _failed(plan, index, _facts("gemm", m, n, k, out_dtype, alpha, bias), error) from error
    return out


def _functions(value: str, quantizer: str | None) -> tuple[Linear, Gemm]:
    """The two functions of one backend, called the way that was measured."""
    if BACKENDS[value].implementation is not None:
        module: Any = ops.implementation(value)
        return module.linear, module.gemm
    operations = of_subject(value)
    multiply, own = operations.gemm, operations.quantize
    assert multiply is not None
    assert own is not None
    quantize = own if quantizer is None else _ours(quantizer)

    def foreign(
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        activation_scale: torch.Tensor,
        alpha: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        a, a_scale = quantize(x, activation_scale)
        return multiply(a, weight, a_scale, weight_scale, alpha, bias, x.dtype)

    return foreign, multiply


def _ours(quantizer: str) -> Quantize:
    module: Any = ops.implementation(quantizer)

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed, scales = module.quantize(x, scale, True)
        return packed, scales

    return quantize


def _no_rows_linear(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
    return x.new_empty((0, weight.shape[0]))


def _no_rows_gemm(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
    return a.new_empty((0, b.shape[0]), dtype=rest[-1])


def _no_plan(n: int, k: int, dtype: torch.dtype) -> ConfigError:
    return ConfigError(
        f"--fp4-gemm-backend sm120_tuned was called for N={n} K={k} in {dtype}, for which no layer was prepared. "
        "Report this, and name another backend until it is fixed."
    )


def _facts(
    operation: Literal["linear", "gemm"],
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
) -> DenseFacts:
    name = str(dtype).removeprefix("torch.")
    return DenseFacts(operation, m, (n,), k, name, one_alpha=alpha.numel() == 1, bias=bias is not None)


def _failed(plan: Plan, index: int, call: DenseFacts, error: Exception) -> Sm120Error:
    others = f" and {len(plan.layers) - 1} more" if len(plan.layers) > 1 else ""
    remedy = "Name another backend, or run sglang-sm120 probe and tune again"
    chosen = f", which sm120_tuned chose for M={call.m},"
    layers = f"{plan.layers[0]}{others}"
    return failed_call(plan.values[index], layers, call, error, remedy, plan.machine, chosen=chosen)
