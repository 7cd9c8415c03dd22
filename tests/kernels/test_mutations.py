"""Each guard of the kernel is needed: take one away and a test fails. See mutants.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import emulated
import pytest
from emulated import run_gemm
from mutants import Case, case, is_noticed, solves
from mutations import MUTATIONS
from problem import one_hot_problem, random_problem

MAIN = "tests/kernels/emulated_gemm.cc"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Small problems that between them notice every mutation."""
    return [
        case(run_gemm, one_hot_problem(136, 272, list(range(17))), cluster=1, stages=2),
        case(run_gemm, random_problem(5, 40, 1296 * 4), cluster=1, stages=4),
        case(run_gemm, random_problem(33, 40, 2320), cluster=2, stages=2),
        case(run_gemm, random_problem(3, 40, 2320), cluster=4, stages=2),
        case(run_gemm, random_problem(201, 8, 80), cluster=1, stages=2),
        case(run_gemm, random_problem(7, 136, 144), cluster=1, stages=2),
    ]


@pytest.mark.parametrize("flags", [emulated.PLAIN, emulated.SANITIZED], ids=["plain", "sanitized"])
def test_without_a_mutation_all_is_right(
    flags: tuple[str, ...], cases: list[Case], build_folder: Path, tmp_path: Path
) -> None:
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    assert solves(cases, emulated.build(MAIN, build_folder, flags=flags), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str, cases: list[Case], build_folder: Path, tmp_path: Path) -> None:
    assert is_noticed(MAIN, MUTATIONS[name], tmp_path, build_folder, partial(solves, cases))
