"""The operator ``nvfp4_moe`` and the bound that its implementations are held to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cpu_host.kernels import build
from cpu_host.kernels.library import EmulatedLibrary
from sglang_sm120 import native, ops
from sglang_sm120.errors import ConfigError
from sglang_sm120.formats import round_float64
from sglang_sm120.probing import expert_bound
from tests.support.moe_problem import MoeProblem, random_moe
from tests.support.nvfp4 import assert_matches_oracle

CASES = [
    {"activation": "silu", "gate_first": True},
    {"activation": "silu", "gate_first": False, "per_expert": True, "dtype": torch.float16},
    {"activation": "relu2"},
]


def problem(tokens: int = 6, **case: object) -> MoeProblem:
    return random_moe(tokens, 5, 3, 96, 48, **case)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_the_operator_with_the_reference_is_the_oracle_also_for_a_part_of_the_experts(case: dict[str, object]) -> None:
    whole = problem(**case)
    held = replace(whole, first_expert=2)
    held.ids = torch.where(held.ids >= 4, -1, held.ids + 2)  # experts 2, 3, .. are held, -1 and 0, 1 never occur
    for one in (whole, held):
        out = one.run("torch_reference")
        total, bound = one.expected()
        assert torch.equal(out, round_float64(total, out.dtype))
        assert_matches_oracle(out, total, bound)


@pytest.mark.parametrize("case", CASES)
def test_the_bound_is_tight_and_a_wrong_scale_or_expert_leaves_it(case: dict[str, object]) -> None:
    right = problem(**case)
    total, bound = right.expected()
    assert float(bound.mean()) < 0.02 * float(total.abs().mean())
    wrong_ids = replace(right, ids=(right.ids + 1) % 5)
    wrong_scale = replace(right, w2=replace(right.w2, alpha=right.w2.alpha * 1.05))
    wrong_order = replace(right, gate_first=not right.gate_first)
    for wrong in (wrong_ids, wrong_scale, *([wrong_order] if right.activation == "silu" else [])):
        with pytest.raises(AssertionError, match="out of bound"):
            assert_matches_oracle(wrong.run("torch_reference"), total, bound)


def test_the_bound_allows_the_neighbouring_code_next_to_a_boundary_and_nothing_else() -> None:
    encode = torch.tensor(1.0)
    ones = torch.full((1, 16), 1.0, dtype=torch.float64)
    ones[0, 0] = 6.0  # block scale one
    ones[0, 1:4] = torch.tensor([1.25, 1.2, 5.0 - 1e-9])  # a tie, a number far from one, a number just below one
    codes = expert_bound.quantize(expert_bound.Interval(ones, torch.zeros_like(ones)), encode)
    assert codes.value[0, :4].tolist() == [6.0, 1.0, 1.0, 4.0]
    assert codes.error[0, :4].tolist() == [0.0, 0.5, 0.0, 2.0]


def test_the_fake_implementation_has_the_shape_and_type_of_the_result() -> None:
    torch.library.opcheck(
        torch.ops.sglang_sm120.nvfp4_moe.default,
        _arguments(problem(3)),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_torch_compile_takes_the_operator_whole() -> None:
    one = problem(4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(hidden: torch.Tensor) -> torch.Tensor:
        return ops.nvfp4_moe(hidden, *_arguments(one)[1:]) + hidden

    assert torch.equal(layer(one.hidden), one.run("torch_reference") + one.hidden)


def test_no_token_gives_no_row() -> None:
    assert problem(0).run("torch_reference").shape == (0, 96)


def test_no_token_is_no_launch_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the operator, and of the entry behind it: a launch without blocks is an error of CUDA."""
    library = EmulatedLibrary(build.library_path())
    monkeypatch.setattr(native, "_library", lambda device: (library, True))
    one = problem(0)
    out = one.run("sm120")
    assert out.shape == (0, 96)
    assert out.dtype == one.hidden.dtype
    stacks = [t for s in (one.w13, one.w2) for t in (s.packed, s.scales, s.alpha, s.input_global_scale)]
    library.nvfp4_moe(one.hidden, one.ids, one.weights, *stacks, out, torch.empty(0), 0, False, 0, True)


def test_a_runner_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="'flashinfer_cutlass'.*sm120, torch_reference"):
        problem(1).run("flashinfer_cutlass")


def _arguments(one: MoeProblem) -> tuple[object, ...]:
    stacks = [t for s in (one.w13, one.w2) for t in (s.packed, s.scales, s.alpha, s.input_global_scale)]
    return (
        one.hidden, one.ids, one.weights, *stacks, one.activation, one.gate_first, one.first_expert, "torch_reference"
    )  # fmt: skip
