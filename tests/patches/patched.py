"""Run by the interpreter of a release, with a patched SGLang first on its path: prints what that SGLang is and does.

Reads from stdin the files of the tests that the patches brought. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
import unittest
from typing import Any


def main(tests: list[str]) -> dict[str, Any]:
    result = {"tests": _run(tests)} if tests else {}
    from sglang.srt.layers.quantization.fp4_utils import Fp4GemmRunnerBackend
    from sglang.srt.server_args import ServerArgs

    from tests.patches import evidence

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    action = parser._option_string_actions["--fp4-gemm-backend"]
    return {
        **result,
        "choices": list(action.choices),
        "help": str(action.help),
        "members": {m.value: m.get_flashinfer_backend() for m in Fp4GemmRunnerBackend},
        "evidence": evidence.found(),
        "plugin": "sglang_sm120.host.installer" in sys.modules,
    }


def _run(files: list[str]) -> dict[str, Any]:
    suite = unittest.TestSuite()
    for number, file in enumerate(files):
        spec = importlib.util.spec_from_file_location(f"upstream_test_{number}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    report = io.StringIO()
    outcome = unittest.TextTestRunner(stream=report, verbosity=2).run(suite)
    return {"run": outcome.testsRun, "ok": outcome.wasSuccessful(), "report": report.getvalue()[-6000:]}


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
