"""Time the NVFP4 quantizer beside a copy that moves the same number of bytes, in one run.

    python -m benchmarks.gemm_quantize --library build/sm120.so [--json out.json]

The quantizer reads 2 bytes an element and writes 0.5625 (codes and scales) plus the padding of the scales; the copy
reads and writes half of that sum each. Inputs rotate through 400 MB or more. Modes as in ``benchmarks/gemm.py``:
``pdl`` launches each call as a programmatic dependent of the one in front, ``plain`` fully serialised; the copy is
launched plainly. ``share`` is the copy's time over the plain one, 1 for a quantizer that is as fast as a copy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gemm import ROTATION_BYTES, time_graph
from benchmarks.graphs import read_bandwidth

SHAPES = [
    (1, 7168), (8, 7168), (16, 7168), (64, 7168), (128, 7168), (1024, 7168), (4096, 1024), (4096, 5120), (4096, 7168),
    (4096, 17408), (16384, 7168),
]  # fmt: skip


def moved_bytes(m: int, k: int) -> int:
    """Bytes that quantizing [m, k] has to move, the scales padded to 128 rows and 64 elements."""
    return 2 * m * k + m * k // 2 + -(-m // 128) * 128 * -(-k // 64) * 4


def time_shape(library: Any, m: int, k: int) -> dict[str, float]:
    """Microseconds a call of the quantizer and of the copy."""
    count = max(2, min(64, ROTATION_BYTES // (2 * m * k)))
    scale = torch.tensor(100.0, device="cuda")
    inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    codes = torch.empty(m, k // 2, device="cuda", dtype=torch.uint8)
    scales = torch.empty(-(-m // 128) * 128, -(-k // 64) * 4, device="cuda", dtype=torch.uint8)

    def quantize(pdl: bool) -> Callable[[int], None]:
        return lambda i: library.nvfp4_quantize(inputs[i % count], scale, codes, scales, True, False, pdl)

    row = {"M": m, "K": k, "pdl": time_graph(quantize(True), count), "plain": time_graph(quantize(False), count)}
    words = moved_bytes(m, k) // 8
    sources = [torch.empty(words, device="cuda", dtype=torch.int32) for _ in range(count)]
    target = torch.empty(words, device="cuda", dtype=torch.int32)
    row["copy"] = time_graph(lambda i: target.copy_(sources[i % count]), count)
    row["share"] = row["copy"] / row["plain"]
    row["TBps"] = moved_bytes(m, k) / row["plain"] * 1e-6
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import tvm_ffi

    library = tvm_ffi.load_module(args.library)
    header = {"card": torch.cuda.get_device_name(), "read_TBps": read_bandwidth()}
    print(json.dumps(header), flush=True)
    rows = []
    for m, k in SHAPES:
        rows.append({key: round(value, 3) for key, value in time_shape(library, m, k).items()})
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
