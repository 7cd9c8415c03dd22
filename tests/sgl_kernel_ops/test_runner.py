"""SGLang's own runner of experts in one piece: what it skips, what it combines, what a capture may hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cpu_host.kernels import build
from cpu_host.kernels.library import EmulatedLibrary
from sglang_sm120 import native
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.sgl_kernel_ops import quantizers
from sglang_sm120.sgl_kernel_ops.runner import cutlass_moe_fp4
from tests.sgl_kernel_ops.cases import make_sorted
from tests.support.moe_problem import MoeProblem, random_moe
from tests.support.nvfp4 import assert_matches_oracle


def problem(tokens: int = 6) -> MoeProblem:
    """Experts as SGLang's own runner keeps them; one slot in three is of another rank."""
    whole = random_moe(tokens, 5, 3, 96, 48, gate_first=True, per_expert=True)
    return replace(whole, ids=torch.where(whole.ids == 3, -1, whole.ids))


def call(case: MoeProblem, backend: str, **flags: bool) -> torch.Tensor:
    first = (case.w13.input_global_scale, case.w13.packed, case.w13.scales, case.w13.alpha)
    second = (case.w2.input_global_scale, case.w2.packed, case.w2.scales, case.w2.alpha)
    return cutlass_moe_fp4(
        case.hidden, *first, *second, case.weights.to(torch.bfloat16), case.ids.long(), None, **flags, backend=backend
    )


def with_weights(case: MoeProblem, weights: torch.Tensor) -> MoeProblem:
    return replace(case, weights=weights)


def test_slots_of_other_ranks_are_skipped() -> None:
    case = problem()
    case = with_weights(case, case.weights.to(torch.bfloat16).float())
    assert (case.ids == -1).any()
    assert torch.equal(call(case, "torch_reference"), case.run("torch_reference"))


def test_router_weights_are_applied_once_and_not_to_results_that_stay_apart() -> None:
    case = problem()
    plain = with_weights(case, torch.ones_like(case.weights))
    assert torch.equal(call(case, "torch_reference", apply_router_weight_on_input=True), plain.run("torch_reference"))
    apart = call(case, "torch_reference", no_combine=True)
    assert tuple(apart.shape) == (6, 3, 96)
    for slot in range(3):
        only = replace(plain, ids=case.ids[:, slot, None].contiguous(), weights=torch.ones(6, 1))
        assert torch.equal(apart[:, slot], only.run("torch_reference"))
    assert not apart[case.ids == -1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_take_it_as_it_comes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of 64 bits and router weights of 16, as SGLang passes them; the bound is that of ``ops.nvfp4_moe``."""
    library = EmulatedLibrary(build.library_path())
    monkeypatch.setattr(native, "_library", lambda device: (library, True))
    case = problem()
    case = replace(case, hidden=case.hidden.to(dtype), weights=case.weights.to(torch.bfloat16).float())
    total, bound = case.expected()
    assert_matches_oracle(call(case, "sm120"), total, bound)


def test_only_the_oracle_refuses_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: ``tests/gpu/test_operators_cuda.py``."""

    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match=r"--disable-cuda-graph.*--fp4-gemm-backend sm120"):
        call(replace(problem(1), hidden=OnGpu()), "torch_reference")  # type: ignore[arg-type]


def test_what_stands_in_a_map_behind_the_last_expert_is_not_read(generator: torch.Generator) -> None:
    """SGLang leaves the places of id -1 as the memory was."""
    case = make_sorted(generator)
    count = case.rows.shape[0]
    tokens = torch.cat([case.rows, case.rows[:2]])
    unwritten = torch.tensor([2**31 - 1, -7], dtype=torch.int32)
    order = torch.cat([torch.arange(count, dtype=torch.int32), unwritten])
    arguments = (case.encode, case.expert_offsets, case.scale_offsets, 1)
    codes, scales = quantizers.scaled_fp4_experts_quant(tokens, *arguments, order, backend="torch_reference")
    right, right_scales = quantizers.scaled_fp4_experts_quant(case.rows, *arguments, backend="torch_reference")
    assert torch.equal(codes[:count], right)
    assert not codes[count:].any()
    rows = right_scales.shape[0]
    assert torch.equal(scales.view(torch.uint8)[:rows], right_scales.view(torch.uint8))
