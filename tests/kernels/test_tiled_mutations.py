"""Each guard of the tiled GEMM is needed: take one away and a test fails. See test_mutations.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import emulated
import pytest
import torch
from problem import Problem, one_hot_problem, random_problem
from tiled_mutations import MUTATIONS

MAIN = "tests/kernels/emulated_gemm_tiled.cc"
WIDE, SPLIT_K = 128, 64


def problems() -> Iterator[tuple[Problem, int]]:
    """Small problems, with the tile, that between them notice every mutation; the cheapest ones first."""
    yield one_hot_problem(24, 272, [i % 17 for i in range(17)]), WIDE
    yield random_problem(17, 40, 80), SPLIT_K
    yield random_problem(130, 8, 288), WIDE
    yield random_problem(18, 8, 1184), SPLIT_K
    yield random_problem(2, 136, 16), WIDE
    yield random_problem(2, 136, 16), SPLIT_K
    yield random_problem(2060, 8, 16), SPLIT_K


def survives(binary: Path, folder: Path) -> bool:
    """Return whether every problem still comes out right."""
    for problem, tile in problems():
        out = emulated.run_tiled(binary, problem, folder, tile=tile)
        if not isinstance(out, torch.Tensor):
            return False
        if not ((out.double() - problem.expected()).abs() <= problem.tolerance()).all():
            return False
    return True


def test_without_a_mutation_all_is_right(emulated_tiled: Path, tmp_path: Path) -> None:
    assert survives(emulated_tiled, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str, build_folder: Path, tmp_path: Path) -> None:
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    binary = emulated.build_mutation(MAIN, MUTATIONS[name], tmp_path, build_folder)
    assert not survives(binary, tmp_path)
