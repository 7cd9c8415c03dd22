"""Each guard of the quantizer is needed: take one away and a test fails. See mutants.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import emulated
import pytest
import torch
from mutants import is_noticed
from quantize_mutations import CONVERSION_MUTATIONS, MUTATIONS
from test_emulated_quantize import (
    EXACT,
    ORDER_OF_STEPS,
    RECIPROCAL,
    EmulationError,
    nasty,
    padded_rows,
    reciprocal_model,
    run,
)

from sglang_sm120 import reference
from sglang_sm120.layout import ScaleLayout, swizzle_128x4

MAIN = "tests/kernels/emulated_quantize.cc"
CHECK = "tests/kernels/e2m1_check.cc"

#: Small problems of the exact rule that between them notice every mutation outside the other rule: tokens, K, dtype,
#: layout, rows a thread.
PROBLEMS = (
    (5, 1040, torch.bfloat16, ScaleLayout.SWIZZLE_128X4, 1),
    (33, 80, torch.float16, ScaleLayout.LINEAR, 1),
    (64, 48, torch.bfloat16, ScaleLayout.SWIZZLE_128X4, 1),
    (161, 48, torch.float16, ScaleLayout.SWIZZLE_128X4, 4),
    (3, 80, torch.bfloat16, ScaleLayout.LINEAR, 4),
)


def survives(binary: Path, folder: Path) -> bool:
    """Return whether every problem still comes out right."""
    try:
        return _reciprocal_rule_is_right(binary, folder) and _exact_rule_is_right(binary, folder)
    except EmulationError:
        return False


def _reciprocal_rule_is_right(binary: Path, folder: Path) -> bool:
    for scale, numbers in ORDER_OF_STEPS:
        x = torch.zeros(2, 48)
        x[0, :16] = torch.arange(-8, 8)
        x[1, 16 : 16 + len(numbers)] = torch.tensor(numbers)
        x[1, 32:] = -1e-30
        x = x.to(torch.bfloat16)
        expected_codes, expected_scales = reciprocal_model(x, scale)
        codes, scales = run(binary, folder, x, scale, ScaleLayout.SWIZZLE_128X4, RECIPROCAL)
        if not torch.equal(scales, swizzle_128x4(expected_scales).view(torch.uint8).flatten()):
            return False
        if not torch.equal(codes, expected_codes):
            return False
    return True


def _exact_rule_is_right(binary: Path, folder: Path) -> bool:
    for m, k, dtype, layout, rows in PROBLEMS:
        x = nasty(m, k, dtype)
        codes, scales = run(binary, folder, padded_rows(x, 24), 1.0, layout, EXACT, rows)
        expected_codes, expected_scales = reference.quantize(x, torch.tensor(1.0), layout)
        if not torch.equal(scales, expected_scales.view(torch.uint8).flatten()):
            return False
        if not torch.equal(codes, expected_codes):
            return False
    return True


@pytest.mark.parametrize("flags", [emulated.PLAIN, emulated.SANITIZED], ids=["plain", "sanitized"])
def test_without_a_mutation_all_is_right(flags: tuple[str, ...], build_folder: Path, tmp_path: Path) -> None:
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    assert survives(emulated.build(MAIN, build_folder, flags=flags), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str, build_folder: Path, tmp_path: Path) -> None:
    assert is_noticed(MAIN, MUTATIONS[name], tmp_path, build_folder, survives)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERSION_MUTATIONS)
def test_mutation_of_the_conversion_is_noticed(name: str, build_folder: Path, tmp_path: Path) -> None:
    def finds_nothing(binary: Path, _: Path) -> bool:
        done = subprocess.run([str(binary)], capture_output=True)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode == 0

    assert is_noticed(CHECK, CONVERSION_MUTATIONS[name], tmp_path, build_folder, finds_nothing)
