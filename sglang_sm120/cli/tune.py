"""``sglang-sm120 tune``: measure what ``bench`` measures, and write the tuning table that ``sm120_tuned`` reads."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from sglang_sm120.cli import bench, bench_report
from sglang_sm120.cli.bench import Session, Wish
from sglang_sm120.records import identity_of
from sglang_sm120.redact import redacted
from sglang_sm120.tuning import table
from sglang_sm120.tuning.cases import Shape
from sglang_sm120.tuning.choice import choose
from sglang_sm120.tuning.expert_cases import ExpertShape
from sglang_sm120.tuning.results import Entry, ExpertEntry
from sglang_sm120.tuning.table import TuningTable

SCHEMA = 1


@dataclass(frozen=True)
class Tuned:
    """The measurements of one command and the table that came of them.

    Attributes:
        session: what was measured.
        dtype: of all of it.
        table: with earlier shapes; ``None`` if no shape was measured in full.
        written: the files that hold it.
        unfinished: shapes that are not in it.
    """

    session: Session
    dtype: str
    table: TuningTable | None
    written: tuple[Path, ...]
    unfinished: tuple[Shape | ExpertShape, ...]


def tune(wish: Wish, output: Path | None, *, again: bool, quiet: bool) -> Tuned:
    """Measure and write the table, into the cache folder and to ``output``.

    A shape goes into the table once every M was measured, so that a run that was interrupted leaves no half of one.

    Raises:
        ConfigError: nothing to measure, or a value that cannot be understood.
        RecordError: the table cannot be written.
    """
    from sglang_sm120.device import collect_facts

    identity = identity_of(collect_facts())
    table.require_place(identity, output)
    session = bench.measure(replace(wish, spares_oracle=not wish.backends), again=again, quiet=quiet)
    measured = {(r.shape.key, r.m): r.entry for r in session.results}
    entries: list[Entry | ExpertEntry] = []
    unfinished = []
    for shape in session.shapes:
        keys = [(shape.key, m) for m in session.rows]
        values = session.runners if isinstance(shape, ExpertShape) else session.values
        if all(key in measured for key in keys):
            entries += [among for key in keys if (among := _among(measured[key], values)) is not None]
        else:
            unfinished.append(shape)
    if not entries:
        return Tuned(session, wish.dtype, None, (), tuple(unfinished))
    command = ["sglang-sm120", *(str(redacted(word)) for word in sys.argv[1:])]
    made = table.save(identity, entries, command, output)
    written = (table.table_path(identity), *([output] if output is not None else []))
    return Tuned(session, wish.dtype, made, written, tuple(unfinished))


def _among(entry: Entry | ExpertEntry | None, values: list[str]) -> Entry | ExpertEntry | None:
    """Drop what earlier runs measured of backends that are not asked for now."""
    timings = {value: timing for value, timing in entry.timings.items() if value in values} if entry else {}
    if entry is None or not timings:
        return None
    if isinstance(entry, ExpertEntry):
        launches = {value: count for value, count in entry.launches.items() if value in timings}
        return replace(entry, backend=choose(timings), timings=timings, launches=launches)
    return replace(entry, backend=choose(timings), timings=timings)


def report(tuned: Tuned) -> dict[str, Any]:
    """Describe the result as JSON data: the report of ``bench``, and which M of each shape goes where."""
    return {
        "schema": SCHEMA,
        "bench": bench_report.report(tuned.session),
        "shapes": [shape for shape in map(partial(_shape, tuned), tuned.session.shapes) if shape["choices"]],
        "unfinished": [{**_sizes(shape), "label": shape.label} for shape in tuned.unfinished],
        "written": [str(path) for path in tuned.written],
        "digest": tuned.table.digest if tuned.table is not None else None,
    }


def _sizes(shape: Shape | ExpertShape) -> dict[str, Any]:
    return {name: value for name, value in vars(shape).items() if name != "layers"}


def _shape(tuned: Tuned, shape: Shape | ExpertShape) -> dict[str, Any]:
    choices = {}
    if tuned.table is not None and shape not in tuned.unfinished:
        if isinstance(shape, ExpertShape):
            choices = tuned.table.runners_by_rows(shape.key, tuned.dtype, table.RUNNERS)
        else:
            choices = tuned.table.choices(shape.n, shape.k, tuned.dtype, table.CANDIDATES)
    return {
        **_sizes(shape),
        "label": shape.label,
        "layers": list(shape.layers),
        "dtype": tuned.dtype,
        "choices": {str(m): value for m, value in choices.items()},
        "batch_invariant": len(set(choices.values())) == 1,
        "summary": table.spans(choices) if choices else "",
        "flag": "--moe-runner-backend" if isinstance(shape, ExpertShape) else "--fp4-gemm-backend",
    }


def render(data: dict[str, Any], console: Console | None = None) -> None:
    """Print times and choices."""
    console = console or Console()
    bench_report.render(data["bench"], console)
    for shape in data["shapes"]:
        layers = f" ({', '.join(shape['layers'])})" if shape["layers"] else ""
        console.print(escape(f"{shape['label']}{layers}: {shape['summary']}"), soft_wrap=True)
    for shape in data["unfinished"]:
        console.print(f"[yellow]{shape['label']}: not measured in full, left out of the table[/]")
    for path in data["written"]:
        console.print(escape(f"tuning table {data['digest']}: {path}"), soft_wrap=True)
    flags = dict.fromkeys(f"{shape['flag']} sm120_tuned" for shape in data["shapes"])
    if flags:
        console.print(f"Start the server with {' '.join(flags)}", soft_wrap=True)
