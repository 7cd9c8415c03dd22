"""Where the time of a decode step goes: SGLang's own profiler, read kernel by kernel.

A kernel that was launched as a programmatic dependent starts while the one in front still runs and then waits for it,
so durations overlap. Each kernel is therefore charged from the end of the kernel before it to its own end. These times
and the gaps in which no kernel ran add up to the whole.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.serve import client

#: The first pattern that is found in a kernel's name decides its group.
GROUPS = {
    "FP4 experts": re.compile(r"sm120::moe|marlin_moe"),
    "FP4 GEMM": re.compile(r"sm120::(skinny|tiled)|[Mm]arlin|humming"),
    "routing": re.compile(r"topk|moe_align|count_and_sort|moe_sum", re.IGNORECASE),
    "FP4 quantizer": re.compile(r"sm120::quant|quantize"),
    "attention": re.compile(r"_fwd|attention|flash|decode_att", re.IGNORECASE),
    "norms, rope, activation": re.compile(r"norm|rope|rotary|silu|act_and_mul|activation", re.IGNORECASE),
    "bf16 GEMM": re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitK", re.IGNORECASE),
}
OTHER = "other"
IDLE = "no kernel runs"


def group_of(kernel: str) -> str:
    """The group of a kernel's name."""
    return next((name for name, pattern in GROUPS.items() if pattern.search(kernel)), OTHER)


def charged(events: Iterable[Mapping[str, Any]]) -> tuple[Counter[str], float]:
    """Charge kernels as the module says.

    Args:
        events: of a trace in Chrome's format, times in µs.

    Returns:
        µs for each kernel's name and for :data:`IDLE`, and µs from the first kernel's start to the last one's end.
    """
    kernels = sorted(
        (float(e["ts"]) + float(e["dur"]), float(e["ts"]), str(e["name"])) for e in events if e.get("cat") == "kernel"
    )
    times: Counter[str] = Counter()
    if not kernels:
        return times, 0.0
    first = reached = min(start for _, start, _ in kernels)
    for end, start, name in kernels:
        if start > reached:
            times[IDLE] += start - reached  # type: ignore[assignment]
        times[name] += end - max(start, reached)  # type: ignore[assignment]
        reached = end
    return times, reached - first


def summary(events: Iterable[Mapping[str, Any]], steps: int, top: int = 12) -> dict[str, Any]:
    """Shares of the time by group, and the kernels that take most, µs for each of ``steps`` steps.

    Raises:
        ValueError: no kernel is in the trace.
    """
    times, span = charged(events)
    if not span:
        raise ValueError("the trace holds no kernel")
    groups: Counter[str] = Counter()
    for name, microseconds in times.items():
        groups[name if name == IDLE else group_of(name)] += microseconds
    return {
        "steps": steps,
        "step_us": round(span / steps, 1),
        "shares": {name: round(value / span, 4) for name, value in groups.most_common()},
        "kernels": [
            {"name": name[:120], "us_per_step": round(value / steps, 2), "share": round(value / span, 4)}
            for name, value in times.most_common(top)
            if name != IDLE
        ],
    }


async def record(
    url: str, folder: Path, asked: list[list[int]], new_tokens: int, steps: int, timeout_s: float = 90.0
) -> dict[str, Any]:
    """Profile ``steps`` steps of a server while it answers all the prompts at once.

    Args:
        folder: where the server, on the same machine, leaves its trace.

    Raises:
        RuntimeError: the server did not profile, or left no trace in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    load = asyncio.create_task(client.burst(url, asked, new_tokens, len(asked)))
    await asyncio.sleep(0.7)  # past the prefill
    body = {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU"], "with_stack": False}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
        session.post(f"{url}/start_profile", json=body) as response,
    ):
        text = await response.text()
        if response.status != 200:
            raise RuntimeError(f"/start_profile answered {response.status}: {text[:200]}")
    finished = await load
    if finished.errors:
        raise RuntimeError(f"under the profiler: {finished.errors[0]}")
    return summary(await asyncio.to_thread(_events, folder, timeout_s), steps)


def _events(folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    deadline = time.monotonic() + timeout_s
    problem = "no file"
    while time.monotonic() < deadline:
        for path in folder.rglob("*.json.gz"):
            try:
                events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
            except (OSError, EOFError, ValueError) as error:  # still being written
                problem = f"{type(error).__name__}: {error}"
            else:
                return events
        time.sleep(0.5)
    raise RuntimeError(f"the profiler left no trace that can be read within {timeout_s:.0f} s ({problem})")
