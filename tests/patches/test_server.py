"""A real server of the patched release without the package: the new value arrives in its scheduler.

That the patch alone then serves needs a GPU: every value that a patch adds is a kernel of FlashInfer's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpu_host.checkpoints import Spec, make
from cpu_host.server import free_port
from sglang_sm120.host.source_probe import package_root
from sglang_sm120.upstream.catalog import Catalog
from tests.matrix.conftest import ROOT
from tests.patches import releases
from tests.patches.releases import Release, patched

WITNESS = Path(__file__).with_name("witness")
DEADLINE = 420


@pytest.mark.server
def test_the_scheduler_resolves_the_value_of_a_patch(real: Catalog, tmp_path: Path) -> None:
    package = package_root()
    assert package is not None
    target, change = patched(Release("0.5.23", sys.executable, package), real, tmp_path / "patched", tree=False)
    model = make(tmp_path / "model", Spec(format="modelopt"))
    evidence, log = tmp_path / "evidence.json", tmp_path / "server.log"
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
    words += ["--quantization", "modelopt_fp4", "--fp4-gemm-backend", "flashinfer_b12x"]
    words += ["--attention-backend", "torch_native", "--max-total-tokens", "2048", "--port", str(free_port())]
    environ = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_SM120_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(WITNESS), str(target.package.parent), str(ROOT)]),
        **releases.witnessing(change, tmp_path / "witness"),
        "SM120_PATCHED_EVIDENCE": str(evidence),
    }
    with log.open("w") as output:
        server = subprocess.Popen(
            words, env=environ, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            end = time.monotonic() + DEADLINE
            while not evidence.exists():
                assert server.poll() is None or evidence.exists(), log.read_text()[-6000:]
                assert time.monotonic() < end, log.read_text()[-6000:]
                time.sleep(0.1)
        finally:
            try:
                os.killpg(server.pid, signal.SIGKILL)
            except ProcessLookupError:
                assert server.poll() is not None
            server.wait()
    facts = json.loads(evidence.read_text())
    assert facts["process"] != server.pid
    releases.check(facts["patched"], target, change)
    assert (facts["resolved"], facts["flashinfer_name"]) == ("flashinfer_b12x", "b12x")
    assert facts["hooks"] in ([], ["off"])
