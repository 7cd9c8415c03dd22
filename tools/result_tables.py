"""The tables of ``docs/results.md``, made of the files in ``results/`` and of the benchmarks' own."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import result_files, result_plots

NOTHING = "*No file yet.*\n"
BENCHMARKS = result_files.ROOT / "benchmarks"
_PEERS = ("humming", "marlin", "bf16")
#: Up to this many tokens the experts' goal counts.
_FEW_TOKENS = 8
#: Tokens a second of ``sm120`` as a multiple of the best other value: up to this many requests, dense and with experts.
_GOAL_REQUESTS, _GOAL_DENSE, _GOAL_EXPERTS = 16, 1.2, 1.3


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, or :data:`NOTHING` without rows."""
    lines = list(rows)
    if not lines:
        return NOTHING
    text = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in text)


def machine(record: Mapping[str, Any]) -> str:
    """The card, its capability, and the versions that matter."""
    versions = record["versions"]
    shown = [
        f"{name} {versions[name]}" for name in ("driver", "cuda", "torch", "sglang", "flashinfer") if name in versions
    ]
    return f"{record['card']} ({record['capability']}), {', '.join(shown)}"


def commit(record: Mapping[str, Any]) -> str:
    """The commit as people write it; what differed from it stays visible."""
    head, _, rest = str(record["commit"]).partition("-")
    return f"`{head[:10]}`" + (f" ({rest})" if rest else "")


def gpu_tests(folder: Path = result_files.FOLDER) -> str:
    """One block for each card and kind of run: counts by test file."""
    parts = []
    for record in (*result_files.read_all("gpu tests", folder), *result_files.read_all("e2e tests", folder)):
        total = record["total"]
        counts = ", ".join(f"{total[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        parts.append(
            f"**{machine(record)}**: {counts}; commit {commit(record)}, {record['date']}, `{record['command']}`\n\n"
        )
        rows = [
            [
                f"`{name}`",
                *(str(counts[outcome]) for outcome in ("passed", "failed", "skipped")),
                f"{counts['seconds']:g}",
            ]
            for name, counts in record["files"].items()
        ]
        parts.append(table(["file", "passed", "failed", "skipped", "seconds"], rows) + "\n")
        if record["failures"]:
            parts.append("Failed: " + ", ".join(f"`{name}`" for name in record["failures"]) + "\n\n")
    return "\n" + "".join(parts) if parts else NOTHING


def gpu_runs(folder: Path = result_files.FOLDER) -> str:
    """One line for each card and kind of run."""
    rows = [
        [kind, machine(record), *(str(record["total"][outcome]) for outcome in ("passed", "failed")), commit(record)]
        for kind in ("gpu tests", "e2e tests")
        for record in result_files.read_all(kind, folder)
    ]
    return table(["run", "on", "passed", "failed", "commit"], rows)


def serving(folder: Path = result_files.FOLDER) -> str:
    """One block for each file of ``benchmarks/serving.py``."""
    parts = []
    for record in result_files.read_all("serving", folder):
        model, load = record["model"], record["load"]
        parts.append(
            f"**{model['name']}, {model['layers']} layers, {machine(record)}**; {load['input_tokens']} tokens in, "
            f"{load['output_tokens']} out, {load['repeats']} repeats; commit {commit(record)}, {record['date']}\n\n"
        )
        parts.append(f"![Output tokens per second over requests in flight](plots/{result_plots.name_of(record)})\n\n")
        parts.append(_serving_rows(record["rows"]) + "\n")
        for name, found in record["contenders"].items():
            if "error" in found:
                parts.append(f"`{name}` is left out: {found['error']}\n\n")
    return "\n" + "".join(parts) if parts else NOTHING


def _serving_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    rates = {(row["concurrency"], row["contender"]): row["tokens_per_s"]["median"] for row in rows}

    def ratio(row: Mapping[str, Any]) -> str:
        own = rates.get((row["concurrency"], "sm120"))
        return "" if own is None or row["contender"] == "sm120" else f"{own / row['tokens_per_s']['median']:.2f}"

    def spread(value: Mapping[str, float], digits: int) -> str:
        return f"{value['median']:.{digits}f} ({value['low']:.{digits}f} – {value['high']:.{digits}f})"

    cells = [
        [
            str(row["concurrency"]),
            f"`{row['contender']}`",
            spread(row["tokens_per_s"], 0),
            ratio(row),
            spread(row["ttft_ms"], 1),
            spread(row["per_token_ms"], 2),
            str(len(row["errors"])),
        ]
        for row in rows
    ]
    head = ["requests", "value", "output tokens/s", "`sm120` / this", "first token, ms", "ms per token", "errors"]
    return table(head, cells)


def goals(folder: Path = result_files.FOLDER) -> str:
    """What was aimed at beside what was measured, and where the step of ``sm120`` spends most of its time."""
    rows = []
    for record in result_files.read_all("serving", folder):
        few = _GOAL_EXPERTS if record["model"]["experts"] else _GOAL_DENSE
        rates = {(row["concurrency"], row["contender"]): row["tokens_per_s"]["median"] for row in record["rows"]}
        for requests in sorted({requests for requests, _ in rates}):
            here = {name: rate for (count, name), rate in rates.items() if count == requests}
            others = [rate for name, rate in here.items() if not name.startswith("sm120")]
            if "sm120" not in here or not others:
                continue
            goal, reached = few if requests <= _GOAL_REQUESTS else 1.0, here["sm120"] / max(others)
            shares = record["profiles"].get("sm120", {}).get(str(requests), {}).get("shares", {})
            most = ", ".join(f"{group} {share:.0%}" for group, share in list(shares.items())[:2])
            met = "met" if reached >= goal else "**missed**"
            rows.append([record["model"]["name"], str(requests), f"{goal:g}", f"{reached:.2f}", met, most])
    return table(["model", "requests", "goal", "`sm120` / best other value", "", "most of its step"], rows)


def profiles(folder: Path = result_files.FOLDER) -> str:
    """Shares of the time of a decode step, by group of kernels; a file may hold those of a run of their own."""
    rows, others = [], []
    for record in result_files.read_all("serving", folder):
        if other := record.get("profiles_of"):
            others.append(f"{record['model']['name']}: commit `{other['commit'][:10]}`, {other['date'][:10]}.\n")
        for name, by_concurrency in record["profiles"].items():
            for concurrency, found in by_concurrency.items():
                shares = found.get("shares")
                text = (
                    ", ".join(f"{group} {share:.0%}" for group, share in shares.items()) if shares else found["error"]
                )
                step = f"{found['step_us'] / 1e3:.2f}" if shares else ""
                rows.append([record["model"]["name"], record["card"], f"`{name}`", concurrency, step, text])
    text = table(["model", "card", "value", "requests", "ms per step", "shares"], rows)
    return text + "".join(f"\nProfiled in a run of its own: {other}" for other in others)


def kernels(folder: Path = BENCHMARKS) -> str:
    """Times of other kernels as multiples of ours, over the shapes of one run of ``benchmarks/gemm.py``."""
    rows = []
    for path in sorted(folder.glob("gemm_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for tokens in sorted({row["M"] for row in record["rows"]}):
            rows += list(_peers(path.name, record, tokens))
    head = ["file", "card", "M", "other kernel", "shapes", "in a chain: mean", "smallest", "plain: mean", "smallest"]
    return table(head, rows)


def experts(folder: Path = BENCHMARKS) -> str:
    """Times of other experts as multiples of ours, for each model and TP of a run of ``benchmarks/moe.py``."""
    rows = []
    for path in sorted(folder.glob("moe_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        layers = list(dict.fromkeys((row["model"], row["TP"], row["H"], row["I"]) for row in record["rows"]))
        for layer in layers:
            of_layer = [row for row in record["rows"] if (row["model"], row["TP"], row["H"], row["I"]) == layer]
            for peer in of_layer[0]["ratio"]:
                rows.append([path.name, record["card"], *map(str, layer), peer, *_by_tokens(of_layer, peer)])
    head = [
        "file",
        "card",
        "model",
        "TP",
        "H",
        "I",
        "other kernel",
        "M 1 to 8: mean",
        "smallest",
        "more: mean",
        "smallest",
    ]
    return table(head, rows)


def _by_tokens(rows: Sequence[Mapping[str, Any]], peer: str) -> Iterator[str]:
    for few in (True, False):
        ratios = [row["ratio"][peer] for row in rows if (row["M"] <= _FEW_TOKENS) == few]
        yield from (f"{statistics.geometric_mean(ratios):.2f}", f"{min(ratios):.2f}") if ratios else ("", "")


def _peers(file: str, record: Mapping[str, Any], tokens: int) -> Iterator[list[str]]:
    for peer in _PEERS:
        found = [row for row in record["rows"] if row["M"] == tokens and "pdl" in row and peer in row]
        if found:
            cells = [file, record["card"], str(tokens), peer, str(len(found))]
            for mode in ("pdl", "plain"):
                ratios = [row[peer] / row[mode] for row in found]
                cells += [f"{statistics.geometric_mean(ratios):.2f}", f"{min(ratios):.2f}"]
            yield cells
