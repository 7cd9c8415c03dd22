"""Each guard of the kernel is needed: take one away and a test fails.

A mutation is a text change to one file of csrc, applied to a copy. It must compile, and at least one of the problems
below must then give a wrong number or be refused by the emulation.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import emulated
import pytest
import torch
from problem import Problem, one_hot_problem, random_problem

KERNEL = "csrc/gemm_skinny/"
MODEL = "csrc/emulation/mma_model.cc"
MAIN = "tests/kernels/emulated_gemm.cc"

# name: (file, text that occurs exactly once, replacement)
MUTATIONS = {
    # the operands' way into the instruction
    "selector of A": (KERNEL + "mainloop.cuh", "mma_nvfp4<kStep, kStep>", "mma_nvfp4<0, kStep>"),
    "selector of B": (KERNEL + "mainloop.cuh", "mma_nvfp4<kStep, kStep>", "mma_nvfp4<kStep, 0>"),
    "lane of token codes": (KERNEL + "tokens.cuh", "token_ * stride_ + 4 * t_;", "token_ * stride_ + 4 * (t_ ^ 1);"),
    "k block of token scales": (KERNEL + "tokens.cuh", "2 * unit + t_ % 2;", "2 * unit;"),
    "half of token codes": (KERNEL + "tokens.cuh", "source + 16 * i);", "source + 16 * (i ^ 1));"),
    "matrix order": (KERNEL + "mainloop.cuh", "2 * (matrix % 2)", "2 * (matrix / 2)"),
    "chunk of a step": (KERNEL + "mainloop.cuh", "2 * kStep + matrix / 2", "2 * kStep"),
    "lane of weight scales": (KERNEL + "mainloop.cuh", "lane / 4, 2 * (t % 2))", "lane / 4, 2 * (t / 2))"),
    "step of weight scales": (KERNEL + "mainloop.cuh", "scale_offset(t / 2,", "scale_offset(0,"),
    "word of weight scales": (KERNEL + "mainloop.cuh", "? weight_scales.x : weight_scales.y", "? weight_scales.x : weight_scales.x"),
    # the model of the instruction
    "model: nibble order": (MODEL, "a_register) >> (4 * (k % 8))", "a_register) >> (4 * (k % 8 ^ 1))"),
    "model: lane of B": (MODEL, "word(4 * column + quad_lane,", "word(4 * column + (quad_lane ^ 1),"),
    "model: register of A": (MODEL, "row / 8 + 2 * (k / 32);", "2 * (row / 8) + k / 32;"),
    "model: scale lane of A": (MODEL, "2 * select_a + row / 8, 6)", "2 * select_a, 6)"),
    "model: scale byte": (MODEL, "select_b, 7) >> (8 * (k / 16))", "select_b, 7) >> (8 * (k / 32))"),
    # edges
    "padding bytes of weight scales": (KERNEL + "mainloop.cuh", "weight_scales.x &= weight_mask;", ""),
    "padding bytes of token scales": (KERNEL + "mainloop.cuh", "tokens.scales[tile] &= token_mask;", "(void)token_mask;"),
    "tail of a weight row": (KERNEL + "weights.cuh", "left < 0 ? 0 : left > 16 ? 16 : left", "left < 0 ? 0 : 16"),
    "tail of a token row": (KERNEL + "tokens.cuh", "row && byte + 16 * i < row_bytes_", "row"),
    "rows past n": (KERNEL + "weights.cuh", "q * kScaleQuarterRows < rows_left_ ? bytes : 0", "bytes"),
    "tokens past m": (KERNEL + "tokens.cuh", "const bool row = token < m_;", "const bool row = true;"),
    "scale tiles past k": (KERNEL + "weights.cuh", "const bool exists = k_tile < k_tiles_;", "const bool exists = true;"),
    "columns past n": (KERNEL + "epilogue.cuh", "inside_(column_ < params.n)", "inside_(true)"),
    "outputs past m": (KERNEL + "reduce.cuh", "if (global_pair / kPairsPerToken >= m) continue;", ""),
    # the ring
    "wait for a stage": (KERNEL + "mainloop.cuh", "ptx::cp_async_wait<kStages - 1>();", ""),
    "depth of the wait": (KERNEL + "mainloop.cuh", "cp_async_wait<kStages - 1>", "cp_async_wait<kStages>"),
    "commit of the first stages": (KERNEL + "kernel.cuh", "    ptx::cp_async_commit();\n", ""),
    "commit of a refill": (KERNEL + "mainloop.cuh", "    ptx::cp_async_commit();  //", "    //"),
    "lanes meet after the wait": (KERNEL + "mainloop.cuh", "    ptx::sync_warp();  // the other", "    // the other"),
    "lanes meet before a refill": (KERNEL + "mainloop.cuh", "    ptx::sync_warp();  // nobody", "    // nobody"),
    "stage wraps": (KERNEL + "mainloop.cuh", "stage + 1 == kStages ? 0 : stage + 1", "(stage + 1) % 2"),
    # the reduction
    "warps meet before the sum": (KERNEL + "reduce.cuh", "    ptx::sync_block();\n    for", "    for"),
    "warps meet between passes": (KERNEL + "reduce.cuh", "if (pass > 0) ptx::sync_block();", ""),
    "every warp counts": (KERNEL + "reduce.cuh", "kRingBytes, kWarps);", "kRingBytes, kWarps - 1);"),
    "peers have started": (KERNEL + "reduce.cuh", "  if (cluster > 1) ptx::cluster_wait();", "  if (cluster > 1 && m < 0) ptx::cluster_wait();"),
    "peers announce themselves": (KERNEL + "kernel.cuh", "if (cluster > 1) ptx::cluster_arrive();", ""),
    "peers have pushed": (KERNEL + "reduce.cuh", "  ptx::cluster_arrive();\n  ptx::cluster_wait();\n", ""),
    "owner of a pair": (KERNEL + "reduce.cuh", "rank * pairs_per_rank + global_pair %", "global_pair %"),
    # the epilogue
    "alpha of the second column": (KERNEL + "epilogue.cuh", "params.alpha + column_ + 1", "params.alpha + column_"),
    "bias": (KERNEL + "epilogue.cuh", "+ bias_.y", ""),
    # programmatic dependent launch
    "dependency wait": (KERNEL + "kernel.cuh", "  ptx::wait_for_dependencies();\n", ""),
    "dependents are let go": (KERNEL + "kernel.cuh", "  ptx::launch_dependents();", ""),
    "tokens only after the wait": (
        KERNEL + "kernel.cuh",
        "  ptx::wait_for_dependencies();\n\n  const Epilogue epilogue(params, tile, thread);\n",
        "  const Epilogue epilogue(params, tile, thread);\n  ptx::wait_for_dependencies();\n",
    ),
}  # fmt: skip


def problems() -> list[tuple[Problem, int, int]]:
    """Small problems (with cluster size and stages) that between them notice every mutation."""
    return [
        (one_hot_problem(136, 272, list(range(17))), 1, 2),
        (random_problem(5, 40, 1296 * 4), 1, 4),
        (random_problem(33, 40, 2320), 2, 2),
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


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str, build_folder: Path, tmp_path: Path) -> None:
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    file, old, new = MUTATIONS[name]
    shutil.copytree(emulated.ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / MAIN).parent.mkdir(parents=True)
    shutil.copy(emulated.ROOT / MAIN, tmp_path / MAIN)
    text = (tmp_path / file).read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {file}"
    (tmp_path / file).write_text(text.replace(old, new))
    binary = emulated.build(MAIN, build_folder, root=tmp_path)
    assert not survives(binary, tmp_path)
