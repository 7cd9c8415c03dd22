"""Each guard of the tiled GEMM is needed: take one away and a test fails. See mutants.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import emulated
import pytest
from emulated import run_tiled
from mutants import Case, case, is_noticed, solves
from problem import one_hot_problem, random_problem
from tiled_mutations import MUTATIONS

MAIN = "tests/kernels/emulated_gemm_tiled.cc"
WIDE, SPLIT_K = 128, 64


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Small problems that between them notice every mutation; the cheapest ones first."""
    return [
        case(run_tiled, one_hot_problem(24, 272, [i % 17 for i in range(17)]), tile=WIDE),
        case(run_tiled, random_problem(17, 40, 80), tile=SPLIT_K),
        case(run_tiled, random_problem(130, 8, 288), tile=WIDE),
        case(run_tiled, random_problem(18, 8, 1184), tile=SPLIT_K),
        case(run_tiled, random_problem(2, 136, 16), tile=WIDE),
        case(run_tiled, random_problem(2, 136, 16), tile=SPLIT_K),
        case(run_tiled, random_problem(2060, 8, 16), tile=SPLIT_K),
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
