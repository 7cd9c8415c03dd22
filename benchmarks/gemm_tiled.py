"""Time the NVFP4 GEMM for many tokens beside cuBLAS bf16 and the card's own mma.sync rate.

    python -m benchmarks.gemm_tiled [--clusters] [--library build/sm120.so] [--json out.json]

Every figure is the median over graph replays of calls on rotated weights, as in ``gemm.py``. ``own`` is what a call
takes by itself, the others are forced: both tiles, and the kernel for few tokens. ``of_mma`` is the rate of ``own``
as a share of what mma.sync m16n8k16 reaches from registers in the same run; on SM12x, where the FP4 instruction is
another one, that share can exceed 1.

``--clusters`` times another choice instead: the kernel for few tokens beyond 64 of them, in blocks of 64, with every
cluster size and its own choice of one (one CTA an SM, ``choose_cluster`` in ``csrc/gemm_skinny/config.h``). The rule
is right where ``own`` is the least of the five.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gemm import Ours, time_graph
from sglang_sm120.build import library_path
from sglang_sm120.build.toolchain import find_toolchain

TOKENS = (128, 256, 1024, 4096)
SHAPES = [(1024, 7168), (2048, 4096), (4096, 4096), (5120, 17408), (24576, 4096)]
TILES = (64, 128)
#: Up to here the kernel for few tokens is timed too: where does the tiled one overtake it?
SKINNY_TOKENS = 256
#: Where there is no tile for every SM of a large card, so that more than 64 tokens stay with the kernel for few.
CLUSTER_TOKENS = (65, 128, 192, 256)
CLUSTER_SHAPES = [(512, 7168), (1024, 7168), (1024, 4096), (2048, 4096)]
PEAK = Path(__file__).with_name("mma_peak.cu")


def mma_peak() -> float:
    """TFLOP/s of mma.sync m16n8k16 with fp16 operands, from registers.

    Raises:
        RuntimeError: CUDA failed.
    """
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "mma_peak.so"
        toolchain = find_toolchain()
        command = [
            str(toolchain.nvcc), "-O3", "-shared", "-Xcompiler=-fPIC", *toolchain.folders,
            f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}", str(PEAK), "-o", str(library),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        function = ctypes.CDLL(str(library)).mma_peak
        function.restype = ctypes.c_double
        rate = float(function(10))
    if rate <= 0:
        raise RuntimeError("the mma.sync benchmark failed")
    return rate


def time_case(library: Any, peak: float, m: int, n: int, k: int) -> dict[str, Any]:
    """One row: microseconds a call, and rates."""
    flops = 2.0 * m * n * k
    ours = Ours(library, m, n, k)
    row: dict[str, Any] = {"M": m, "N": n, "K": k, "plan": str(library.nvfp4_gemm_plan(m, n, k))}
    row["own"] = ours.time("pdl")
    row["own_plain"] = ours.time("plain")
    for tile in TILES:
        row[f"tile{tile}"] = ours.time("pdl", tile)
    if m <= SKINNY_TOKENS:
        row["skinny"] = min(ours.time("pdl", cluster) for cluster in (1, 4))
    del ours
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    row["bf16"] = time_graph(lambda i: x @ dense[i % 4].T, 16)
    row["TFLOPS"] = flops / row["own"] * 1e-6
    row["of_mma"] = row["TFLOPS"] / peak
    return row


def time_clusters(library: Any, m: int, n: int, k: int) -> dict[str, Any]:
    """One row: microseconds a call in a chain, for each cluster size and the kernel's own choice."""
    ours = Ours(library, m, n, k)
    row: dict[str, Any] = {"M": m, "N": n, "K": k, "plan": str(library.nvfp4_gemm_plan(m, n, k))}
    for cluster in (1, 2, 4, 8):
        row[f"cluster{cluster}"] = ours.time("pdl", cluster)
    row["own"] = ours.time("pdl")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", help="compiled kernels; made now if left out")
    parser.add_argument("--clusters", action="store_true", help="the kernel for few tokens beyond 64 of them")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import tvm_ffi

    library = tvm_ffi.load_module(args.library or str(library_path()))
    header: dict[str, Any] = {"card": torch.cuda.get_device_name()}
    peak = 0.0
    if not args.clusters:
        peak = header["mma_sync_TFLOPS"] = round(mma_peak(), 1)
    print(json.dumps(header), flush=True)
    rows = []
    for n, k in CLUSTER_SHAPES if args.clusters else SHAPES:
        for m in CLUSTER_TOKENS if args.clusters else TOKENS:
            row = time_clusters(library, m, n, k) if args.clusters else time_case(library, peak, m, n, k)
            rows.append({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
