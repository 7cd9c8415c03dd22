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

from sglang_sm120 import programs
from sglang_sm120.backends.moe_table import MOE_RUNNERS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.records import identity_of
from sglang_sm120.redact import redacted
from sglang_sm120.tuning import results, run
from sglang_sm120.tuning.cases import Shape, read_rows, read_shapes, shapes_of_model
from sglang_sm120.tuning.expert_cases import ExpertShape, experts_of_model, read_experts
from sglang_sm120.tuning.results import Entry, ExpertEntry
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
    experts: Sequence[str] = ()
    ep: int = 1


@dataclass
class Session:
    """What was measured, and under which conditions.

    Each of ``values`` was measured for each M of ``rows`` on each shape of a dense layer, and each of ``runners`` on
    each geometry of experts.
    """

    facts: HostFacts
    shapes: list[Shape | ExpertShape]
    left_out: dict[str, str]
    values: list[str]
    rows: tuple[int, ...]
    runners: list[str] = field(default_factory=list)
    left_out_runners: dict[str, str] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    compile_seconds: dict[str, float] = field(default_factory=dict)
    expert_compile_seconds: dict[str, float] = field(default_factory=dict)
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

    if (wish.model is None) == (not wish.shapes and not wish.experts):
        raise ConfigError("Name either a MODEL or at least one --shape or --experts.")
    if wish.dtype not in ("bfloat16", "float16"):
        raise ConfigError(bad_value("--dtype", wish.dtype, "write bfloat16 or float16"))
    if not wish.compile_budget >= 0:  # NaN is no number of seconds either
        raise ConfigError(bad_value("--compile-budget", wish.compile_budget, "give seconds, 0 or more"))
    rows = read_rows(wish.rows)
    dense, experts = run.served_by(wish.backends, *_shapes(wish))
    facts, stale = with_probe(collect_facts())
    console = Console(stderr=True, quiet=quiet)
    if stale:
        console.print(escape(stale), soft_wrap=True)
    values, left_out = run.candidates(wish.backends, facts) if dense else ([], {})
    runners, left_out_runners = run.expert_candidates(wish.backends, facts) if experts else ([], {})
    if wish.spares_oracle:
        values, left_out = run.without_oracle(values, left_out)
        runners, left_out_runners = run.without_oracle(runners, left_out_runners, MOE_RUNNERS)
    if facts.capability is None and not wish.rows:
        rows = CPU_ROWS
    results.require_place(identity_of(facts))
    known = {} if again else _known(facts, values, runners, console)
    session = Session(facts, [*dense, *experts], left_out, values, rows, runners, left_out_runners)
    todo = []
    for shape in session.shapes:
        for m in rows:
            entry = known.get((shape.key, wish.dtype, m))
            if entry is None:
                todo.append((shape, m))
            else:
                session.results.append(Result(shape, m, entry))
    if todo and facts.capability is not None:
        count = sum(len(runners if isinstance(shape, ExpertShape) else values) for shape, _ in todo)
        seconds = run.estimate(count, 1)
        console.print(f"{len(todo)} cases, {count} timings: about {seconds:.0f} s, compilation not included")
    session.clocks.append(_clocks())
    _measure_all(session, todo, wish, console)
    session.clocks.append(_clocks())
    places = {shape.key: place for place, shape in enumerate(session.shapes)}
    session.results.sort(key=lambda result: (places[result.shape.key], result.m))
    return session


def _shapes(wish: Wish) -> tuple[list[Shape], list[ExpertShape]]:
    if wish.model is None:
        return read_shapes(wish.shapes), read_experts(wish.experts, wish.ep)
    dense, experts = shapes_of_model(wish.model, wish.tp), experts_of_model(wish.model, wish.tp, wish.ep)
    if not dense and not experts:
        raise ConfigError(bad_value("MODEL", wish.model, "it has no NVFP4 layer, so there is nothing to measure"))
    return dense, experts


def _known(
    facts: HostFacts, values: Sequence[str], runners: Sequence[str], console: Console
) -> dict[tuple[object, str, int], Entry | ExpertEntry]:
    """What an earlier run measured with all of these backends that take the case, by shape, type and M."""
    earlier, problem = results.find(facts)
    if problem:
        console.print(escape(problem), soft_wrap=True)
    if earlier is None:
        return {}
    found: dict[tuple[object, str, int], Entry | ExpertEntry] = {}
    for entry in earlier.entries.values():
        if all(v in entry.timings for v in run.fitting(values, facts, entry.n, entry.k, entry.dtype)):
            found[(entry.n, entry.k), entry.dtype, entry.m] = entry
    for expert_entry in earlier.experts.values():
        if all(runner in expert_entry.timings for runner in runners):
            found[expert_entry.key] = expert_entry
    return found


def _measure_all(
    session: Session, todo: Sequence[tuple[Shape | ExpertShape, int]], wish: Wish, console: Console
) -> None:
    from sglang_sm120.tuning.timing import CompileBudget

    identity = identity_of(session.facts)
    budgets = (
        CompileBudget(wish.compile_budget, session.compile_seconds),
        CompileBudget(wish.compile_budget, session.expert_compile_seconds),
    )
    command = ["sglang-sm120", *(str(redacted(word)) for word in sys.argv[1:])]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measuring", total=len(todo))
        try:
            for result in run.run(todo, session.values, session.runners, wish.dtype, session.facts, budgets):
                session.results.append(result)
                progress.update(task, advance=1, description=f"M={result.m} {result.shape.label}")
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
        done = programs.run([tool, query, "--format=csv,noheader"], 20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi cannot be asked: {error}"
    return done.stdout.strip().replace("\n", "; ")
