"""Run inside a release's environment: what its real argument parser makes of every value. Prints one JSON object.

SM120_MATRIX_MOE   folder of MoE configurations; for each, what ``--moe-runner-backend auto`` becomes on an RTX card;
                   and what a runner of ours becomes, for the kinds that we serve in every release
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

RTX = (12, 0)
VERSIONS = {"flashinfer": "0.7.2", "cuda": "13.0"}


def main(model: str, values: list[str]) -> None:
    with contextlib.suppress(ImportError):  # 0.5.9 and 0.5.10 have no plugins
        from sglang.srt.plugins import load_plugins

        load_plugins()
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    result: dict[str, Any] = {"accepted": {}, "refused": {}}
    for value in values:
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                arguments = prepare_server_args(["--model-path", model, "--device", "cpu", "--fp4-gemm-backend", value])
            result["accepted"][value] = arguments.fp4_gemm_runner_backend
        except SystemExit as stop:
            result["refused"][value] = [stop.code, errors.getvalue()[-3000:]]
    import argparse

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    result["help"] = [v for v in values if v in parser.format_help()]
    if "SM120_MATRIX_MOE" in os.environ:
        models = list(Path(os.environ["SM120_MATRIX_MOE"]).iterdir())
        result["moe"] = {model.name: runners(model) for model in models}
        ours = ["--moe-runner-backend", "torch_reference"]
        served = [model for model in models if model.name in ("modelopt_fp4", "compressed-tensors")]
        result["own moe"] = {model.name: [*runners(model, *ours), *named()] for model in served}
    from sglang_sm120 import verify

    result["states"] = {s.name: s.state for s in verify()}
    print(json.dumps(result))


def named() -> tuple[str, str]:
    """What the scheduler would find."""
    from sglang_sm120.host import moe_choice

    return moe_choice.named()


def runners(model: Path, *words: str) -> list[str | None]:
    """Resolve the arguments of a MoE model; return the runners of target and draft."""
    from sglang.srt.server_args import prepare_server_args

    from sglang_sm120.backends.record import HostFacts
    from sglang_sm120.device import installed_versions
    from sglang_sm120.host import moe_resolution

    card = HostFacts(RTX, {**installed_versions(), **VERSIONS})
    moe_resolution.facts_of_arguments = lambda view: card
    arguments = prepare_server_args(["--model-path", str(model), "--device", "cpu", *words])
    resolved: Any = arguments
    if hasattr(arguments, "resolve_once"):  # 0.5.19 and later keep what was resolved beside what was written
        from sglang.srt.arg_groups.model_override_base import resolved_view

        arguments.resolve_once()
        resolved = resolved_view(arguments)
    return [resolved.moe_runner_backend, resolved.speculative_moe_runner_backend]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
