"""Each guard of the kernel is needed: take one away and a test fails.

A mutation is a text change to one file of csrc, applied to a copy. It must compile, and at least one of the problems
below must then give a wrong number or be refused by the emulation.
"""

from __future__ import annotations

from pathlib import Path

import emulated
import pytest
import torch
from mutations import MUTATIONS
from problem import Problem, one_hot_problem, random_problem

MAIN = "tests/kernels/emulated_gemm.cc"


def problems() -> list[tuple[Problem, int, int]]:
    """Small problems (with cluster size and stages) that between them notice every mutation."""
    return [
        (one_hot_problem(136, 272, list(range(17))), 1, 2),
        (random_problem(5, 40, 1296 * 4), 1, 4),
        (random_problem(33, 40, 2320), 2, 2),
        (random_problem(3, 40, 2320), 4, 2),
        (random_problem(201, 8, 80), 1, 2),
        (random_problem(7, 136, 144), 1, 2),
    ]


def survives(binary: Path, folder: Path) -> bool:
    """Return whether every problem still comes out right."""
    for problem, cluster, stages in problems():
        out = emulated.run_gemm(binary, problem, folder, cluster=cluster, stages=stages)
        if not isinstance(out, torch.Tensor):
            return False
        if not ((out.double() - problem.expected()).abs() <= problem.tolerance()).all():
            return False
    return True


def test_without_a_mutation_all_is_right(emulated_gemm: Path, tmp_path: Path) -> None:
    assert survives(emulated_gemm, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str, build_folder: Path, tmp_path: Path) -> None:
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    binary = emulated.build_mutation(MAIN, MUTATIONS[name], tmp_path, build_folder)
    assert not survives(binary, tmp_path)
