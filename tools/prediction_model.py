"""What a decode step takes on cards that nobody measured: a sum of terms with a fast and a slow end.

step = bytes / (share of bandwidth x data sheet) + GEMMs x fixed cost + layers with experts x fixed cost
       + other kernels x their time + all-reduces x latency

Bytes and counts are those of ``sglang-sm120 explain``. Every other number has its source beside it: a file of this
repository, a public thread, or the word "assumed". Nothing here is a measurement on SM12x.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from sglang_sm120.cards import find_card
from sglang_sm120.models import budget
from sglang_sm120.models.architecture import Model, read_model
from sglang_sm120.models.budget import Setup, Use
from sglang_sm120.models.explain import DRAFT_STEPS, VERIFIED_TOKENS
from sglang_sm120.models.layer import Layer
from sglang_sm120.models.quantization import Quantization, read_quantization
from sglang_sm120.models.source import ModelSource, load_source

ROOT = Path(__file__).resolve().parents[1]
#: The server whose profile gives the time of kernels that are no GEMM.
SERVING = "results/serving_dense_nvidia_h200.json"
#: 1628 of 1792 GB/s in a read sweep on an RTX 5090 (kekzl/imp#1797).
BANDWIDTH_SHARE = 1628 / 1792
#: (N, K, µs) of FlashInfer's b12x GEMM with one token on an RTX 5090 (flashinfer#3051).
PUBLIC_GEMMS = ((512, 7168, 13.7), (7168, 5120, 19.6), (8192, 4096, 16.4), (8192, 7168, 26.9))
#: µs of FlashInfer's b12x experts, Qwen3.6-35B-A3B, one token, RTX PRO 6000 Server (flashinfer#5099), and their MB.
PUBLIC_EXPERTS_US, PUBLIC_EXPERTS_MB = 27.7, 8 * 3 * 2048 * 512 * 0.5625 / 1e6
#: Bytes to µs: a one-shot kernel and NCCL, eight RTX PRO 6000 behind switches (rtx6kpro, hardware/pcie-bandwidth.md).
ONE_SHOT = ((256, 7.5), (1024, 7.5), (8192, 9.2), (32768, 16.5), (65536, 25.9), (262144, 73.6))
NCCL = ((256, 24.6), (1024, 24.1), (8192, 24.2), (32768, 24.5), (65536, 24.1), (262144, 28.0))
#: Bus bandwidth of NCCL there and, without tuning, on two CPUs without switches (same page), GB/s.
BUS_FAST, BUS_SLOW = 41.1, 22.2
#: NCCL for 4 KB on 8x RTX 6000D (sglang#32479), µs.
NCCL_SLOW_US = 45.0
#: Kernels of a layer that ``explain`` does not count (norms, rotary, activation, cache, second half of attention): as
#: many as the dense server on the H200 ran, and for the slow end an assumption for gates, casts and copies.
UNCOUNTED_FAST, UNCOUNTED_SLOW = 7, 12
#: 1 + how often the first, second and third draft were accepted (vLLM, Qwen3.5-397B; rtx6kpro models/qwen35-397b.md).
ACCEPTED = 1 + 0.85 + 0.67 + 0.51


@dataclass(frozen=True)
class Ends:
    """A number at the fast and at the slow end."""

    fast: float
    slow: float

    def __add__(self, other: Ends) -> Ends:
        return Ends(self.fast + other.fast, self.slow + other.slow)

    def times(self, factor: float) -> Ends:
        return Ends(self.fast * factor, self.slow * factor)

    def inverse(self) -> Ends:
        """Rates of times, or times of rates."""
        return Ends(1 / self.fast, 1 / self.slow)


@dataclass(frozen=True)
class Term:
    """One summand of a step: how it is computed, in words, and milliseconds."""

    name: str
    arithmetic: str
    ms: Ends


@dataclass(frozen=True)
class Case:
    """A model as it is served, and the card."""

    checkpoint: str
    card: str
    tp: int = 1
    batch: int = 1
    speculative: bool = False
    context: int = 4096

    @property
    def name(self) -> str:
        cards = f"{self.tp} x " if self.tp > 1 else ""
        requests = f"{self.batch} request{'s' if self.batch > 1 else ''}"
        return f"{self.checkpoint.split('/')[1]}, {cards}{self.card}, {requests}{', MTP' if self.speculative else ''}"


def read_record(path: str) -> dict[str, Any]:
    """One JSON file of the repository."""
    record: dict[str, Any] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return record


def intercept(points: Sequence[tuple[float, float]]) -> float:
    """Where the least-squares line through (x, y) meets x = 0."""
    return statistics.linear_regression(*zip(*points, strict=True)).intercept


@cache
def gemm_us() -> Ends:
    """µs of a GEMM on top of its bytes. Fast: our load path in a chain on an H200; slow: b12x on an RTX 5090."""
    rows = [row for row in read_record("benchmarks/gemm_h200.json")["rows"] if row["M"] == 1]
    fast = intercept([(row["MB"], row["load_path_pdl"]) for row in rows])
    bandwidth = BANDWIDTH_SHARE * find_card("rtx-5090").bandwidth_gb_s
    slow = statistics.median(us - n * k * 0.5625 / bandwidth / 1e3 for n, k, us in PUBLIC_GEMMS)
    return Ends(fast, slow)


@cache
def experts_us() -> Ends:
    """µs of a layer's routed experts on top of their bytes. Fast: two launches like a GEMM; slow: b12x."""
    bandwidth = BANDWIDTH_SHARE * find_card("rtx-pro-6000-server").bandwidth_gb_s
    return Ends(2 * gemm_us().fast, PUBLIC_EXPERTS_US - PUBLIC_EXPERTS_MB / bandwidth * 1e3)


def own_experts_us() -> float:
    """µs of our experts on the H200 beyond their bytes at that run's bandwidth: 397B on 8 ranks, one token."""
    record = read_record("benchmarks/moe_h200.json")
    row = next(r for r in record["rows"] if (r["model"], r["TP"], r["M"]) == ("qwen3.5-397b-a17b", 8, 1))
    return float(row["us"]["ours"] - row["MB"] / record["read_TBps"])


@cache
def small_us() -> Ends:
    """µs of a kernel that is no GEMM: the shortest and the longest kind but attention, in the server on the H200."""
    record = read_record(SERVING)
    layers = record["model"]["layers"]
    times = {kernel["name"]: kernel["us_per_step"] for kernel in record["profiles"]["sm120"]["1"]["kernels"]}

    def of(part: str, calls: int) -> float:
        return float(next(us for name, us in times.items() if part in name)) / calls

    return Ends(of("act_and_mul_kernel", layers), of("FusedAddRMSNormKernel", 2 * layers))


def all_reduce_us(size: float, ranks: int) -> Ends:
    """µs of an all-reduce of ``size`` bytes. Fast: the better kernel behind switches; slow: NCCL, 45 µs and a ring."""
    ring = 2 * (ranks - 1) / ranks
    largest = NCCL[-1][0]
    fast = min(_between(ONE_SHOT, size), _between(NCCL, size)) + ring * max(0, size - largest) / BUS_FAST / 1e3
    return Ends(fast, NCCL_SLOW_US + ring * size / BUS_SLOW / 1e3)


def _between(points: Sequence[tuple[int, float]], x: float) -> float:
    """Linear between the points, constant outside."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


@cache
def _read(checkpoint: str) -> tuple[Model, Quantization]:
    """A preset, or the dense Qwen3 model that a file of ``results/`` was measured with."""
    source = _measured(checkpoint) if checkpoint.startswith("results/") else load_source(checkpoint)
    return read_model(source), read_quantization(source.quantization)


def _measured(path: str) -> ModelSource:
    model = read_record(path)["model"]
    config = {
        "model_type": "qwen3",
        "hidden_size": model["hidden"],
        "intermediate_size": model["intermediate"],
        "num_hidden_layers": model["layers"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"],
        "head_dim": model["head_dim"],
        "vocab_size": model["vocab"],
        "tie_word_embeddings": False,
    }
    return ModelSource(path, "preset", config, {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]})


def terms(case: Case) -> tuple[Term, ...]:
    """The terms of one step, or with multi-token prediction of one verification and its drafts."""
    model, quantization = _read(case.checkpoint)
    setup = Setup(case.tp, 1, case.batch, case.context, kv_bytes=1 if quantization.kv_cache_fp8 else 2)
    rows = replace(setup, batch=case.batch * VERIFIED_TOKENS) if case.speculative else setup
    kept = budget.kv_traffic(model, setup) + budget.state_traffic(model, rows)
    found = _pass(budget.step(model, quantization, rows), model.layers, kept, case, rows)
    if not case.speculative or model.draft is None:
        return found
    drafts = _pass(budget.draft_step(model, quantization, setup), model.draft.layers[:1], 0, case, setup)
    total = sum((term.ms for term in drafts), Ends(0, 0)).times(DRAFT_STEPS)
    one = " + ".join(term.arithmetic for term in drafts)
    return (*found, Term(f"{DRAFT_STEPS} drafts", f"{DRAFT_STEPS} x ({one})", total))


def _pass(uses: Sequence[Use], layers: Sequence[Layer], kept: float, case: Case, setup: Setup) -> tuple[Term, ...]:
    bandwidth = find_card(case.card).bandwidth_gb_s
    size = sum(use.bytes for use in uses) + kept
    gemms = sum(use.count for use in uses if not use.gemm.is_expert)
    experts = sum(any(gemm.is_expert for gemm in layer.gemms) for layer in layers)
    counted = _counted(uses, layers)
    other = Ends(*(counted + uncounted * len(layers) for uncounted in (UNCOUNTED_FAST, UNCOUNTED_SLOW)))
    small = small_us()
    found = [
        Term(
            "bytes",
            f"{size / 1e9:.2f} GB / ({BANDWIDTH_SHARE:.2f} x {bandwidth:.0f} GB/s)",
            Ends(*[size / (BANDWIDTH_SHARE * bandwidth) / 1e6] * 2),
        ),
        _each("dense GEMMs", gemms, gemm_us()),
        _each("routed experts", experts, experts_us()),
        Term(
            "other kernels",
            f"{other.fast:.0f} – {other.slow:.0f} x {small.fast:.2f} – {small.slow:.2f} µs",
            Ends(other.fast * small.fast / 1e3, other.slow * small.slow / 1e3),
        ),
    ]
    if case.tp > 1:
        model = _read(case.checkpoint)[0]
        # After the embedding, and after attention and feed-forward of every layer.
        found.append(_each("all-reduces", 1 + 2 * len(layers), all_reduce_us(model.hidden * 2 * setup.batch, case.tp)))
    return tuple(term for term in found if term.ms.slow)


def _counted(uses: Iterable[Use], layers: Iterable[Layer]) -> int:
    """What ``budget.launches`` counts beside GEMMs; the input of experts is quantized inside their launches."""
    quantizers = sum(use.launches - use.count for use in uses if not use.gemm.is_expert)
    return quantizers + sum(layer.launches + any(gemm.is_expert for gemm in layer.gemms) for layer in layers)


def _each(name: str, count: int, us: Ends) -> Term:
    return Term(name, f"{count} x {us.fast:.1f} – {us.slow:.1f} µs", us.times(count / 1e3))


def step_ms(found: Iterable[Term]) -> Ends:
    """Sum of the terms."""
    return sum((term.ms for term in found), Ends(0, 0))


def tokens_per_s(case: Case) -> Ends:
    """Output tokens per second of all requests together; the fast end is the larger number."""
    ms = step_ms(terms(case))
    tokens = case.batch * (ACCEPTED if case.speculative else 1) * 1e3
    return Ends(tokens / ms.fast, tokens / ms.slow)
