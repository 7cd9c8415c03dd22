"""The mixture-of-experts kernels, run on the CPU with barriers, copies and launches modelled, are right.

Each launch is held against float64 by itself: the first by its codes (a float32 sum beside a rounding boundary may give
the neighbouring one), the second by a derived bound on what it makes of the codes that the first really wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import emulated
import pytest
import torch
from moe_problem import POISON, MoeProblem, moe_problem, run_moe


@pytest.fixture(scope="module")
def program(build_folder: Path) -> Path:
    """Both kernels compiled for the CPU with address and undefined-behaviour sanitizers."""
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    return emulated.build("tests/kernels/emulated_moe.cc", build_folder)


def faults(problem: MoeProblem, out: torch.Tensor, workspace: torch.Tensor) -> Iterator[str]:
    """What is wrong with a run, in words."""
    codes, scales = problem.workspace_rows(workspace)
    expected = problem.activations()
    top_k = problem.sizes[1]
    idle = torch.ones(codes.shape[0], dtype=torch.bool)
    wrong_scales = wrong_codes = 0
    for (token, slot), (their_codes, their_scales) in expected.items():
        row = token * top_k + slot
        idle[row] = False
        steps = (scales[row].int() - their_scales.int()).abs()
        if int(steps.max()) > 1:
            yield f"scales of token {token}, slot {slot}"
        wrong_scales += int((steps > 0).sum())
        same = (steps == 0).repeat_interleave(8)
        for shift in (0, 4):
            ours, theirs = (codes[row] >> shift & 15).int()[same], (their_codes >> shift & 15).int()[same]
            apart = (ours & 7) - (theirs & 7)
            if apart.numel() and int(apart.abs().max()) > 1:
                yield f"codes of token {token}, slot {slot}"
            wrong_codes += int(((apart != 0) | ((ours ^ theirs) & 8 != 0)).sum())
    elements = len(expected) * problem.sizes[3]
    if wrong_scales * 16 > max(16, elements // 100) or wrong_codes > max(2, elements // 200):
        yield f"{wrong_codes} codes and {wrong_scales} scales of {elements} elements differ"
    if not (codes[idle] == POISON).all() or not (scales[idle] == POISON).all():
        yield "rows that nobody owns were written"
    answer, bound = problem.output(workspace)
    error = ((out.double() - answer).abs() / bound).nan_to_num(nan=float("inf"))
    if error.numel() and error.max() > 1:
        yield f"an output is {error.max():.3g} times the bound away"


def require_right(program: Path, problem: MoeProblem, folder: Path, seed: int = 0) -> torch.Tensor:
    out, workspace = run_moe(program, problem, folder, seed)
    assert list(faults(problem, out, workspace)) == []
    return out


# m, top_k, H, I, E, what else is special
CASES = {
    "one token, one block": (1, 1, 16, 16, 1, {}),
    "one token, several experts": (1, 3, 272, 48, 5, {}),
    "K of both split over clusters": (2, 1, 400, 80, 2, {"config": (1, -1, 2, 1), "hidden_padding": 8}),
    "clusters of eight, most without work": (1, 2, 80, 16, 2, {"config": (3, -1, 1, 2)}),
    "float16, gate first": (3, 2, 144, 80, 4, {"dtype": torch.float16, "gate_first": True, "out_padding": 6}),
    "no gate, odd number of blocks": (4, 3, 208, 48, 4, {"relu2": True}),
    "scales for each expert": (5, 2, 96, 64, 4, {"per_expert": True}),
    "more tokens than columns": (19, 2, 64, 32, 3, {}),
    "few rows at once": (11, 1, 80, 48, 2, {"config": (0, 4, 3, 0)}),
    "several tiles a CTA, of two experts": (3, 2, 272, 80, 2, {"config": (0, 3, 3, 0)}),
    "one CTA, all experts": (5, 2, 80, 48, 4, {"config": (0, 1, 2, 0)}),
    "several tiles of three units a warp": (2, 1, 2192, 48, 1, {"config": (0, 1, 2, 0)}),
    "rows past 128": (2, 1, 160, 144, 1, {"gate_first": True}),
    "hidden 2880": (1, 1, 2880, 16, 1, {}),
    "hidden 2688, no gate": (1, 1, 2688, 16, 1, {"relu2": True}),
    "intermediate 1856, no gate": (1, 1, 16, 1856, 1, {"relu2": True}),
    "intermediate 128": (1, 2, 48, 128, 2, {}),
    "256 experts in a block of tokens": (
        8,
        32,
        16,
        16,
        256,
        {"topk_ids": torch.arange(256, dtype=torch.int32).view(8, 32), "config": (0, 4, 1, 0)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_both_launches_are_right(program: Path, tmp_path: Path, name: str) -> None:
    m, top_k, hidden_size, intermediate, experts, special = CASES[name]
    problem = moe_problem(m, top_k, hidden_size, intermediate, experts, **special)
    out = require_right(program, problem, tmp_path)
    oracle = problem.oracle().double()
    assert (out.double() - oracle).norm() <= 0.02 * oracle.norm()


def test_experts_of_other_ranks_repeated_and_idle_experts(program: Path, tmp_path: Path) -> None:
    ids = [[4, 9, -1], [5, 5, 3], [7, -1, 0], [6, 4, 6], [2**31 - 1, -(2**31), 4]]
    problem = moe_problem(5, 3, 80, 32, 4, first_expert=4, topk_ids=torch.tensor(ids, dtype=torch.int32))
    out = require_right(program, problem, tmp_path)
    problem.topk_ids[:] = torch.tensor([[8, 3, -1]], dtype=torch.int32)
    assert not require_right(program, problem, tmp_path).any()
    assert not problem.oracle().any()
    assert out[2].any()  # 7 is the last expert of this rank


def test_an_expert_twice_among_the_slots_of_a_token_counts_with_both_weights(program: Path, tmp_path: Path) -> None:
    ids = [[2, 3, 0, 1, 2, 3, 0], [1, 1, 2, -1, 1, 1, 3], [0, 0, 0, 0, 0, 0, 0]]
    problem = moe_problem(3, 7, 32, 48, 4, topk_ids=torch.tensor(ids, dtype=torch.int32))
    out = require_right(program, problem, tmp_path)
    oracle = problem.oracle().double()
    assert (out.double() - oracle).norm() <= 0.02 * oracle.norm()


def test_all_tokens_on_one_expert(program: Path, tmp_path: Path) -> None:
    problem = moe_problem(18, 1, 48, 32, 3)
    problem.topk_ids[:] = 1
    require_right(program, problem, tmp_path)


def test_blocks_of_zeros_and_infinities_follow_the_rule_of_the_quantizer(program: Path, tmp_path: Path) -> None:
    problem = moe_problem(3, 1, 64, 32, 2)
    problem.hidden[0] = 0
    problem.hidden[1, :16] = -0.0
    problem.hidden[2, 17] = float("inf")
    out = require_right(program, problem, tmp_path)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert out[2].isfinite().all()


def test_a_block_of_nan_spoils_its_token_and_a_nan_scale_its_column_where_the_expert_is_used(
    program: Path, tmp_path: Path
) -> None:
    problem = moe_problem(4, 1, 64, 32, 2, topk_ids=torch.tensor([[0], [1], [0], [1]], dtype=torch.int32))
    problem.hidden[2, 16:32] = float("nan")
    problem.w2_scales[1, 33, 1] = 0x7F
    out, _ = run_moe(program, problem, tmp_path)
    spoilt = torch.zeros(4, 64, dtype=torch.bool)
    spoilt[2] = True
    spoilt[1, 33] = spoilt[3, 33] = True
    assert torch.equal(out.isnan(), spoilt)


def test_every_interleaving_gives_the_same_bits(program: Path, tmp_path: Path) -> None:
    problem = moe_problem(3, 2, 80, 32, 3, config=(1, -1, 3, 1))
    first, *others = [run_moe(program, problem, tmp_path, seed) for seed in range(3)]
    for out, workspace in others:
        assert torch.equal(out, first[0])
        assert torch.equal(workspace, first[1])
