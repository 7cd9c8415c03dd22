"""Run inside a release's environment: what its real argument parser makes of every value. Prints one JSON object."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any


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
    from sglang_sm120 import verify

    result["states"] = {s.name: s.state for s in verify()}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
