"""The commands ``bench`` and ``tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_sm120.cli.model_commands import MOST_RANKS
from sglang_sm120.redact import redacted

if TYPE_CHECKING:
    from sglang_sm120.cli.bench import Wish

Model = Annotated[
    str | None,
    typer.Argument(
        help="A folder or config.json, a hub id that is in the local cache, or a preset.", show_default=False
    ),
]
Shapes = Annotated[list[str] | None, typer.Option("--shape", help="NxK instead of a model; may be repeated.")]
Experts = Annotated[
    list[str] | None,
    typer.Option("--experts", help="Experts x top_k x H x I instead of a model, 256x8x2048x512 say; may be repeated."),
]
Ep = Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Groups of ranks that share out whole experts.")]
Tp = Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Tensor-parallel ranks that share the model.")]
Rows = Annotated[str, typer.Option(help="Values of M such as 1,16,128. Without it: decode, verification and prefill.")]
Backends = Annotated[
    list[str] | None, typer.Option("--backend", help="Measure only this value; may be repeated. It must have passed.")
]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float16.")]
Budget = Annotated[float, typer.Option(min=0, help="Seconds that a backend may spend on first calls (compilation).")]
Again = Annotated[bool, typer.Option("--again", help="Measure what an earlier run has measured already.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON without names, paths or secrets of this machine.")]


def bench(
    model: Model = None,
    shape: Shapes = None,
    experts: Experts = None,
    tp: Tp = 1,
    ep: Ep = 1,
    rows: Rows = "",
    backend: Backends = None,
    dtype: Dtype = "bfloat16",
    compile_budget: Budget = 600.0,
    plot: Annotated[Path | None, typer.Option(help="Also draw the result, PNG or SVG by the name.")] = None,
    again: Again = False,
    as_json: Json = False,
) -> None:
    """Time every backend that passed its probe on the layers of a model: quantizing and multiplying, as a server does.

    Dense NVFP4 layers are timed with values of --fp4-gemm-backend, routed experts with those of --moe-runner-backend.

    Each result is kept for this card and these versions, so that a run which was interrupted goes on where it ended.
    Exits with 1 if a CUDA error or Ctrl-C ended it early.
    """
    from sglang_sm120.cli import bench as room
    from sglang_sm120.cli import bench_report
    from sglang_sm120.cli import plot as plotting

    if plot is not None:
        plotting.check_path(plot)
    wish = _wish(model, shape, experts, tp, ep, rows, backend, dtype, compile_budget)
    session = room.measure(wish, again=again, quiet=as_json)
    data = bench_report.report(session)
    if as_json:
        typer.echo(json.dumps(redacted(data), indent=2, sort_keys=True))
    else:
        bench_report.render(data)
    if plot is not None and any(result.entry for result in session.results):
        plotting.draw(data, plot)
    if session.ended:
        raise typer.Exit(1)


def tune(
    model: Model = None,
    shape: Shapes = None,
    experts: Experts = None,
    tp: Tp = 1,
    ep: Ep = 1,
    rows: Rows = "",
    backend: Backends = None,
    dtype: Dtype = "bfloat16",
    compile_budget: Budget = 600.0,
    output: Annotated[
        Path | None, typer.Option(help="Write the table here too, to be copied to machines with the same card.")
    ] = None,
    again: Again = False,
    as_json: Json = False,
) -> None:
    """Measure as bench does and write the tuning table that servers read.

    They read it under --fp4-gemm-backend sm120_tuned, and under --moe-runner-backend sm120_tuned for experts.

    What bench or an interrupted run has measured on this card and these versions counts. Exits with 1 if a CUDA error
    or Ctrl-C ended it early; the shapes that were measured in full are in the table then.
    """
    from sglang_sm120.cli import tune as room

    wish = _wish(model, shape, experts, tp, ep, rows, backend, dtype, compile_budget)
    tuned = room.tune(wish, output, again=again, quiet=as_json)
    data = room.report(tuned)
    if as_json:
        typer.echo(json.dumps(redacted(data), indent=2, sort_keys=True))
    else:
        room.render(data)
    if tuned.session.ended or tuned.table is None:
        raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command()(bench)
    app.command()(tune)


def _wish(
    model: Model,
    shape: Shapes,
    experts: Experts,
    tp: Tp,
    ep: Ep,
    rows: Rows,
    backend: Backends,
    dtype: Dtype,
    compile_budget: Budget,
) -> Wish:
    """The options that both commands have."""
    from sglang_sm120.cli.bench import Wish

    shapes, backends, geometries = (tuple(given or ()) for given in (shape, backend, experts))
    return Wish(model, shapes, tp, rows, backends, dtype, compile_budget, experts=geometries, ep=ep)
