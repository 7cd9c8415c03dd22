"""After a CUDA error the device answers no more; the layer says who failed all the same, and leaves a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sm120 import env

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
#: A layer serves, an assertion of another kernel ends the context of the device, and the layer is called again.
SERVED = """
import torch
from sglang_sm120.device import collect_facts
from tests.host.conftest import Serving
from tests.host.linear_layers import make_case
from tests.support.nvfp4 import fresh_generator

Serving().decide("torch_reference", facts=collect_facts())
case = make_case("modelopt", 1024, [512], fresh_generator(), device="cuda")
x = torch.ones(4, 1024, dtype=torch.bfloat16, device="cuda")
case.run(x)
torch.ones(4, device="cuda")[torch.tensor([9], device="cuda")]
try:
    torch.cuda.synchronize()
except RuntimeError:
    print("broken")
case.run(x)
"""


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, env.CACHE_DIR: str(cache), "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], env=environ, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_file_is_left_and_a_fresh_process_finds_the_call_right(tmp_path: Path) -> None:
    server = run("-c", SERVED, cache=tmp_path / "cache")
    assert "broken" in server.stdout, server.stdout + server.stderr
    failed = (
        r"BackendError: torch_reference failed in Module \(N=512\), M=4 N=512 K=1024: .* sglang-sm120 replay (\S+)\n"
    )
    named = re.search(failed, server.stderr, re.DOTALL)
    assert named, server.stderr
    replay = run("-m", "sglang_sm120.cli.main", "replay", named[1], "--json", cache=tmp_path / "cache")
    assert replay.returncode == 0, replay.stdout + replay.stderr
    report = json.loads(replay.stdout)
    assert report["verdict"].startswith("right here")
    assert report["differences"] == []
    assert "CUDA" in report["call"]["failed"]
