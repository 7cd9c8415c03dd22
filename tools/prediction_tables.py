"""The tables of ``docs/predictions.md``: terms, arithmetic, predicted rates beside public figures, checks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_sm120.cards import find_card
from tools import prediction_model as model
from tools.prediction_model import Case, Ends, Term
from tools.result_tables import table

_SEED = Case("nvidia/Qwen3.5-397B-A17B-NVFP4", "rtx-pro-6000", tp=8)
_MOE = Case("nvidia/Qwen3.6-35B-A3B-NVFP4", "rtx-pro-6000")
_DENSE = Case("nvidia/Qwen3.8-27B-NVFP4", "rtx-pro-6000")


@dataclass(frozen=True)
class Figure:
    """A rate that somebody published, output tokens per second."""

    rate: float
    where: str


_REPORT = "an engineer's public report (SGLang, eight cards)"
_WIKI = "rtx6kpro models/qwen35-397b.md"
#: What is predicted, and what others report of nearly the same.
COMPARED: tuple[tuple[Case, tuple[Figure, ...]], ...] = (
    (_SEED, (Figure(72, _REPORT),)),
    (
        replace(_SEED, speculative=True),
        (Figure(172, _REPORT), Figure(350, f"{_WIKI}: peak, expert-parallel over 8, patched, own all-reduce")),
    ),
    (replace(_SEED, batch=32), ()),
    (replace(_SEED, batch=64), (Figure(2100, f"{_REPORT}: 2100+, requests and MTP not stated"),)),
    (
        replace(_SEED, tp=4),
        (
            Figure(85.8, f"{_WIKI}: vLLM"),
            Figure(50.5, "discussion 7 of the checkpoint: vLLM, Marlin, WSL2"),
            Figure(42, f"{_WIKI}: SGLang, 42 to 51"),
        ),
    ),
    (
        replace(_SEED, tp=4, speculative=True),
        (
            Figure(130, f"{_WIKI}: vLLM, two drafts"),
            Figure(110.5, "rtx6kpro benchmarks/inference-throughput: SGLang, five drafts, Server Edition"),
        ),
    ),
    (replace(_SEED, tp=4, batch=32), (Figure(605.9, f"{_WIKI}: vLLM"),)),
    (
        _MOE,
        (
            Figure(168, "lna-lab/blackwell-geforce-nvfp4-gemm: vLLM"),
            Figure(256, "club-3090#621: vLLM 0.24, RTX 5090"),
            Figure(244.7, "kekzl/imp#479: own engine, RTX 5090"),
        ),
    ),
    (replace(_MOE, speculative=True), ()),
    (_DENSE, (Figure(87.4, "kekzl/imp#1797: own engine, RTX 5090, 14.5 GB a token"),)),
    (
        replace(_DENSE, speculative=True),
        (Figure(141, "xinfer#481: SGLang, three drafts, about half of them accepted"),),
    ),
)


def verdict(rate: float, predicted: Ends) -> str:
    """Where a reported rate lies in what is predicted."""
    if rate < predicted.slow:
        return f"{1 - rate / predicted.slow:.0%} below the slow end"
    if rate > predicted.fast:
        return f"{rate / predicted.fast - 1:.0%} above the fast end"
    return "inside"


def _ms(ends: Ends) -> str:
    same = f"{ends.fast:.2f}" == f"{ends.slow:.2f}"
    return f"{ends.fast:.2f}" if same else f"{ends.fast:.2f} – {ends.slow:.2f}"


def term_table() -> str:
    """Every number of the model that is no count of bytes or kernels, with both sources."""
    gemm, experts, small = model.gemm_us(), model.experts_us(), model.small_us()
    reduce = model.all_reduce_us(8192, 8)
    rows = [
        [
            "share of the data sheet's bandwidth",
            f"{model.BANDWIDTH_SHARE:.2f}",
            f"{model.BANDWIDTH_SHARE:.2f}",
            "read sweep on an RTX 5090, 1628 of 1792 GB/s (kekzl/imp#1797)",
            "the same",
        ],
        [
            "dense GEMM, on top of its bytes, µs",
            f"{gemm.fast:.1f}",
            f"{gemm.slow:.1f}",
            "`benchmarks/gemm_h200.json`: time of our load path in a chain against MB, M = 1, where the line meets "
            "0 MB; assumed to hold on SM12x and for BF16 and FP8 too",
            "b12x with one token on an RTX 5090 (flashinfer#3051), less the bytes: "
            f"median of {len(model.PUBLIC_GEMMS)}",
        ],
        [
            "routed experts of a layer, on top of their bytes, µs",
            f"{experts.fast:.1f}",
            f"{experts.slow:.1f}",
            "two launches, each like a dense GEMM: a hope, ours on the H200 takes "
            f"{model.own_experts_us():.1f} µs more than its bytes, decoding included (`benchmarks/moe_h200.json`)",
            f"b12x, {model.PUBLIC_EXPERTS_US} µs for {model.PUBLIC_EXPERTS_MB:.1f} MB on an RTX PRO 6000 Server "
            "(flashinfer#5099), less the bytes",
        ],
        [
            "another kernel, µs",
            f"{small.fast:.2f}",
            f"{small.slow:.2f}",
            f"activation in the profile of `{model.SERVING}`",
            "norm in the same profile",
        ],
        [
            "kernels of a layer that `explain` does not count",
            str(model.UNCOUNTED_FAST),
            str(model.UNCOUNTED_SLOW),
            "two norms, norm of q and k, rotary, cache, activation, second half of attention: the server on the H200",
            "assumed: gates, casts and copies of experts and delta net",
        ],
        [
            "all-reduce of 8 KiB, µs",
            f"{reduce.fast:.1f}",
            f"{reduce.slow:.1f}",
            "one-shot kernel, eight RTX PRO 6000 behind switches (rtx6kpro hardware/pcie-bandwidth.md); for larger "
            "sizes the better of it and NCCL there",
            "NCCL, 45 µs for 4 KB (sglang#32479, 8x RTX 6000D); for larger sizes plus a ring at "
            f"{model.BUS_SLOW} GB/s (rtx6kpro, untuned)",
        ],
        [
            "tokens of a step with MTP",
            f"{model.ACCEPTED:.2f}",
            f"{model.ACCEPTED:.2f}",
            "1 + 0.85 + 0.67 + 0.51, the drafts that vLLM accepted of this model (rtx6kpro models/qwen35-397b.md)",
            "the same; assumed for the other two models",
        ],
    ]
    return table(["number", "fast", "slow", "source of the fast end", "source of the slow end"], rows)


def arithmetic() -> str:
    """Each step of the arithmetic for the three models, one request, without and with multi-token prediction."""
    parts = []
    for case in (_SEED, _MOE, _DENSE):
        for shown in (case, replace(case, speculative=True)):
            found = model.terms(shown)
            rows = [[term.name, term.arithmetic, _ms(term.ms)] for term in found]
            total = model.step_ms(found)
            tokens = f"{model.ACCEPTED:.2f}" if shown.speculative else "1"
            rate = model.tokens_per_s(shown)
            rows.append(["**step**", "sum", f"**{_ms(total)}**"])
            rows.append(
                ["**tokens/s**", f"{tokens} / step", f"**{rate.slow:.0f} – {rate.fast:.0f}**, predicted"],
            )
            parts.append(f"\n**{shown.name}**\n\n" + table(["term", "arithmetic", "ms"], rows))
    return "".join(parts) + "\n"


def rates() -> str:
    """Predicted rates beside public ones."""
    rows = []
    for case, figures in COMPARED:
        predicted, step = model.tokens_per_s(case), model.step_ms(model.terms(case))
        head = [case.name, _ms(step), f"{predicted.slow:.0f} – {predicted.fast:.0f}"]
        if not figures:
            rows.append([*head, "–", "none known", "", ""])
        for number, figure in enumerate(figures):
            cells = head if number == 0 else ["", "", ""]
            implied = f"{figure.rate * step.fast / 1e3:.2f} – {figure.rate * step.slow / 1e3:.2f}"
            lies = verdict(figure.rate, predicted)
            rows.append([*cells, f"{figure.rate:g}", figure.where, lies, implied if case.speculative else ""])
    head = ["served", "step, ms", "tokens/s, predicted", "reported", "by", "it lies", "tokens a step it implies"]
    return table(head, rows)


def levers() -> str:
    """What one term is worth: the rate when it alone is as in the other end."""
    rows = []
    for case in (_SEED, replace(_SEED, speculative=True), _MOE, _DENSE):
        found = model.terms(case)
        total = model.step_ms(found)
        for term in found:
            if term.ms.slow > term.ms.fast and "drafts" not in term.name:
                gain = term.ms.slow - term.ms.fast
                rows.append(
                    [
                        case.name,
                        term.name,
                        _ms(term.ms),
                        f"{total.slow / (total.slow - gain) - 1:+.0%}",
                        f"{total.fast / (total.fast + gain) - 1:+.0%}",
                    ]
                )
    return table(["served", "term", "ms", "alone fast, all else slow", "alone slow, all else fast"], rows)


def check_h200() -> str:
    """Do times of kernels add up to a step? On the card where both were measured."""
    record = model.read_record(model.SERVING)
    profile = record["profiles"]["sm120"]["1"]
    layers = record["model"]["layers"]
    busy = profile["step_us"] * (1 - profile["shares"]["no kernel runs"])
    served = profile["step_us"] * profile["shares"]["FP4 GEMM"]
    alone = {
        (row["N"], row["K"]): row["pdl"]
        for row in model.read_record("benchmarks/gemm_h200_marlin.json")["rows"]
        if row["M"] == 1
    }
    qkv = (alone[4096, 4096] + alone[8192, 4096]) / 2
    layer = qkv + alone[4096, 4096] + alone[24576, 4096] + alone[4096, 12288]
    measured = next(
        row["per_token_ms"]["median"]
        for row in record["rows"]
        if (row["concurrency"], row["contender"]) == (1, "sm120")
    )
    added = (layer * layers + busy - served) / 1e3
    rows = [
        ["FP4 GEMMs, each timed alone in a chain", f"{layers} x {layer:.1f} µs", f"{layer * layers / 1e3:.2f}"],
        ["FP4 GEMMs in the server, profiled", "", f"{served / 1e3:.2f}"],
        ["all other kernels in the server, profiled", "", f"{(busy - served) / 1e3:.2f}"],
        ["**GEMMs alone + other kernels**", "", f"**{added:.2f}**"],
        ["**measured per token, without profiler**", f"{added / measured - 1:+.0%} added up", f"**{measured:.2f}**"],
    ]
    return table(["Qwen3-8B geometry, one request, H200", "", "ms"], rows)


def check_model() -> str:
    """The model's own sum for the server on the H200, beside what that server and SGLang's Marlin measured."""
    record = model.read_record(model.SERVING)
    measured = {(row["concurrency"], row["contender"]): row["per_token_ms"]["median"] for row in record["rows"]}
    context = record["load"]["input_tokens"] + record["load"]["output_tokens"] // 2
    rows = []
    for batch in sorted({concurrency for concurrency, _ in measured}):
        predicted = model.step_ms(model.terms(Case(model.SERVING, "h200", batch=batch, context=context)))
        cells = [str(batch), _ms(predicted)]
        for contender in ("sm120", "marlin"):
            found = measured.get((batch, contender))
            cells += ["", ""] if found is None else [f"{found:.2f}", verdict(1 / found, predicted.inverse())]
        rows.append(cells)
    head = ["requests", "predicted, ms", "`sm120`, measured", "rate lies", "`marlin`, measured", "rate lies"]
    return table(head, rows)


def check_5090() -> str:
    """The terms with the bytes of another engine, beside its own account of its step (kekzl/imp#1797)."""
    bytes_gb, step_ms, gemv_ms, tail_ms, host_ms = 14.5, 1e3 / 87.4, 9.69, 2.66, 0.44
    found: dict[str, Term] = {term.name: term for term in model.terms(replace(_DENSE, card="rtx-5090"))}
    read = bytes_gb / (model.BANDWIDTH_SHARE * find_card("rtx-5090").bandwidth_gb_s) * 1e3
    gemms, others = found["dense GEMMs"].ms, found["other kernels"].ms
    total = gemms + others + Ends(read, read)
    rows = [
        ["bytes", f"{read:.2f}", f"{read:.2f} (their 14.5 GB at their 1628 GB/s)"],
        ["GEMMs beyond that", _ms(gemms), f"{gemv_ms - read:.2f}"],
        ["other kernels", _ms(others), f"{tail_ms - host_ms:.2f}, and {host_ms} of the host"],
        ["step", _ms(total), f"{step_ms:.2f} (87.4 tokens/s)"],
    ]
    return table(["Qwen3.8-27B, one request, RTX 5090, ms", "predicted", "reported"], rows)
