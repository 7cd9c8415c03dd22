"""Each step of the GEMM that quantizes its activations is needed: bend one and a test fails. See mutants.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import emulated
import pytest
import torch
from emulated import run_quantizing
from mutants import is_noticed
from problem import Problem, random_problem
from quantizing_mutations import MUTATIONS
from test_emulated_quantize import padded_rows, reciprocal_model
from test_emulated_quantizing_gemm import quantized_problem

MAIN = "tests/kernels/emulated_quantizing_gemm.cc"
#: M, N, K: one tile of tokens, three units of a warp and a tail of K; two tiles.
SIZES = [(5, 8, 2208), (11, 8, 80)]
ENCODE_SCALE = 3.7


@pytest.fixture(scope="module")
def cases() -> list[tuple[Problem, torch.Tensor]]:
    """Activations in rows apart from each other, every block of another magnitude, and the quantized problem."""
    found = []
    for m, n, k in SIZES:
        generator = torch.Generator().manual_seed(m)
        magnitudes = torch.exp2(torch.randint(-4, 4, (m, k // 16, 1), generator=generator).float())
        x = (torch.randn(m, k // 16, 16, generator=generator) * magnitudes).view(m, k).to(torch.bfloat16)
        found.append(
            (quantized_problem(random_problem(m, n, k), *reciprocal_model(x, ENCODE_SCALE)), padded_rows(x, 24))
        )
    return found


def survives(cases: list[tuple[Problem, torch.Tensor]], binary: Path, folder: Path) -> bool:
    """Return whether every problem comes out right."""
    for problem, x in cases:
        out = run_quantizing(binary, problem, x, ENCODE_SCALE, folder, cluster=1)
        if not isinstance(out, torch.Tensor):
            return False
        if not bool(((out.double() - problem.expected()).abs() <= problem.tolerance()).all()):
            return False
    return True


def test_without_a_mutation_all_is_right(
    cases: list[tuple[Problem, torch.Tensor]], build_folder: Path, tmp_path: Path
) -> None:
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    assert survives(cases, emulated.build(MAIN, build_folder, flags=emulated.PLAIN), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(
    name: str, cases: list[tuple[Problem, torch.Tensor]], build_folder: Path, tmp_path: Path
) -> None:
    assert is_noticed(MAIN, MUTATIONS[name], tmp_path, build_folder, partial(survives, cases))
