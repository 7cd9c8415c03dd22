"""Each step of the mixture-of-experts kernels is needed: take one away and a test fails. See mutants.py."""

from __future__ import annotations

from pathlib import Path

import emulated
import pytest
import torch
from moe_mutations import MUTATIONS
from moe_problem import MoeProblem, moe_problem, run_moe
from mutants import is_noticed
from test_emulated_moe import faults
from test_emulated_quantize import EmulationError

MAIN = "tests/kernels/emulated_moe.cc"
#: Experts twice among the slots of a token, next to each other and apart.
REPEATED = torch.tensor([[2, 3, 0, 1, 2, 3, 0], [1, 1, 2, -1, 1, 1, 3]], dtype=torch.int32)


@pytest.fixture(scope="module")
def cases() -> list[MoeProblem]:
    """Small problems that between them notice every mutation."""
    ids = torch.tensor([[9, 3, 3], [5, 5, 4], [2, -1, 3], [4, 3, 4], [9, 9, 3]], dtype=torch.int32)
    spread = torch.tensor([[1, 34], [34, 0], [70, 1]], dtype=torch.int32)
    return [
        moe_problem(5, 3, 80, 48, 3, first_expert=3, topk_ids=ids, config=(0, 5, 2, 0), hidden_padding=8),
        moe_problem(3, 2, 272, 32, 71, topk_ids=spread, config=(1, -1, 3, 1), per_expert=True, out_padding=2),
        moe_problem(9, 1, 32, 144, 1, gate_first=True, dtype=torch.float16),
        moe_problem(1, 2, 16, 1168, 2, relu2=True, config=(0, 5, 1, 0)),
        moe_problem(2, 1, 2192, 48, 1, config=(0, 1, 2, 0)),
        moe_problem(2, 7, 32, 32, 4, topk_ids=REPEATED),
    ]


def spoilt_columns(binary: Path, folder: Path) -> bool:
    """Whether a NaN scale of w2 shows in the tokens of its expert alone."""
    problem = moe_problem(2, 1, 16, 16, 2, topk_ids=torch.tensor([[0], [1]], dtype=torch.int32))
    problem.w2_scales[1] = 0x7F
    out, _ = run_moe(binary, problem, folder)
    return bool(out[0].isfinite().all() and out[1].isnan().all())


def survives(cases: list[MoeProblem], binary: Path, folder: Path) -> bool:
    """Return whether every problem comes out right."""
    try:
        if not spoilt_columns(binary, folder):
            return False
        return not any(next(faults(case, *run_moe(binary, case, folder)), None) for case in cases)
    except (EmulationError, AssertionError):
        return False


def test_without_a_mutation_all_is_right(cases: list[MoeProblem], build_folder: Path, tmp_path: Path) -> None:
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    assert survives(cases, emulated.build(MAIN, build_folder, flags=emulated.PLAIN), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str, cases: list[MoeProblem], build_folder: Path, tmp_path: Path) -> None:
    assert is_noticed(
        MAIN, MUTATIONS[name], tmp_path, build_folder, lambda binary, folder: survives(cases, binary, folder)
    )
