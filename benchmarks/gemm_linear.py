"""Time a layer of few tokens as two launches, quantizer and GEMM, and as the one that does both.

    python -m benchmarks.gemm_linear [--library build/sm120.so] [--json out.json]

One run times both ways for each shape, on rotated weights as in ``gemm.py``, in its modes ``pdl`` (a chain of dependent
launches) and ``plain``. ``gain`` is two launches over one, above 1 where one is faster. ``takes_one`` is the choice of
``csrc/gemm/plan.h``, which compares ``units_per_sm`` (row tiles x units of 128 along K x tiles of 8 tokens, for each
SM) with a limit. The right limit is where ``gain`` falls to 1.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gemm import SHAPES, Ours, time_graph
from sglang_sm120.build import library_path
from sglang_sm120.layout import padded_scale_shape

TOKENS = (1, 4, 8, 16)
MODES = ("pdl", "plain")


class Layer(Ours):
    """The rotated weights, and activations in bf16."""

    def __init__(self, library: Any, m: int, n: int, k: int) -> None:
        super().__init__(library, m, n, k)
        self.x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self.encode_scale = torch.tensor(100.0, device="cuda")
        self.a_scale = torch.empty(padded_scale_shape(m, k // 16), device="cuda", dtype=torch.uint8)

    def two_launches(self, index: int, pdl: bool) -> None:
        """Quantizer, then GEMM."""
        self.library.nvfp4_quantize(self.x, self.encode_scale, self.a, self.a_scale, True, False, pdl)
        self.call(index, pdl)

    def one_launch(self, index: int, pdl: bool) -> None:
        """The GEMM that quantizes."""
        weight, scale = self.weights[index % self.count]
        self.library.nvfp4_linear(self.x, self.encode_scale, weight, scale, self.alpha, None, self.out, pdl, 0)


def units_per_sm(m: int, n: int, k: int) -> float:
    """The work of quantizing inside, as the plan counts it."""
    row_tiles, units, token_tiles = -(-n // 128) * 4, -(-k // 128), 1 if m <= 8 else 2
    return row_tiles * units * token_tiles / torch.cuda.get_device_properties().multi_processor_count


def time_case(library: Any, m: int, n: int, k: int) -> dict[str, Any]:
    """One row: microseconds a layer."""
    layer = Layer(library, m, n, k)
    row: dict[str, Any] = {"M": m, "N": n, "K": k, "units_per_sm": units_per_sm(m, n, k)}
    row["takes_one"] = bool(library.nvfp4_quantizes_inside(torch.cuda.current_device(), m, n, k))
    for mode in MODES:
        pdl = mode == "pdl"
        row[f"two_{mode}"] = time_graph(partial(layer.two_launches, pdl=pdl), layer.count)
        row[f"one_{mode}"] = time_graph(partial(layer.one_launch, pdl=pdl), layer.count)
        row[f"gain_{mode}"] = row[f"two_{mode}"] / row[f"one_{mode}"]
    row["gemm_pdl"] = layer.time("pdl")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", help="compiled kernels; made now if left out")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import tvm_ffi

    library = tvm_ffi.load_module(args.library or str(library_path()))
    header = {"card": torch.cuda.get_device_name()}
    print(json.dumps(header), flush=True)
    rows = []
    for n, k in SHAPES[: args.shapes]:
        for m in args.tokens:
            row = time_case(library, m, n, k)
            rows.append({key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()})
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
