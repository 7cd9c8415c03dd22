"""The tiled GEMM kernel source, run on the CPU with its barriers, copies and launches modelled, is right.

As in ``test_emulated_gemm.py`` padding bytes of scales and codes are poison and every buffer ends where its data do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated import run_tiled
from problem import Problem, one_hot_problem, random_problem
from test_emulated_gemm import require_right

WIDE, SPLIT_K = 128, 64
TILES = [WIDE, SPLIT_K]

# M, N, K: one token more than the skinny kernel's 64, one less and one more than a tile, one column group, tiles
# without any row of their own (136, 264), one block of K, tails of a k64 step and of a unit, and K / 2 that is no
# multiple of 16 (all but 96 and 288).
EDGES = [(65, 8, 16), (127, 24, 48), (129, 136, 464), (200, 264, 96), (128, 72, 1040), (70, 40, 288)]


@pytest.mark.parametrize(("m", "n", "k"), EDGES)
@pytest.mark.parametrize("tile", TILES)
def test_random_data_is_within_the_derived_bound(
    emulated_tiled: Path, tmp_path: Path, m: int, n: int, k: int, tile: int
) -> None:
    out_type = torch.float16 if m % 2 else torch.bfloat16
    problem = random_problem(m, n, k, per_column=m != 127, bias=m != 65, out_type=out_type)
    require_right(run_tiled(emulated_tiled, problem, tmp_path, tile=tile, seed=m), problem)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("m", [1, 17])
def test_few_tokens_are_right_too(emulated_tiled: Path, tmp_path: Path, m: int, tile: int) -> None:
    problem = random_problem(m, 72, 144)
    require_right(run_tiled(emulated_tiled, problem, tmp_path, tile=tile), problem)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "k"), [(136, 272), (24, 1040)])
def test_one_hot_is_exact_for_every_column_and_block(
    emulated_tiled: Path, tmp_path: Path, n: int, k: int, tile: int
) -> None:
    blocks = [i % (k // 16) for i in range(max(65, k // 16))]
    problem = one_hot_problem(n, k, blocks)
    out = run_tiled(emulated_tiled, problem, tmp_path, tile=tile)
    assert isinstance(out, torch.Tensor), out.stderr[-3000:]
    assert torch.equal(out.double(), problem.expected())


@pytest.mark.parametrize("tile", TILES)
def test_integers_are_exact(emulated_tiled: Path, tmp_path: Path, tile: int) -> None:
    """Integer codes, scales that are powers of two from 1/4 to 4, zero blocks: every partial sum is a float32."""
    gen = torch.Generator().manual_seed(5)
    m, n, k = 131, 24, 208

    def codes(rows: int) -> torch.Tensor:
        return torch.tensor([0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15], dtype=torch.uint8)[
            torch.randint(0, 11, (rows, k), generator=gen)
        ]

    def scales(rows: int) -> torch.Tensor:
        drawn = torch.tensor([0, 0x28, 0x30, 0x38, 0x40, 0x48], dtype=torch.uint8)
        return drawn[torch.randint(0, 6, (rows, k // 16), generator=gen)]

    problem = Problem(codes(m), scales(m), codes(n), scales(n), torch.full((1,), 0.125), None, torch.bfloat16)
    out = run_tiled(emulated_tiled, problem, tmp_path, tile=tile)
    assert isinstance(out, torch.Tensor), out.stderr[-3000:]
    assert torch.equal(out, problem.expected().float().to(torch.bfloat16))


@pytest.mark.parametrize("tile", TILES)
def test_the_largest_scales_overflow_to_infinity_and_zero_blocks_give_zero(
    emulated_tiled: Path, tmp_path: Path, tile: int
) -> None:
    problem = random_problem(66, 16, 144, per_column=False, bias=False, out_type=torch.float16)
    problem.alpha[:] = 1.0
    problem.x_codes[3] = problem.w_codes[5] = 7
    problem.x_scales[3] = problem.w_scales[5] = 0x7E
    problem.x_scales[4] = 0
    out = run_tiled(emulated_tiled, problem, tmp_path, tile=tile)
    assert isinstance(out, torch.Tensor), out.stderr[-3000:]
    assert out[3, 5] == float("inf")
    assert torch.equal(out[4], torch.zeros(16, dtype=torch.float16))
    assert not out.isnan().any()


@pytest.mark.parametrize("tile", TILES)
def test_a_nan_scale_spoils_its_row_or_column_and_no_other(emulated_tiled: Path, tmp_path: Path, tile: int) -> None:
    problem = random_problem(130, 40, 272)
    problem.x_scales[129, 5] = 0x7F
    problem.w_scales[33, 16] = 0x7F
    out = run_tiled(emulated_tiled, problem, tmp_path, tile=tile)
    assert isinstance(out, torch.Tensor), out.stderr[-3000:]
    spoilt = torch.zeros(130, 40, dtype=torch.bool)
    spoilt[129] = True
    spoilt[:, 33] = True
    assert torch.equal(out.isnan(), spoilt)


@pytest.mark.parametrize("tile", TILES)
def test_every_interleaving_gives_the_same_bits(emulated_tiled: Path, tmp_path: Path, tile: int) -> None:
    problem = random_problem(65, 24, 656)
    runs = [run_tiled(emulated_tiled, problem, tmp_path, tile=tile, seed=seed) for seed in range(4)]
    assert all(isinstance(run, torch.Tensor) and torch.equal(run, runs[0]) for run in runs)


def test_a_row_does_not_depend_on_the_rest_of_the_batch_while_the_tile_is_the_same(
    emulated_tiled: Path, tmp_path: Path
) -> None:
    full = random_problem(200, 24, 656)
    whole = run_tiled(emulated_tiled, full, tmp_path, tile=WIDE)
    part = Problem(full.x_codes[:77], full.x_scales[:77], full.w_codes, full.w_scales, full.alpha, full.bias)
    out = run_tiled(emulated_tiled, part, tmp_path, tile=WIDE)
    assert isinstance(whole, torch.Tensor)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, whole[:77])


def test_later_bands_of_tokens_are_right(emulated_tiled: Path, tmp_path: Path) -> None:
    """2,060 tokens are 34 small tiles in three bands of 12: the last two have no token."""
    problem = random_problem(2060, 8, 16)
    require_right(run_tiled(emulated_tiled, problem, tmp_path, tile=SPLIT_K), problem)
