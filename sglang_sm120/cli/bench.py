"""``sglang-sm120 bench``: the times of every right backend on the shapes of a model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.records import identity_of
from sglang_sm120.redact import redacted
from sglang_sm120.tuning import results, run
from sglang_sm120.tuning.cases import Shape, read_rows, read_shapes, shapes_of_model
from sglang_sm120.tuning.results import Entry, Key
from sglang_sm120.tuning.run import Result

#: The oracle in float64 on a CPU takes minutes for the rows of a prefill.
CPU_ROWS = (1, 8)


@dataclass(frozen=True)
class Wish:
    """What the user asked to measure.

    ``spares_oracle`` leaves out backends that run anywhere and win nowhere, where there is another one.
    """

    model: str | None
    shapes: Sequence[str]
    tp: int
    rows: str
    backends: Sequence[str]
    dtype: str
    compile_budget: float
    spares_oracle: bool = False


@dataclass
class Session:
    """What was measured, and under which conditions: each of ``values`` for each M of ``rows`` on each shape."""

    facts: HostFacts
    shapes: list[Shape]
    left_out: dict[str, str]
    values: list[str]
    rows: tuple[int, ...]
    results: list[Result] = field(default_factory=list)
    compile_seconds: dict[str, float] = field(default_factory=dict)
    clocks: list[str] = field(default_factory=list)
    ended: str = ""
    kept_in: str = ""


def measure(wish: Wish, *, again: bool, quiet: bool) -> Session:
    """Measure, with a progress bar on the terminal. Each result is kept at once, so that a run can be resumed.

    Args:
        wish: what to measure.
        again: measure what an earlier run on this card and these versions has measured already.
        quiet: no progress bar.

    Raises:
        ConfigError: nothing to measure, or a value that cannot be understood.
    """
    from sglang_sm120.device import collect_facts
    from sglang_sm120.probing.record import with_probe

    if (wish.model is None) == (not wish.shapes):
        raise ConfigError("Name either a MODEL or at least one --shape.")
    if wish.dtype not in ("bfloat16", "float16"):
        raise ConfigError(bad_value("--dtype", wish.dtype, "write bfloat16 or float16"))
    if not wish.compile_budget >= 0:  # NaN is no number of seconds either
        raise ConfigError(bad_value("--compile-budget", wish.compile_budget, "give seconds, 0 or more"))
    rows = read_rows(wish.rows)
    shapes = read_shapes(wish.shapes) if wish.model is None else shapes_of_model(wish.model, wish.tp)
    facts, stale = with_probe(collect_facts())
    console = Console(stderr=True, quiet=quiet)
    if stale:
        console.print(escape(stale), soft_wrap=True)
    values, left_out = run.candidates(wish.backends, facts)
    if wish.spares_oracle:
        values, left_out = run.without_oracle(values, left_out)
    if facts.capability is None and not wish.rows:
        rows = CPU_ROWS
    results.require_place(identity_of(facts))
    known = {} if again else _known(facts, values, console)
    session = Session(facts, shapes, left_out, values, rows)
    todo = []
    for shape in shapes:
        for m in rows:
            entry = known.get((shape.n, shape.k, wish.dtype, m))
            if entry is None:
                todo.append((shape, m))
            else:
                session.results.append(Result(shape, m, entry))
    if todo and facts.capability is not None:
        seconds = run.estimate(len(todo), len(values))
        console.print(f"{len(todo)} cases, {len(values)} backends: about {seconds:.0f} s, compilation not included")
    session.clocks.append(_clocks())
    _measure_all(session, todo, values, wish, console)
    session.clocks.append(_clocks())
    places = {(shape.n, shape.k): place for place, shape in enumerate(shapes)}
    session.results.sort(key=lambda result: (places[result.shape.n, result.shape.k], result.m))
    return session


def _known(facts: HostFacts, values: Sequence[str], console: Console) -> dict[Key, Entry]:
    """What an earlier run measured with all of these backends that take the case."""
    earlier, problem = results.find(facts)
    if problem:
        console.print(escape(problem), soft_wrap=True)
    if earlier is None:
        return {}
    return {
        key: entry
        for key, entry in earlier.entries.items()
        if all(v in entry.timings for v in run.fitting(values, facts, entry.n, entry.k, entry.dtype))
    }


def _measure_all(
    session: Session, todo: Sequence[tuple[Shape, int]], values: Sequence[str], wish: Wish, console: Console
) -> None:
    from sglang_sm120.tuning.timing import CompileBudget

    identity = identity_of(session.facts)
    budget = CompileBudget(wish.compile_budget, session.compile_seconds)
    command = ["sglang-sm120", *(str(redacted(word)) for word in sys.argv[1:])]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measuring", total=len(todo))
        try:
            for result in run.run(todo, values, wish.dtype, session.facts, budget):
                session.results.append(result)
                progress.update(task, advance=1, description=f"M={result.m} N={result.shape.n} K={result.shape.k}")
                if result.entry is not None:
                    results.save(identity, [result.entry], command)
        except KeyboardInterrupt:
            session.ended = "interrupted"
        except RuntimeError as error:
            session.ended = f"ended by an error: {' '.join(str(error).split())}"
    session.kept_in = str(results.results_path(identity))


def _clocks() -> str:
    """Clock, temperature and power of the GPU now, as nvidia-smi prints them; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw"
    try:
        done = subprocess.run([tool, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi cannot be asked: {error}"
    return done.stdout.strip().replace("\n", "; ")
