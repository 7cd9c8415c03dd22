"""Time one NVFP4 mixture-of-experts layer for few tokens beside the kernels that SGLang has for it.

    python -m benchmarks.moe [--library build/sm120.so] [--models ...] [--tp 1 4 8] [--peers ours marlin ...] [--json F]

A row is one geometry after tensor parallelism and one number of tokens. Every figure is the median over replays of a
graph of many calls; the contenders' replays are taken in turn in the same run. Every token of every call chooses its
``top_k`` distinct experts at random, and calls go round a set of layers that together hold ``ROTATED_BYTES`` of weights
or more, so that what a call reads is in L2 with a probability of at most L2 / ROTATED_BYTES.

``share`` is the part of the measured read bandwidth that the bytes of the experts chosen in a call (each once, with
their block scales) come to. ``launches`` is the number of kernels for one layer. Peers: ``marlin`` is SGLang's
weight-only NVFP4 kernel (bf16 activations), ``triton`` its Triton kernel with bf16 weights, which are 3.6 times as many
bytes, ``humming`` that package's weight-only kernel, checked against float64 before it is timed. A peer that cannot run
is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.graphs import interleaved_microseconds, launches, read_bandwidth
from sglang_sm120.models.source import presets

MODELS = ("qwen3.6-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b", "minimax-m2.5")
TOKENS = (1, 2, 4, 8, 16, 32, 64)
FEW = 8  # the geometric mean goes up to here
ROTATED_BYTES = 2 << 30
CALLS = 40
PEERS = ("marlin", "triton", "humming")


@dataclass(frozen=True)
class Geometry:
    """One rank's experts."""

    model: str
    tp: int
    experts: int
    top_k: int
    hidden: int
    inner: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert with its block scales."""
        return 3 * self.hidden * self.inner * 9 // 16

    @property
    def layers(self) -> int:
        """How many layers to go round."""
        return max(1, -(-ROTATED_BYTES // (self.experts * self.expert_bytes)))


@dataclass
class Routing:
    """Random routing for each call of a graph."""

    ids: torch.Tensor  # int32 [calls, M, top_k]
    weights: torch.Tensor  # float32, the same shape

    def active(self) -> float:
        """Distinct experts of a call, on average."""
        return sum(torch.unique(call).numel() for call in self.ids) / len(self.ids)


def geometries(models: list[str], sizes: list[int]) -> list[Geometry]:
    """What tensor parallelism leaves of each model's experts."""
    found = []
    for model in models:
        config = presets()[model]["config"]
        experts = config.get("num_experts") or config["num_local_experts"]
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        for tp in sizes:
            found.append(
                Geometry(model, tp, experts, config["num_experts_per_tok"], config["hidden_size"], inner // tp)
            )
    return found


def random_routing(geometry: Geometry, tokens: int) -> Routing:
    """Distinct experts for each token, uniformly; the same for every contender."""
    torch.manual_seed(geometry.inner * 1009 + tokens)
    order = torch.rand(CALLS, tokens, geometry.experts, device="cuda").argsort(-1)
    ids = order[..., : geometry.top_k].to(torch.int32).contiguous()
    weights = torch.rand(CALLS, tokens, geometry.top_k, device="cuda")
    return Routing(ids, weights / weights.sum(-1, keepdim=True))


def make_contenders(names: list[str], geometry: Geometry) -> dict[str, Any]:
    """Return, by name, a module-made list of layers: each takes (hidden, ids, weights)."""
    made: dict[str, Any] = {}
    for name in names:
        try:
            made[name] = import_module(f"benchmarks.peers.{name}_moe").layers(geometry)
        except (ImportError, RuntimeError, ValueError, AssertionError) as error:
            print(f"no {name} for {geometry.model} TP {geometry.tp}: {type(error).__name__}: {error}", flush=True)
    return made


def time_row(geometry: Geometry, tokens: int, made: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """One row."""
    routing = random_routing(geometry, tokens)
    hidden = torch.randn(tokens, geometry.hidden, device="cuda", dtype=torch.bfloat16)

    def caller(layers: list[Any]) -> Callable[[int], Any]:
        return lambda i: layers[i % len(layers)](hidden, routing.ids[i % CALLS], routing.weights[i % CALLS])

    calls, started = {}, {}
    for name, layers in made.items():
        call = caller(layers)
        try:
            started[name] = launches(lambda call=call: call(0))  # type: ignore[misc]
        except (RuntimeError, ValueError, AssertionError) as error:
            print(f"no {name} for M={tokens}: {type(error).__name__}: {error}", flush=True)
            continue
        calls[name] = call
    active = routing.active()
    megabytes = active * geometry.expert_bytes * 1e-6
    row: dict[str, Any] = {
        "model": geometry.model, "TP": geometry.tp, "E": geometry.experts, "top_k": geometry.top_k,
        "H": geometry.hidden, "I": geometry.inner, "M": tokens, "experts": active, "MB": megabytes,
        "layers": geometry.layers, "launches": started,
    }  # fmt: skip
    row["us"] = interleaved_microseconds(calls, CALLS)
    row["share"] = {name: megabytes / microseconds / bandwidth for name, microseconds in row["us"].items()}
    if "ours" in row["us"]:
        row["ratio"] = {n: v / row["us"]["ours"] for n, v in row["us"].items() if n != "ours"}
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric means of the ratios for few tokens: by peer, and over the fastest peer of each row."""
    few = [row["ratio"] for row in rows if row["M"] <= FEW and row.get("ratio")]
    ratios: dict[str, list[float]] = {"fastest peer": [min(ratio.values()) for ratio in few]}
    for ratio in few:
        for name, value in ratio.items():
            ratios.setdefault(name, []).append(value)
    return {
        name: {
            "geometric_mean": math.exp(sum(map(math.log, found)) / len(found)),
            "least": min(found),
            "rows": len(found),
        }
        for name, found in ratios.items()
        if found
    }


def rounded(value: Any) -> Any:
    """Floats to three digits behind the point, for reading."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    head = ["model", "TP", "I", "M", "MB", *(f"{name} us" for name in names), "share", "launches", "of fastest peer"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        times = [f"{row['us'][name]:.1f}" if name in row["us"] else "–" for name in names]
        ratio = min(row.get("ratio", {}).values(), default=None)
        cells = [row["model"], row["TP"], row["I"], row["M"], f"{row['MB']:.1f}", *times]
        cells += [f"{row['share'].get('ours', 0):.0%}", row["launches"].get("ours", "–")]
        cells += [f"{ratio:.2f}" if ratio is not None else "–"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", help="compiled kernels; made now if left out")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["marlin"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from benchmarks.peers import ours_moe

    ours_moe.use_library(args.library)
    bandwidth = read_bandwidth()
    header = {"card": torch.cuda.get_device_name(), "read_TBps": bandwidth, "rotated_bytes": ROTATED_BYTES}
    print(json.dumps(rounded(header)), flush=True)
    rows: list[dict[str, Any]] = []
    for geometry in geometries(args.models, args.tp):
        made = make_contenders(["ours", *args.peers], geometry)
        for tokens in args.tokens:
            rows.append(time_row(geometry, tokens, made, bandwidth))
            print(json.dumps(rounded(rows[-1])), flush=True)
            if args.json:  # what is measured stays, whatever ends the run
                args.json.write_text(json.dumps({**header, "rows": rows, "summary": summary(rows)}, indent=1))
        del made
        torch.cuda.empty_cache()
    print(table(rows))
    print(json.dumps(rounded(summary(rows))), flush=True)


if __name__ == "__main__":
    main()
