"""The GEMM for more than 64 tokens on a real GPU: right in both tile sizes, repeatable, safe in graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from library import GpuProblem, native  # noqa: E402
from problem import Problem, one_hot_problem, random_problem, same_weights  # noqa: E402
from replay import check_chained_replays  # noqa: E402

from sglang_sm120 import self_test  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

OWN_CHOICE, SPLIT_K, WIDE = 0, 64, 128
# What tensor parallelism leaves of real layers, and the smallest there is.
SHAPES = [(8, 16), (24, 48), (136, 464), (464, 3696), (2880, 1856), (1856, 2880), (896, 5120)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("out_type", [torch.bfloat16, torch.float16])
def test_random_data_is_within_the_derived_bound(n: int, k: int, out_type: torch.dtype) -> None:
    full = random_problem(1000, n, k, out_type=out_type)
    for m in (65, 127, 128, 129, 1000):
        problem = Problem(
            full.x_codes[:m], full.x_scales[:m], full.w_codes, full.w_scales,
            full.alpha if m % 2 else full.alpha[:1], full.bias if m % 3 else None, out_type,
        )  # fmt: skip
        gpu = GpuProblem(problem)
        for forced, pdl in ((OWN_CHOICE, True), (OWN_CHOICE, False), (SPLIT_K, True), (WIDE, True)):
            assert gpu.worst(gpu.run(forced=forced, pdl=pdl)) <= 1, f"M={m} forced={forced} pdl={pdl}"


@pytest.mark.parametrize("tile", [SPLIT_K, WIDE])
@pytest.mark.parametrize(("n", "k"), [(136, 272), (264, 1040), (464, 1856)])
def test_one_hot_is_exact_for_every_column_and_block(n: int, k: int, tile: int) -> None:
    problem = one_hot_problem(n, k, [i % (k // 16) for i in range(max(65, k // 16))])
    assert torch.equal(GpuProblem(problem).run(forced=tile).double().cpu(), problem.expected())


def test_the_plan_is_tiled_once_there_is_a_tile_for_every_sm() -> None:
    """The figures hold for 129 to 256 SMs."""
    assert str(native().nvfp4_gemm_plan(64, 65536, 4096)).startswith("cluster")
    assert str(native().nvfp4_gemm_plan(65, 512, 4096)).startswith("cluster")
    assert str(native().nvfp4_gemm_plan(128, 4096, 4096)).startswith("cluster")
    assert str(native().nvfp4_gemm_plan(256, 4096, 4096)) == "tile 64"
    assert str(native().nvfp4_gemm_plan(8192, 8192, 4096)) == "tile 128"


def test_the_start_up_check_reaches_both_tiles_on_this_card() -> None:
    plans = {str(native().nvfp4_gemm_plan(*sizes)) for sizes in self_test.problems(torch.device("cuda"))}
    assert {"tile 64", "tile 128"} <= plans


@pytest.mark.parametrize("tile", [SPLIT_K, WIDE])
def test_activation_rows_apart_from_each_other_are_right(tile: int) -> None:
    """Rows of a wider buffer, at multiples of 8 bytes and of 16, with poison between them."""
    for padding in (8, 16):
        gpu = GpuProblem(random_problem(130, 136, 272))
        wide = torch.full((130, 136 + padding), 0xFF, dtype=torch.uint8, device="cuda")
        wide[:, :136] = gpu.a
        gpu.a = wide[:, :136]
        assert gpu.worst(gpu.run(forced=tile)) <= 1


@pytest.mark.parametrize("tile", [SPLIT_K, WIDE])
def test_a_thousand_calls_give_the_same_bits(tile: int) -> None:
    for m, n, k in [(129, 512, 7168), (300, 464, 3696)]:
        gpu = GpuProblem(random_problem(m, n, k))
        first = gpu.run(forced=tile)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            wrong += (gpu.run(forced=tile) != first).sum()
        assert int(wrong) == 0


@pytest.mark.parametrize("tile", [SPLIT_K, WIDE])
def test_graph_replays_follow_new_activations_in_a_dependent_chain(tile: int) -> None:
    gpus = [GpuProblem(p) for p in same_weights(150, 896, 2560, count=3)]
    live = GpuProblem(gpus[0].problem)
    check_chained_replays(
        (live.a, live.a_scale),
        [(g.a, g.a_scale) for g in gpus],
        [g.run(forced=tile, pdl=False) for g in gpus],
        lambda out: live.run(out, forced=tile),
        calls=4,
        rounds=30,
    )
