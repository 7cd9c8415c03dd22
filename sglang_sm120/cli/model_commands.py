"""Commands that need a model and no GPU: ``explain``, ``serve-args``, ``check-checkpoint``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_sm120.redact import redacted

#: No machine or cluster that serves one model has more; numbers beyond these are mistakes and would take forever.
MOST_RANKS = 4096
_MOST_TOKENS = 1 << 30

_MODEL_HELP = "A folder or config.json, a hub id that is in the local cache (nothing is downloaded), or a preset."
_CARD_HELP = (
    "The card to predict for, for example rtx-pro-6000, rtx-5090 or dgx-spark. Without it: the one that is here."
)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)]
CardOption = Annotated[str | None, typer.Option("--card", help=_CARD_HELP, show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON without names, paths or secrets of this machine.")]


def explain(
    model: ModelArgument,
    tp: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Tensor-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Groups of ranks that share out whole experts.")] = 1,
    batch: Annotated[int, typer.Option(min=1, max=_MOST_TOKENS, help="Sequences that decode together.")] = 1,
    context: Annotated[
        int, typer.Option(min=0, max=_MOST_TOKENS, help="Tokens that every sequence has behind it.")
    ] = 4096,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="bf16 or fp8. Without it: what the checkpoint has scales for.", show_default=False),
    ] = None,
    card: CardOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the time of one decode step goes on each rank, and which flag can change it. Needs no GPU.

    Every time is predicted from bytes and the bandwidth of the card's data sheet.
    """
    from sglang_sm120.cli.card_option import card_for
    from sglang_sm120.cli.explain_report import render_explain
    from sglang_sm120.errors import ConfigError, bad_value
    from sglang_sm120.models import explain as room
    from sglang_sm120.models.architecture import read_model
    from sglang_sm120.models.budget import Setup
    from sglang_sm120.models.quantization import read_quantization
    from sglang_sm120.models.source import load_source

    source = load_source(model)
    quantization = read_quantization(source.quantization)
    if kv_dtype not in (None, "bf16", "fp8"):
        raise ConfigError(bad_value("--kv-dtype", kv_dtype, "write bf16 or fp8"))
    fp8 = quantization.kv_cache_fp8 if kv_dtype is None else kv_dtype == "fp8"
    setup = Setup(tp, ep, batch, context, kv_bytes=1 if fp8 else 2)
    report = room.explain(source, read_model(source), quantization, card_for(card), setup)
    if as_json:
        _print_json(report)
    else:
        render_explain(report)


def serve_args(
    model: ModelArgument,
    tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="Tensor-parallel ranks. Without it: as many as --gpus allow.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_RANKS, help="Cards to use. Without it: those that are here, else 1.", show_default=False
        ),
    ] = None,
    card: CardOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Parse the command with the installed SGLang's parser.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the launch command for a model on SM12x cards, each flag with its reason and source.

    Written for the SGLang that is installed. Exits with 1 if --check finds that it does not take the command.
    """
    from sglang_sm120.cli import serve_args as command

    report = command.serve_args_report(model, tp=tp, gpus=gpus, card=card, check=check)
    if as_json:
        _print_json(report)
    else:
        command.render_serve_args(report)
    if report["check"] is not None and not report["check"]["accepted"]:
        raise typer.Exit(1)


def check_checkpoint(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder, an index file, or one .safetensors file.")],
    tp: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="Also say what this many ranks cannot share well.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look for bad scales in an NVFP4 checkpoint (ModelOpt or compressed-tensors) of any size. Needs no GPU.

    Reads headers and scales only. Exits with 1 if there is an error; warnings alone exit with 0.
    """
    from sglang_sm120.cli.checkpoint_report import check_with_progress, render_checkpoint

    report = check_with_progress(path, tp, quiet=as_json)
    if as_json:
        _print_json(report)
    else:
        render_checkpoint(report)
    if not report["ok"]:
        raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command()(explain)
    app.command()(serve_args)
    app.command()(check_checkpoint)


def _print_json(report: dict[str, Any]) -> None:
    typer.echo(json.dumps(redacted(report), indent=2, sort_keys=True))
