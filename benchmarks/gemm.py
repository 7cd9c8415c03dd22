"""Time the NVFP4 GEMM for few tokens beside the fastest weight-only kernel and bf16.

    python -m benchmarks.gemm --library build/sm120.so [--load-only-library ...] [--humming] [--marlin] [--json F]

Every figure is the median over graph replays of a graph of many calls, each on its own weights, together far larger
than L2. Modes: ``pdl`` launches each call as a programmatic dependent of the one in front, as the layers of a decoder
do; ``plain`` launches fully serialised; ``independent`` spreads the calls over four streams.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.graphs import WARM_REPLAYS, read_bandwidth, replay_seconds

SHAPES = [
    (512, 7168), (1024, 7168), (1024, 4096), (4096, 1024), (2048, 4096), (4096, 4096), (8192, 4096), (24576, 4096),
    (4096, 12288), (34816, 5120), (5120, 17408),
]  # fmt: skip
ROTATION_BYTES = 400 << 20
MAX_ROTATION = 200


def time_graph(call: Callable[[int], Any], calls: int, streams: int = 1, repeats: int = 15) -> float:
    """Return microseconds per call: median over replays of one graph of ``calls`` calls."""
    for i in range(min(calls, 3)):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if streams == 1:
            for i in range(calls):
                call(i)
        else:
            main = torch.cuda.current_stream()
            side = [torch.cuda.Stream() for _ in range(streams)]
            for index, stream in enumerate(side):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    for i in range(index, calls, streams):
                        call(i)
            for stream in side:
                main.wait_stream(stream)
    times = [replay_seconds(graph) for _ in range(repeats + WARM_REPLAYS)][WARM_REPLAYS:]
    return statistics.median(times) / calls * 1e6


def rotation(n: int, k: int) -> int:
    """How many weights to rotate through."""
    return max(2, min(MAX_ROTATION, -(-ROTATION_BYTES // (n * k * 9 // 16))))


class Ours:
    """The kernel under test with its rotated weights. ``forced`` is nvfp4_gemm's: a cluster, a tile, its own choice."""

    def __init__(self, library: Any, m: int, n: int, k: int) -> None:
        self.library, self.count = library, rotation(n, k)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)

        def scales(rows: int) -> torch.Tensor:
            size = -(-rows // 128) * -(-k // 64) * 512
            return torch.randint(0x30, 0x40, (size,), device="cuda", dtype=torch.uint8)

        self.weights = [(draw(n, k // 2), scales(n)) for _ in range(self.count)]
        self.a, self.a_scale = draw(m, k // 2), scales(m)
        self.alpha = torch.full((n,), 0.01, device="cuda")
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def call(self, index: int, pdl: bool, forced: int = 0) -> None:
        weight, scale = self.weights[index % self.count]
        self.library.nvfp4_gemm(self.a, self.a_scale, weight, scale, self.alpha, None, self.out, pdl, forced)

    def time(self, mode: str, forced: int = 0) -> float:
        """Microseconds per call in a launch mode."""
        streams = 4 if mode == "independent" else 1
        return time_graph(lambda i: self.call(i, mode == "pdl", forced), self.count, streams)


def humming_layers(n: int, k: int) -> list[Any]:
    """Copies of one humming NVFP4 layer, enough to rotate beyond L2."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    config = {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16, "scale_2_type": "tensor"}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_unquantized(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
    layer.transform()
    return [layer] + [copy.deepcopy(layer) for _ in range(rotation(n, k) - 1)]


def marlin_layers(n: int, k: int) -> list[Any]:
    """The same of SGLang's Marlin; none, with the reason printed, where it does not run."""
    try:
        from benchmarks.peers import marlin

        return marlin.layers(n, k, rotation(n, k))
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"no marlin: {type(error).__name__}: {error}", flush=True)
        return []


def time_shape(args: argparse.Namespace, library: Any, load_only: Any, n: int, k: int) -> Iterator[dict[str, Any]]:
    """Yield one row per token count, and print it."""
    layers = humming_layers(n, k) if args.humming else []
    marlin = marlin_layers(n, k) if args.marlin else []
    count = max(2, min(16, (ROTATION_BYTES * 2) // (2 * n * k)))
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)] if args.bf16 else []
    for m in args.tokens:
        row: dict[str, Any] = {"M": m, "N": n, "K": k, "MB": n * k * 9 / 16 * 1e-6}
        row["config"] = str(library.nvfp4_gemm_plan(m, n, k))
        ours = Ours(library, m, n, k)
        for mode in ("pdl", "plain", "independent"):
            row[mode] = ours.time(mode)
        if args.sweep:
            for cluster in (1, 2, 4, 8):
                row[f"cluster{cluster}"] = [ours.time(mode, cluster) for mode in ("pdl", "plain")]
        if load_only is not None:
            ours.library = load_only
            row["load_path_pdl"] = ours.time("pdl")
        del ours
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        for name, peers in (("humming", layers), ("marlin", marlin), ("bf16", dense)):
            if peers:
                row[name] = time_peer(name, peers, x)
        print(json.dumps({key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()}), flush=True)
        yield row


def time_peer(name: str, weights: list[Any], x: torch.Tensor) -> float:
    """Microseconds per call of a peer, its weights rotated like ours."""
    if name != "bf16":
        return time_graph(lambda i: weights[i % len(weights)](x), len(weights))
    return time_graph(lambda i: x @ weights[i % len(weights)].T, len(weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--load-only-library", help="the same built with -DSM120_LOAD_PATH_ONLY")
    parser.add_argument("--humming", action="store_true")
    parser.add_argument("--marlin", action="store_true", help="SGLang's, where it is installed")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="also every cluster size")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import tvm_ffi

    library = tvm_ffi.load_module(args.library)
    load_only = tvm_ffi.load_module(args.load_only_library) if args.load_only_library else None
    header = {"card": torch.cuda.get_device_name(), "read_TBps": read_bandwidth()}
    print(json.dumps(header), flush=True)
    rows = [row for n, k in SHAPES[: args.shapes] for row in time_shape(args, library, load_only, n, k)]
    if args.json:
        args.json.write_text(json.dumps({**header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
