"""Commands and exit codes of ``sglang-sm120``.

Exit codes: 0 all is well; 1 the command found something that is not (each says in its help what); 2 it was misused
or could not do its work.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_sm120 import __version__
from sglang_sm120.cli import bench_commands, model_commands, patches
from sglang_sm120.errors import Sm120Error
from sglang_sm120.redact import redacted

app = typer.Typer(
    name="sglang-sm120",
    help="NVFP4 on SM12x GPUs with SGLang: which backends run here, whether they are right and how fast, "
    "and which flags a model needs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON without names, paths or secrets of this machine.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Hold the options that come before a command."""


@app.command()
def backends(as_json: Json = False) -> None:
    """List every value of --fp4-gemm-backend: can it run here, and if not, why and what helps."""
    from sglang_sm120.cli.backends_report import backends_report
    from sglang_sm120.cli.render import render_backends
    from sglang_sm120.device import collect_facts

    report = backends_report(collect_facts())
    if as_json:
        _print_json(report)
    else:
        render_backends(report)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Examine the installation. Exits with 1 if something that was found would stop a server."""
    from sglang_sm120.cli.doctor_report import doctor_report
    from sglang_sm120.cli.render import render_doctor
    from sglang_sm120.cli.snapshot import take_snapshot

    report = doctor_report(take_snapshot())
    if as_json:
        _print_json(report)
    else:
        render_doctor(report)
    if not report["ok"]:
        raise typer.Exit(1)


@app.command()
def probe(
    backend: Annotated[list[str] | None, typer.Argument(help="Values to probe; without one, every value.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each value, compilation included.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Check on this card that each backend computes what it should, each in a process of its own.

    The verdicts are kept for servers on this card and these versions. Exits with 1 if something that was tried did not
    pass, or if a value that was named cannot run here.
    """
    from sglang_sm120.cli import probe as command

    report, code = command.probe(backend or [], timeout, as_json=as_json)
    if as_json:
        _print_json(report)
    else:
        command.render(report)
    if code:
        raise typer.Exit(code)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A file of a wrong or failed call that a server kept.")],
    backend: Annotated[
        str | None, typer.Option(help="Value to run it with, or `quantizer`; without it, the recorded one.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, max=86400, help="Seconds, compilation included.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Run a call that failed in a server, or that SGLANG_SM120_VERIFY found wrong, alone and in a process of its own.

    Of a failed call the operands are random numbers, because no server can keep them then. Exits with 1 if its result
    is wrong here, if it fails, or if it could not be run.
    """
    from sglang_sm120.cli import replay as command

    report, code = command.replay(file, backend, timeout)
    if as_json:
        _print_json(report)
    else:
        command.render(report)
    if code:
        raise typer.Exit(code)


model_commands.add_to(app)
bench_commands.add_to(app)
app.add_typer(patches.app)


def _print_json(report: dict[str, Any]) -> None:
    typer.echo(json.dumps(redacted(report), indent=2, sort_keys=True))


def main() -> None:
    """Run the command line; the entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        # The name of a file may be no text, and a terminal may have no µ: neither may cost the report.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except (Sm120Error, OSError) as error:
        # An OSError names the file and what the system says: no right to read it, a full disk.
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
