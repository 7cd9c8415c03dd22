"""A patched release serves by the new value alone: real servers, this package switched off, answers judged.

On a machine without a GPU ``served`` says what stands in for FlashInfer and for the card. It takes no call with
another backend than the one that the patch is to pass on.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from cpu_host.checkpoints import Spec, linears_per_forward
from cpu_host.server import Server
from sglang_sm120.upstream.catalog import Catalog
from tests.matrix.conftest import ROOT
from tests.patches import releases
from tests.patches.releases import patched, published
from tests.support.checkpoints import Checkpoints
from tests.support.servers import ask, judge, launch
from tools.envs import RELEASES

pytestmark = [pytest.mark.server, pytest.mark.matrix]

WITNESS = Path(__file__).with_name("witness")
SPEC = Spec(format="modelopt", bias=True)
#: SGLang 0.5.13 to 0.5.18 ask for a card of capability 10.0 or more while weights are prepared, and nothing here
#: stands in for that.
SERVED = [name for name in RELEASES if not Version("0.5.13") <= Version(name) < Version("0.5.19")]


@pytest.mark.parametrize("release", SERVED)
def test_a_patched_release_serves_right_without_the_package(release: str, real: Catalog, tmp_path: Path) -> None:
    target, change = patched(published(release), real, tmp_path / "patched", tree=False)
    value = releases.added_values(change)[-1]
    name = releases.NAMES[value]
    checkpoints = Checkpoints(tmp_path)
    folder, evidence = checkpoints.folder(SPEC), tmp_path / "evidence.json"
    environ = {
        "SGLANG_SM120_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(WITNESS), str(target.package.parent), str(ROOT)]),
        **releases.witnessing(change, tmp_path / "witness"),
        "SM120_PATCHED_EVIDENCE": str(evidence),
        "SM120_PATCHED_FLASHINFER": name,
    }
    options = launch(SPEC, folder, tmp_path / "server", environment=f"sglang-{release}", backend=value, environ=environ)
    with Server(options) as server:
        answer = ask(server)
        (counted,) = server.evidence()
        log = server.log()
    facts = json.loads(evidence.read_text())
    releases.check(facts["patched"], target, change)
    assert log.count("patched: sglang.") == len(facts["patched"])
    assert (facts["resolved"], facts["flashinfer_name"], facts["process"]) == (value, name, counted.pid)
    assert facts["hooks"] in ([], ["off"])
    assert "torch_reference" not in facts["values"]
    assert counted.multiplied_by == {"flashinfer": counted.forwards * linears_per_forward(SPEC)}
    comparison = judge(answer, checkpoints.reference(folder))
    assert comparison.agrees, comparison
    other = checkpoints.folder(replace(SPEC, seed=SPEC.seed + 1))
    assert not judge(answer, checkpoints.reference(other)).agrees
