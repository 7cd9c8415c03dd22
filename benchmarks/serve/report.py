"""Medians of a comparison, its table and its plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.serve.client import Burst

#: What is measured: field, heading, digits.
MEASURES = (("tokens_per_s", "output tok/s", 1), ("ttft_ms", "TTFT ms", 1), ("per_token_ms", "ms per token", 2))


@dataclass(frozen=True)
class Sample:
    """One burst of one contender."""

    contender: str
    concurrency: int
    repeat: int
    burst: Burst

    def values(self) -> dict[str, float]:
        """What this burst says: its rate, and the medians over its requests."""
        good = [answer for answer in self.burst.answers if not answer.error]
        return {
            "tokens_per_s": self.burst.tokens_per_s,
            "ttft_ms": 1e3 * statistics.median([answer.first_s for answer in good]) if good else 0.0,
            "per_token_ms": 1e3 * statistics.median([answer.per_token_s for answer in good]) if good else 0.0,
        }


def rows(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """One row for each concurrency and contender: median, smallest and largest over the repeats."""
    grouped: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        grouped.setdefault((sample.concurrency, sample.contender), []).append(sample)
    return [_row(*key, found) for key, found in sorted(grouped.items(), key=lambda item: item[0][0])]


def _row(concurrency: int, contender: str, samples: Sequence[Sample]) -> dict[str, Any]:
    values = [sample.values() for sample in samples]
    row: dict[str, Any] = {"concurrency": concurrency, "contender": contender, "repeats": len(samples)}
    for name, _, digits in MEASURES:
        found = [value[name] for value in values]
        row[name] = {
            "median": round(statistics.median(found), digits + 1),
            "low": round(min(found), digits + 1),
            "high": round(max(found), digits + 1),
        }
    row["requests"] = sum(len(sample.burst.answers) for sample in samples)
    row["errors"] = [error for sample in samples for error in sample.burst.errors][:5]
    return row


def ratios(found: Sequence[dict[str, Any]], contender: str) -> dict[int, dict[str, float]]:
    """Tokens per second of a contender as a multiple of each other one's, by concurrency."""
    rates = {(row["concurrency"], row["contender"]): row["tokens_per_s"]["median"] for row in found}
    result: dict[int, dict[str, float]] = {}
    for (concurrency, other), rate in rates.items():
        own = rates.get((concurrency, contender))
        if other != contender and own is not None and rate:
            result.setdefault(concurrency, {})[other] = round(own / rate, 3)
    return result


def table(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of plain text."""
    heads = ["requests", "contender", *(head for _, head, _ in MEASURES), "errors"]
    cells = [[str(row["concurrency"]), row["contender"], *_cells(row), str(len(row["errors"]))] for row in found]
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    for line in [heads, *cells]:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _cells(row: dict[str, Any]) -> Iterator[str]:
    for name, _, digits in MEASURES:
        value = row[name]
        yield f"{value['median']:.{digits}f} ({value['low']:.{digits}f}-{value['high']:.{digits}f})"


def draw(record: dict[str, Any], path: Path) -> None:
    """Tokens per second over concurrency, one line for each contender, into a PNG or SVG file."""
    figure = import_module("matplotlib.figure").Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for contender in dict.fromkeys(row["contender"] for row in record["rows"]):
        own = [row for row in record["rows"] if row["contender"] == contender]
        xs = [row["concurrency"] for row in own]
        axes.plot(xs, [row["tokens_per_s"]["median"] for row in own], marker="o", label=contender)
        spans = [[row["tokens_per_s"][end] for row in own] for end in ("low", "high")]
        axes.fill_between(xs, *spans, alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("output tokens/s (median, range)")
    axes.set_title(f"{record['model']['name']}, {record['model']['layers']} layers, {record['card']}", fontsize=10)
    axes.grid(visible=True, which="both", color="0.9")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
