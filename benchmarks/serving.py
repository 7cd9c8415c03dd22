"""Compare FP4 backends in real SGLang servers, end to end.

    python -m benchmarks.serving [--model dense|moe] [--contenders sm120 marlin humming] [--json PATH] [--plot PATH]

The servers run the same SGLang on the same checkpoint of random weights, are resident at once, and are loaded one at a
time, in turn, so that a drift of the clock meets all of them. Figures are medians over repeats; one request's time
for a token leaves its first token out. A contender that does not start is reported with the reason. Run it in the
environment that has SGLang; the checkpoint is made on the GPU. ``sm120_tuned`` reads the table that ``sglang-sm120
tune`` left on this card, and without one serves what ``auto`` takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve import checkpoints, client, contenders, profile, report
from cpu_host.server import Server
from tools import result_files

KIND = "serving"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=checkpoints.GEOMETRIES, default="dense")
    parser.add_argument("--layers", type=int, help="other than the model's: fewer start sooner and measure worse")
    parser.add_argument("--contenders", nargs="+", choices=contenders.OPTIONS, default=["sm120", "marlin", "humming"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--waves", type=int, default=1, help="requests of a burst for each that is in flight")
    parser.add_argument("--profile-steps", type=int, default=30, help="0 leaves the profile out")
    parser.add_argument("--profile-concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--start-timeout", type=float, default=300.0, metavar="S")
    parser.add_argument("--folder", type=Path, help="for checkpoint and logs; a checkpoint found there is used again")
    parser.add_argument(
        "--server-option", action="append", default=[], help="one more for every server, as --name=value"
    )
    parser.add_argument("--json", type=Path, default=result_files.FOLDER, help="file, or folder for it")
    parser.add_argument("--plot", type=Path, help="PNG or SVG; needs matplotlib")
    return parser.parse_args(given)


def measure(servers: dict[str, Server], args: argparse.Namespace, vocab: int) -> list[report.Sample]:
    """Load the servers in turn; the one that begins changes from repeat to repeat."""
    samples = []
    names = list(servers)
    for repeat in range(-1, args.repeats):  # the first round warms up
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        for concurrency in args.concurrency:
            asked = client.prompts(concurrency * args.waves, args.input_tokens, vocab, (repeat, concurrency))
            for name in order:
                tokens = args.output_tokens if repeat >= 0 else min(32, args.output_tokens)
                burst = asyncio.run(client.burst(servers[name].url, asked, tokens, concurrency))
                if repeat >= 0:
                    samples.append(report.Sample(name, concurrency, repeat, burst))
                for error in burst.errors[:1]:
                    say(f"{name}, {concurrency} requests: {len(burst.errors)} failed, the first with: {error}")
        say(f"round {repeat + 1} of {args.repeats} done" if repeat >= 0 else "warm")
    return samples


def profiles(servers: dict[str, Server], args: argparse.Namespace, folder: Path, vocab: int) -> dict[str, Any]:
    """Profiles by contender and concurrency; one that fails is its reason."""
    found: dict[str, Any] = {}
    for name, server in servers.items():
        for concurrency in args.profile_concurrency if args.profile_steps else ():
            asked = client.prompts(concurrency, args.input_tokens, vocab, ("profile", concurrency))
            target = folder / f"profile-{name}-{concurrency}"
            try:
                result = asyncio.run(
                    profile.record(server.url, target, asked, max(args.output_tokens, 512), args.profile_steps)
                )
            except (RuntimeError, ValueError, OSError) as error:
                result = {"error": f"{type(error).__name__}: {error}"[:300]}
            say(f"profile of {name} at {concurrency}: {json.dumps(result.get('shares', result))}")
            found.setdefault(name, {})[str(concurrency)] = result
    return found


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the checkpoint, start the servers, measure, and return the record."""
    geometry = checkpoints.GEOMETRIES[args.model].with_layers(args.layers)
    model = folder / f"{args.model}-{geometry.layers}"
    began = time.monotonic()
    if not (model / "model.safetensors.index.json").is_file():
        checkpoints.make(model, geometry)
    say(f"checkpoint after {time.monotonic() - began:.0f} s")
    settings = contenders.Settings(max_requests=max(args.concurrency), extra=tuple(args.server_option))
    launches = {
        name: contenders.launch(name, model, folder / name, settings, moe=bool(geometry.experts))
        for name in args.contenders
    }
    with contenders.Fleet(launches, args.start_timeout) as fleet:
        for name, problem in fleet.problems.items():
            say(f"{name} did not start:\n{contenders.last_lines(problem, 25)}")
        for name, server in fleet.servers.items():
            say(f"{name} ready after {server.ready_after:.0f} s")
        samples = measure(fleet.servers, args, geometry.vocab) if fleet.servers else []
        traces = profiles(fleet.servers, args, folder, geometry.vocab)
        started = {name: {"ready_s": round(server.ready_after, 1)} for name, server in fleet.servers.items()}
    failed = {name: {"error": contenders.reason(problem)} for name, problem in fleet.problems.items()}
    strangers = contenders.impostors(traces)
    failed |= {name: {"error": problem} for name, problem in strangers.items()}
    rows = report.rows(sample for sample in samples if sample.contender not in strangers)
    return {
        **result_files.header(
            KIND, result_files.without_folders(["serving.py", *sys.argv[1:]]), result_files.this_machine()
        ),
        "model": checkpoints.description(geometry),
        "load": {
            key: getattr(args, key) for key in ("input_tokens", "output_tokens", "repeats", "waves", "concurrency")
        },
        "contenders": {
            name: {"options": contenders.options(name, bool(geometry.experts)), **(started | failed)[name]}
            for name in args.contenders
        },
        "rows": rows,
        "profiles": {name: found for name, found in traces.items() if name not in strangers},
    }


def say(text: str) -> None:
    print(text, flush=True)


def main(given: Sequence[str] | None = None) -> int:
    """Run and write the results; return 1 if a request failed or ``sm120`` did not start."""
    args = arguments(given)
    with tempfile.TemporaryDirectory(prefix="sm120-serving-") as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        record = run(args, folder.absolute())
    print(*report.table(record["rows"]), sep="\n")
    for concurrency, others in report.ratios(record["rows"], "sm120").items():
        print(f"{concurrency} requests: sm120 is " + ", ".join(f"{ratio}x {name}" for name, ratio in others.items()))
    say(f"written to {result_files.write(args.json, record, args.model).name}")
    if args.plot:
        report.draw(record, args.plot)
    ours_failed = any("error" in found for name, found in record["contenders"].items() if name.startswith("sm120"))
    return 1 if ours_failed or any(row["errors"] for row in record["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
