"""Run by the interpreter of a release, with a patched SGLang first on its path: prints what that SGLang is and does.

Reads a job from stdin: ``hunks``, a list of (module, lines that a patch put there), and ``tests``, files that the
patches brought. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import io
import json
import sys
import unittest
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    result = {"tests": _run(job["tests"])} if job["tests"] else {}
    from sglang.srt.layers.quantization.fp4_utils import Fp4GemmRunnerBackend
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    action = parser._option_string_actions["--fp4-gemm-backend"]
    return {
        **result,
        "choices": list(action.choices),
        "help": str(action.help),
        "members": {m.value: m.get_flashinfer_backend() for m in Fp4GemmRunnerBackend},
        "evidence": [_evidence(module, lines) for module, lines in job["hunks"]],
        "plugin": "sglang_sm120.host.installer" in sys.modules,
    }


def _evidence(name: str, lines: list[str]) -> dict[str, Any]:
    module = importlib.import_module(name)
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    block = "\n".join(lines)
    found = hashlib.sha256(block.encode()).hexdigest() if block in source else None
    return {"module": name, "file": module.__file__, "hunk": found}


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
