"""The skinny GEMM on a real GPU: right, repeatable, and safe in graphs, streams and dependent launches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from library import GpuProblem, native  # noqa: E402
from problem import Problem, one_hot_problem, random_problem, same_weights  # noqa: E402
from replay import check_chained_replays  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

SHAPES = [
    (8, 16), (40, 48), (136, 272), (464, 3696), (2880, 1856), (1856, 2880), (896, 5120), (512, 7168), (1024, 4096),
    (4096, 1024), (120, 14336),
]  # fmt: skip


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("out_type", [torch.bfloat16, torch.float16])
def test_random_data_is_within_the_derived_bound(n: int, k: int, out_type: torch.dtype) -> None:
    full = random_problem(64, n, k, out_type=out_type)
    for m in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64):
        problem = Problem(
            full.x_codes[:m], full.x_scales[:m], full.w_codes, full.w_scales,
            full.alpha if m % 2 else full.alpha[:1], full.bias if m % 3 else None, out_type,
        )  # fmt: skip
        gpu = GpuProblem(problem)
        for pdl in (False, True):
            assert gpu.worst(gpu.run(pdl=pdl)) <= 1, f"M={m} pdl={pdl}"


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_every_cluster_size_is_right(cluster: int) -> None:
    for m, n, k in [(5, 136, 2064), (20, 40, 7168), (64, 264, 4112)]:
        gpu = GpuProblem(random_problem(m, n, k))
        assert gpu.worst(gpu.run(forced=cluster)) <= 1


@pytest.mark.parametrize(("n", "k"), [(136, 272), (464, 1856), (1032, 1040)])
def test_one_hot_is_exact_for_every_column_and_block(n: int, k: int) -> None:
    blocks = list(range(k // 16))
    for start in range(0, len(blocks), 64):
        problem = one_hot_problem(n, k, blocks[start : start + 64])
        assert torch.equal(GpuProblem(problem).run().double().cpu(), problem.expected())


@pytest.mark.parametrize("m", [65, 201])
def test_the_skinny_kernel_works_off_more_tokens_in_blocks(m: int) -> None:
    for n, k in [(136, 464), (8, 16)]:
        gpu = GpuProblem(random_problem(m, n, k))
        assert gpu.worst(gpu.run(forced=1)) <= 1, f"N={n} K={k}"


def test_an_empty_batch_is_nothing_to_do() -> None:
    full = random_problem(1, 128, 256)
    empty = Problem(full.x_codes[:0], full.x_scales[:0], full.w_codes, full.w_scales, full.alpha, full.bias)
    gpu = GpuProblem(empty)
    native().nvfp4_gemm(
        gpu.a, torch.zeros(0, dtype=torch.uint8, device="cuda"), gpu.b, gpu.b_scale, gpu.alpha, gpu.bias,
        gpu.poisoned(), True, 0,
    )  # fmt: skip
    torch.cuda.synchronize()


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    for n, k in [(512, 7168), (896, 5120), (464, 3696)]:
        full = random_problem(64, n, k)
        whole = GpuProblem(full).run()
        for m in range(1, 64, 5):
            part = Problem(full.x_codes[:m], full.x_scales[:m], full.w_codes, full.w_scales, full.alpha, full.bias)
            assert torch.equal(GpuProblem(part).run(), whole[:m]), f"M={m}"


def test_a_thousand_calls_give_the_same_bits() -> None:
    for m, n, k in [(1, 512, 7168), (8, 2048, 4096), (33, 464, 3696)]:
        gpu = GpuProblem(random_problem(m, n, k))
        first = gpu.run()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            wrong += (gpu.run() != first).sum()
        assert int(wrong) == 0


def test_two_streams_do_not_disturb_each_other() -> None:
    problems = [GpuProblem(random_problem(8, 512, 7168, seed=s)) for s in range(2)]
    expected = [p.run() for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(200):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(problems[i].run())
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(out, expected[i]) for out in results[i])


def test_graph_replays_follow_new_activations_in_a_dependent_chain() -> None:
    gpus = [GpuProblem(p) for p in same_weights(4, 896, 5120, count=4)]
    live = GpuProblem(gpus[0].problem)
    check_chained_replays(
        (live.a, live.a_scale),
        [(g.a, g.a_scale) for g in gpus],
        [g.run(pdl=False) for g in gpus],
        live.run,
        calls=8,
        rounds=40,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": lambda t: t[:, :-1]}, "K"),
        ({"alpha": lambda t: t[:3]}, "alpha"),
        ({"b_scale": lambda t: t[:-512]}, "b_scale"),
        ({"bias": lambda t: t.float()}, "bias"),
        ({"bias": lambda t: t.cpu()}, "bias among them"),
        ({"alpha": lambda t: t.cpu()}, "device of out"),
    ],
)
def test_wrong_operands_are_refused_by_name(change: dict, message: str) -> None:
    gpu = GpuProblem(random_problem(4, 136, 272))
    for name, edit in change.items():
        setattr(gpu, name, edit(getattr(gpu, name)))
    with pytest.raises(ValueError, match=message):
        gpu.run()


def test_the_package_compiles_its_kernels_and_calls_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_sm120 import native as module
    from sglang_sm120.build import load

    monkeypatch.setenv("SGLANG_SM120_CACHE_DIR", str(tmp_path / "cache"))
    load.cache_clear()
    gpu = GpuProblem(random_problem(9, 136, 464))
    out = module.gemm(gpu.a, gpu.b, gpu.a_scale, gpu.b_scale, gpu.alpha, gpu.bias, torch.bfloat16)
    assert gpu.worst(out) <= 1
    load.cache_clear()
