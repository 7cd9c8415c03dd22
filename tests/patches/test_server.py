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

from cpu_host.checkpoints import Spec, linears_per_forward
from cpu_host.server import Launch, Server, ServerError
from sglang_sm120.upstream import operations
from sglang_sm120.upstream.catalog import Catalog
from sglang_sm120.upstream.operations import Change
from sglang_sm120.upstream.target import Target
from tests.matrix.conftest import ROOT
from tests.patches import releases
from tests.patches.releases import patched, published
from tests.support.checkpoints import Checkpoints
from tests.support.servers import ask, judge, launch
from tools.envs import RELEASES

pytestmark = [pytest.mark.server, pytest.mark.matrix]

WITNESS = Path(__file__).with_name("witness")
SPEC = Spec(format="modelopt", bias=True)


def start(release: str, target: Target, change: Change, checkpoint: Path, folder: Path) -> Launch:
    """A server that finds ``target`` first, is asked for the value that ``change`` adds, and writes its evidence."""
    value = releases.added_values(change)[-1]
    environ = {
        "SGLANG_SM120_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(WITNESS), str(target.package.parent), str(ROOT)]),
        **releases.witnessing(change, folder / "witness"),
        "SM120_PATCHED_EVIDENCE": str(folder / "evidence.json"),
        "SM120_PATCHED_FLASHINFER": releases.NAMES[value],
    }
    environment = f"sglang-{release}"
    return launch(SPEC, checkpoint, folder / "server", environment=environment, backend=value, environ=environ)


@pytest.mark.parametrize("release", list(RELEASES))
def test_a_patched_release_serves_right_without_the_package(release: str, real: Catalog, tmp_path: Path) -> None:
    target, change = patched(published(release), real, tmp_path / "patched", tree=False)
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.folder(SPEC)
    options = start(release, target, change, folder, tmp_path)
    with Server(options) as server:
        answer = ask(server)
        (counted,) = server.evidence()
        log = server.log()
    facts = json.loads((tmp_path / "evidence.json").read_text())
    releases.check(facts["patched"], target, change)
    assert log.count("patched: sglang.") == len(facts["patched"])
    name = releases.NAMES[str(options.backend)]
    assert (facts["resolved"], facts["flashinfer_name"]) == (options.backend, name)
    assert facts["process"] == counted.pid
    assert facts["hooks"] in ([], ["off"])
    assert "torch_reference" not in facts["values"]
    assert counted.multiplied_by == {"flashinfer": counted.forwards * linears_per_forward(SPEC)}
    comparison = judge(answer, checkpoints.reference(folder))
    assert comparison.agrees, comparison
    other = checkpoints.folder(replace(SPEC, seed=SPEC.seed + 1))
    assert not judge(answer, checkpoints.reference(other)).agrees


@pytest.mark.parametrize("release", ["0.5.9", "0.5.13", "0.5.23"])
def test_without_the_patch_the_same_server_does_not_know_the_value(release: str, real: Catalog, tmp_path: Path) -> None:
    target, change = patched(published(release), real, tmp_path / "patched", tree=False)
    operations.revert(target)
    options = start(release, target, change, Checkpoints(tmp_path).folder(SPEC), tmp_path)
    refusal = rf"--fp4-gemm-backend: invalid choice: '{options.backend}'"
    with pytest.raises(ServerError, match=refusal), Server(options):
        pass
    assert not (tmp_path / "evidence.json").exists()
