"""One call of a running server is judged like a product of ``probe``: right ones pass, each kind of fault is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_sm120.verification import judge as room
from sglang_sm120.verification.call import Call
from sglang_sm120.verification.judge import judge
from tests.probing.faulty import right_quantize
from tests.support.nvfp4 import fresh_generator
from tests.verification import calls

Tensor = torch.Tensor
KINDS = {"linear": calls.linear, "gemm": calls.gemm, "quantize": calls.quantize}


def computed(call: Call) -> tuple[Tensor, ...]:
    return call.run(calls.OPERATIONS)[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 9, 200])
def test_what_a_right_backend_returns_is_right(kind: str, m: int) -> None:
    call = KINDS[kind](fresh_generator(), m)
    judgement = judge(call, computed(call), right_quantize)
    assert judgement.wrong == ""
    assert judgement.rows == min(m, room.ROWS)
    assert judgement.ratio <= 1


def _tile(out: Tensor) -> Tensor:
    out[8:, 8:16] *= 1.25
    return out


def _stale(out: Tensor) -> Tensor:
    out[3] = out[4]
    return out


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a tile": (_tile, "in row 8;"),
    "a stale row": (_stale, "in row 3;"),
    "NaN": (lambda out: out.index_fill(1, torch.tensor([5]), torch.nan), "is nan"),
    "zeros": (torch.zeros_like, "(zeros)"),
    "a global scale": (lambda out: out * 2, "a wrong global scale"),
    "two columns": (lambda out: out.index_copy(1, torch.tensor([0, 1]), out[:, [1, 0]]), "rows 0 to 8"),
    "the shape": (lambda out: out[:, :-1], "shape (9, 39) instead of (9, 40)"),
}


@pytest.mark.parametrize("kind", ["linear", "gemm"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_product_is_named(kind: str, fault: str) -> None:
    spoil, text = FAULTS[fault]
    call = KINDS[kind](fresh_generator())
    judgement = judge(call, (spoil(computed(call)[0]),), right_quantize)
    assert text in judgement.text
    assert not judgement.max_error <= 0


def test_a_wrong_row_of_many_keeps_its_number() -> None:
    """Of 300 rows 128 are judged: the last always."""
    call = calls.gemm(fresh_generator(), 300)
    (out,) = computed(call)
    out[299] = 0
    assert "in row 299" in judge(call, (out,)).wrong


def test_of_a_long_prefill_the_oracle_quantizes_the_judged_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory for the others would hide what is wrong."""
    call = calls.linear(fresh_generator(), 300)
    (out,) = computed(call)
    out[299] = 0
    packed, scales = right_quantize(call.operands["x"], call.operands["activation_scale"])
    sizes, exact = [], room.reference.quantize

    def own(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return packed, scales

    def quantize(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        sizes.append(len(x))
        return exact(x, *rest)

    monkeypatch.setattr(room.reference, "quantize", quantize)
    assert "in row 299" in judge(call, (out,), own).wrong
    assert set(sizes) == {room.ROWS}


def test_over_time_every_row_is_judged() -> None:
    call, generator = calls.gemm(fresh_generator(), 200), fresh_generator()
    (out,) = computed(call)
    out[190] = 0
    assert any("in row 190" in judge(call, (out,), generator=generator).wrong for _ in range(30))


def test_a_quantizer_is_judged_by_its_codes_and_scales() -> None:
    call = calls.quantize(fresh_generator())
    packed, scales = computed(call)
    assert "are not the nearest" in judge(call, (packed ^ 2, scales)).wrong
    assert "block scales are wrong" in judge(call, (packed, torch.zeros_like(scales))).wrong
    assert "scales for M=9" in judge(call, (packed, scales[:1])).wrong


def test_a_right_product_of_a_wrong_quantizer_is_wrong() -> None:
    call = calls.linear(fresh_generator())

    def half(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return right_quantize(x, scale / 2)

    result = call.run(replace(calls.OPERATIONS, quantize=half, linear=None))[1]
    assert judge(call, result, half).wrong


def test_rows_that_are_not_finite_promise_nothing() -> None:
    call = calls.linear(fresh_generator())
    call.operands["x"][2, 5] = torch.inf
    call.operands["x"][4, 0] = torch.nan
    (out,) = computed(call)
    out[2], out[4] = 1.0, 2.0
    judgement = judge(call, (out,), right_quantize)
    assert (judgement.wrong, judgement.rows) == ("", 7)
    call.operands["x"].fill_(torch.nan)
    assert judge(call, (out,)).rows == 0


def test_a_weight_of_nan_makes_nan_and_anything_else_is_wrong() -> None:
    call = calls.gemm(fresh_generator())
    call.operands["weight_scale"][0, 0] = 0x7F  # the first block of row 0
    (out,) = computed(call)
    out[:, 0] = torch.nan
    assert judge(call, (out,)).wrong == ""
    out[:, 0] = 3.0
    assert "in rows 0 to 8" in judge(call, (out,)).wrong


def test_a_bias_that_is_added_afterwards_costs_one_more_rounding() -> None:
    call = calls.gemm(fresh_generator(), 64)
    bias = call.operands["bias"]
    bias.copy_(-computed(Call("gemm", {**call.operands, "bias": bias * 0}, torch.bfloat16))[0][3])
    named = {name: tensor for name, tensor in call.operands.items() if name != "bias"}
    (product,) = computed(Call("gemm", named, torch.bfloat16))
    out = product + bias
    assert judge(call, (out,), bias_afterwards=True).wrong == ""
    assert "in row" in judge(call, (out,)).wrong
    assert judge(call, (out + 1,), bias_afterwards=True).wrong


def test_figures_are_those_of_the_worst_element() -> None:
    call = calls.gemm(fresh_generator())
    (out,) = computed(call)
    before = judge(call, (out,)).max_error
    out[1, 2] += 64
    judgement = judge(call, (out,))
    assert math.isclose(judgement.max_error, 64, abs_tol=before + 0.5)
    assert judgement.ratio > 10
    assert f"max error {judgement.max_error:.6g}" in judgement.text
