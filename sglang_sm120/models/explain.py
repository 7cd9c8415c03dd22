"""The content of ``sglang-sm120 explain``: where the time of one decode step goes, and which flag can change it.

Every time here is predicted: bytes divided by the bandwidth of the card's data sheet. A real step is slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_sm120.cards import Card
from sglang_sm120.models import budget
from sglang_sm120.models.architecture import Model
from sglang_sm120.models.budget import Setup, Use
from sglang_sm120.models.quantization import FP4_FORMATS, Format, Quantization
from sglang_sm120.models.source import ModelSource

SCHEMA = 1
#: Steps and tokens of the speculative setting that the prediction is made for; serve-args recommends the same.
DRAFT_STEPS, VERIFIED_TOKENS = 3, 4
#: What NCCL took for an all-reduce of 4 KB on eight cards that are joined by PCIe only.
_REPORTED_ALL_REDUCE_US, _REPORTED_BY = 45, "sglang#32479, 8x RTX 6000D"

FORMAT_NAMES: Mapping[Format, str] = {
    "nvfp4": "NVFP4",
    "nvfp4_w4a16": "NVFP4, weights only",
    "fp8": "FP8",
    "mxfp8": "MXFP8",
    "mxfp4": "MXFP4",
    "int4": "INT4",
    "int8": "INT8",
    "bf16": "BF16",
}


@dataclass(frozen=True)
class Flag:
    """One flag of SGLang, and what it can do for a bar."""

    name: str
    can: str
    cannot: str


#: The flags that people turn, in the order in which they are shown.
FLAGS: tuple[Flag, ...] = (
    Flag("--fp4-gemm-backend", "the kernel of dense NVFP4 layers", "routed experts, and any layer that is not NVFP4"),
    Flag("--moe-runner-backend", "the kernel of the routed experts", "dense layers, shared experts included"),
    Flag("--fp8-gemm-backend", "the kernel of dense FP8 layers", "layers of another format"),
    Flag("--kv-cache-dtype", "the bytes of keys and values", "weights"),
    Flag("--attention-backend", "the kernel that reads keys and values", "projections before and after it"),
    Flag("--mamba-ssm-dtype", "the bytes of the recurrent state", "weights"),
    Flag("--speculative-algorithm", "how many tokens share one reading of the weights", "the bytes of one step"),
    Flag("--speculative-moe-runner-backend", "the kernel of the draft's experts", "the target model"),
    Flag("--tp-size", "the bytes of each rank", "the number of launches and all-reduces"),
)


@dataclass(frozen=True)
class Bar:
    """One kind of bytes in a step, per rank. ``changed_by`` names flags that change its time."""

    name: str
    format: str
    bytes: float
    changed_by: tuple[str, ...]


def explain(source: ModelSource, model: Model, quantization: Quantization, card: Card, setup: Setup) -> dict[str, Any]:
    """Describe one decode step as plain data; sizes are bytes per rank, times milliseconds.

    Raises:
        ConfigError: the ranks cannot share the model.
    """
    uses = budget.step(model, quantization, setup)
    bars = _bars(model, uses, setup)
    total = sum(bar.bytes for bar in bars)
    weights = sum(use.bytes for use in uses)
    fp4 = sum(use.bytes for use in uses if use.format in FP4_FORMATS)
    floor = _ms(total, card)
    return {
        "schema": SCHEMA,
        "predicted": True,
        "model": {
            "name": source.label,
            "type": model.model_type,
            "origin": source.origin,
            "quantization": quantization.method,
            "layers": len(model.layers),
            "experts": model.experts,
            "experts_per_token": model.top_k,
            "sources": list(source.sources),
        },
        "card": {
            "key": card.key,
            "name": card.name,
            "bandwidth_gb_s": card.bandwidth_gb_s,
            "sources": list(card.sources),
        },
        "setup": {
            "tp": setup.tp,
            "ep": setup.ep,
            "batch": setup.batch,
            "context": setup.context,
            "kv_bytes": setup.kv_bytes,
        },
        "bars": [
            {
                "name": bar.name,
                "format": bar.format,
                "bytes": round(bar.bytes),
                "ms": _ms(bar.bytes, card),
                "share": bar.bytes / total,
                "changed_by": list(bar.changed_by),
            }
            for bar in bars
        ],
        "weights": {"fp4_bytes": round(fp4), "other_bytes": round(weights - fp4), "by_format": _by_format(uses)},
        "resident_bytes": round(budget.resident_bytes(model, quantization, setup)),
        "floor_ms": floor,
        "tokens_per_s": setup.batch / floor * 1e3,
        "gemms": [_gemm(use) for use in uses],
        "launches": budget.launches(model, uses),
        "all_reduces": {"count": budget.all_reduces(model, setup.tp), "bytes": model.hidden * 2 * setup.batch},
        "flags": _flags(model, bars, total),
        "speculative": _speculative(model, quantization, setup, total, card),
        "notes": _notes(model, uses, setup, card, floor),
    }


def _bars(model: Model, uses: Iterable[Use], setup: Setup) -> list[Bar]:
    sums: dict[tuple[str, Format], float] = {}
    for use in uses:
        sums[use.gemm.part, use.format] = sums.get((use.gemm.part, use.format), 0) + use.bytes
    bars = [Bar(part, FORMAT_NAMES[layout], size, _levers(part, layout)) for (part, layout), size in sums.items()]
    kv = budget.kv_traffic(model, setup)
    if kv:
        name = "latents of the context" if model.memory.latent else "keys and values"
        flags = ("--kv-cache-dtype", "--attention-backend")
        bars.append(Bar(name, "FP8" if setup.kv_bytes == 1 else "BF16", kv, flags))
    state = budget.state_traffic(model, setup)
    if state:
        layout = "FP32" if model.memory.state_bytes == 4 else "BF16"
        bars.append(Bar("recurrent state", layout, state, ("--mamba-ssm-dtype",)))
    return sorted(bars, key=lambda bar: -bar.bytes)


def _levers(part: str, layout: Format) -> tuple[str, ...]:
    if part == "routed experts":
        return ("--moe-runner-backend",)
    if layout in FP4_FORMATS:
        return ("--fp4-gemm-backend",)
    return ("--fp8-gemm-backend",) if layout == "fp8" else ()


def _by_format(uses: Iterable[Use]) -> dict[str, int]:
    sums: dict[str, float] = {}
    for use in uses:
        sums[use.format] = sums.get(use.format, 0) + use.bytes
    return {layout: round(size) for layout, size in sums.items()}


def _gemm(use: Use) -> dict[str, Any]:
    return {
        "name": use.gemm.name,
        "part": use.gemm.part,
        "n": use.n,
        "k": use.k,
        "format": use.format,
        "layers": use.count,
        "per_layer": round(use.per_layer, 3),
        "bytes": round(use.bytes),
    }


def _flags(model: Model, bars: Iterable[Bar], total: float) -> list[dict[str, Any]]:
    """Say for every flag which share of the bytes it can reach; a flag that reaches nothing is a no-op."""
    bars = tuple(bars)
    found = []
    for flag in FLAGS:
        reached = [bar for bar in bars if flag.name in bar.changed_by]
        share = sum(bar.bytes for bar in reached) / total
        everything = flag.name in ("--speculative-algorithm", "--tp-size")
        drafts = model.draft is not None and model.draft.served
        if flag.name.startswith("--speculative") and not drafts:
            continue
        if flag.name == "--speculative-moe-runner-backend" and not model.experts:
            continue
        if flag.name == "--mamba-ssm-dtype" and not reached:
            continue
        draft_only = flag.name == "--speculative-moe-runner-backend"
        found.append(
            {
                "flag": flag.name,
                "share": 1.0 if everything else share,
                "no_op": not reached and not everything and not draft_only,
                "bars": [f"{bar.name} ({bar.format})" for bar in reached],
                "can_change": flag.can,
                "cannot_change": flag.cannot,
            }
        )
    return found


def _speculative(
    model: Model, quantization: Quantization, setup: Setup, plain: float, card: Card
) -> dict[str, Any] | None:
    """Predict a step with multi-token prediction: three drafts, then four tokens verified at once.

    More tokens take more distinct experts, so verification reads more than a plain step. ``break_even`` is how many
    tokens must be accepted on average (the free one included) for it to pay.
    """
    if model.draft is None:
        return None
    if not model.draft.served:
        return {"served": False, "why_not": model.draft.why_not}
    rows = replace(setup, batch=setup.batch * VERIFIED_TOKENS)
    verified = sum(use.bytes for use in budget.step(model, quantization, rows))
    verified += budget.kv_traffic(model, setup) + budget.state_traffic(model, rows)
    drafted = DRAFT_STEPS * sum(use.bytes for use in budget.draft_step(model, quantization, setup))
    both = verified + drafted
    return {
        "served": True,
        "steps": DRAFT_STEPS,
        "verified_tokens": VERIFIED_TOKENS,
        "verify_bytes": round(verified),
        "draft_bytes": round(drafted),
        "floor_ms": _ms(both, card),
        "break_even": both / plain,
        "tokens_per_s_if_all_accepted": setup.batch * VERIFIED_TOKENS / _ms(both, card) * 1e3,
    }


def _notes(model: Model, uses: tuple[Use, ...], setup: Setup, card: Card, floor: float) -> list[str]:
    dense, experts = budget.fp4_parts(uses)
    notes = []
    if experts and not dense:
        notes.append(
            "Only the routed experts are FP4: --fp4-gemm-backend has no layer to serve and changes nothing. "
            "--moe-runner-backend does."
        )
    elif not experts and not dense:
        notes.append("No layer is NVFP4: neither --fp4-gemm-backend nor an NVFP4 MoE runner changes anything.")
    if any(use.format == "nvfp4_w4a16" and not use.gemm.is_expert for use in uses):
        notes.append(
            "Some dense layers have FP4 weights and 16-bit activations: FlashInfer's values of --fp4-gemm-backend "
            "leave them to SGLang's own weight-only path."
        )
    reduces = budget.all_reduces(model, setup.tp)
    if reduces and card.is_sm12x:
        waiting = reduces * _REPORTED_ALL_REDUCE_US / 1e3
        notes.append(
            f"{reduces} all-reduces per step are outside the floor. At {_REPORTED_ALL_REDUCE_US} µs each (reported for "
            f"4 KB over NCCL and PCIe: {_REPORTED_BY}) they would take {waiting:.1f} ms, {waiting / floor:.1f} times "
            "the floor; measure yours."
        )
    if setup.batch > 64:
        notes.append("At this batch arithmetic counts as well; the floor is of the memory alone.")
    if card.fp4_tflops is None and (dense or experts):
        notes.append(f"{card.name} has no FP4 instructions: NVFP4 weights are decoded, activations stay in 16 bit.")
    return notes


def _ms(size: float, card: Card) -> float:
    return size / card.bandwidth_gb_s / 1e6
