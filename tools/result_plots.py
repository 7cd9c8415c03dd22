"""The plots of ``docs/results.md``, made of the files in ``results/`` and of the benchmarks' own."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import result_files
from tools.svg_chart import Axis, Series, line_chart, nice_log_ticks

BENCHMARKS = result_files.ROOT / "benchmarks"
_DENSE = ("gemm_h200_marlin.json", "gemm_h200_humming.json")


def plots(results: Path = result_files.FOLDER, benchmarks: Path = BENCHMARKS) -> dict[str, str]:
    """SVG text by the name of the file."""
    found = {name_of(record): serving(record) for record in result_files.read_all("serving", results)}
    found |= {f"gemm_m{tokens}.svg": dense(benchmarks, tokens) for tokens in (1, 16)}
    return found | {"moe.svg": experts(json.loads((benchmarks / "moe_h200.json").read_text(encoding="utf-8")))}


def name_of(record: Mapping[str, Any]) -> str:
    """The file with the plot of a record of ``benchmarks/serving.py``."""
    model = "moe" if record["model"]["experts"] else "dense"
    return re.sub(r"[^a-z0-9]+", "_", f"serving {model} {record['card']}".lower()).strip("_") + ".svg"


def serving(record: Mapping[str, Any]) -> str:
    """Output tokens per second over the requests in flight: median, smallest and largest over the repeats."""
    # A burst in which every request failed has no place on a logarithmic axis; the table names it.
    rows = [row for row in record["rows"] if row["tokens_per_s"]["low"] > 0]
    series = [
        Series(
            name,
            tuple(
                (row["concurrency"], *(row["tokens_per_s"][key] for key in ("low", "median", "high")))
                for row in rows
                if row["contender"] == name
            ),
        )
        for name in dict.fromkeys(row["contender"] for row in rows)
    ]
    requests = tuple(float(count) for count in sorted({row["concurrency"] for row in rows}))
    ticks = nice_log_ticks(row["tokens_per_s"][key] for row in rows for key in ("low", "high"))
    title = f"{record['model']['name']}, {record['model']['layers']} layers, {record['card']}"
    x, y = Axis("requests in flight", requests, log=True), Axis("output tokens/s", ticks, log=True)
    return line_chart(title, x, y, series)


def dense(folder: Path, tokens: int) -> str:
    """Time of other dense kernels as a multiple of ours in a chain, over the megabytes of the weight."""
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    cards = set()
    for name in _DENSE:
        record = json.loads((folder / name).read_text(encoding="utf-8"))
        cards.add(record["card"])
        for row in record["rows"]:
            for peer in ("marlin", "humming", "bf16"):
                if row["M"] == tokens and peer in row:
                    ratio = row[peer] / row["pdl"]
                    points.setdefault(peer, []).append((row["MB"], ratio, ratio, ratio))
    series = [Series(peer, tuple(sorted(found)), line=False) for peer, found in points.items()]
    title = f"Dense GEMM, M = {tokens}, {', '.join(sorted(cards))}: time of others / ours"
    sizes = nice_log_ticks(point[0] for found in points.values() for point in found)
    return line_chart(title, Axis("MB of FP4 weights", sizes, log=True), _ratios(series), series, mark=1.0)


def experts(record: Mapping[str, Any]) -> str:
    """Time of Marlin's experts as a multiple of ours over tokens: geometric mean and range over the models."""
    rows = record["rows"]
    series = []
    for ranks in sorted({row["TP"] for row in rows}):
        points = []
        for tokens in sorted({row["M"] for row in rows}):
            ratios = [row["ratio"]["marlin"] for row in rows if (row["TP"], row["M"]) == (ranks, tokens)]
            points.append((tokens, min(ratios), statistics.geometric_mean(ratios), max(ratios)))
        series.append(Series(f"{ranks} rank{'s' if ranks > 1 else ''}", tuple(points)))
    models = len({row["model"] for row in rows})
    title = f"Routed experts of {models} models, {record['card']}: time of marlin / ours"
    tokens_axis = tuple(float(count) for count in sorted({row["M"] for row in rows}))
    return line_chart(title, Axis("tokens", tokens_axis, log=True), _ratios(series), series, mark=1.0)


def _ratios(series: Sequence[Series]) -> Axis:
    """An axis from 0 to the largest multiple."""
    largest = max(point[3] for one in series for point in one.points)
    return Axis("times as long as ours", tuple(step / 2 for step in range(math.ceil(2 * largest) + 1)))
