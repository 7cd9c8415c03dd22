"""Time the NVFP4 quantizer: microseconds a call and share of the bandwidth for 2 + 0.5625 bytes an element.

python -m benchmarks.gemm_quantize --library build/sm120.so
"""

from __future__ import annotations

import argparse
import json

import torch

from benchmarks.gemm import read_bandwidth, time_graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    args = parser.parse_args()
    import tvm_ffi

    library = tvm_ffi.load_module(args.library)
    bandwidth = read_bandwidth()
    scale = torch.tensor(100.0, device="cuda")
    for m, k in [(1, 7168), (8, 7168), (16, 7168), (128, 7168), (4096, 7168), (16384, 7168)]:
        count = max(2, min(64, (400 << 20) // (2 * m * k)))
        inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        codes = torch.empty(m, k // 2, device="cuda", dtype=torch.uint8)
        scales = torch.empty(-(-m // 128) * 128, k // 16, device="cuda", dtype=torch.uint8)
        row: dict[str, float] = {"M": m, "K": k}
        for mode in ("pdl", "plain"):

            def call(i: int, inputs: list = inputs, out: tuple = (codes, scales), pdl: bool = mode == "pdl") -> None:
                library.nvfp4_quantize(inputs[i % len(inputs)], scale, *out, True, False, pdl)

            row[mode] = round(time_graph(call, count), 2)
        row["share"] = round(m * k * 2.5625 / row["plain"] * 1e-6 / bandwidth, 2)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
