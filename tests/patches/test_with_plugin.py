"""A patched SGLang and the installed package agree: native values stay native, every hook fits, nothing is doubled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpu_host.checkpoints import Spec, make
from cpu_host.server import free_port
from sglang_sm120.backends import BACKENDS
from sglang_sm120.host.source_probe import package_root
from sglang_sm120.upstream.catalog import Catalog
from sglang_sm120.upstream.operations import Change
from sglang_sm120.upstream.target import Target
from tests.matrix.test_releases import ask_scheduler, command
from tests.patches import releases
from tests.patches.releases import Release, patched, published
from tools.envs import RELEASES

SCRIPT = Path(__file__).with_name("with_plugin.py")
ROOT = Path(__file__).resolve().parents[2]
#: Other series of patches, around what changed in SGLang: 0.5.9 has no plugins and 0.5.11 is the first with them;
#: 0.5.12.post1 has patches 0001 to 0003, 0.5.18 also 0004 and no platform object yet, 0.5.22 also 0005.
OLDER = ("0.5.9", "0.5.11", "0.5.12.post1", "0.5.18", "0.5.22")


def ask(python: str, release: str, target: Target, change: Change, folder: Path) -> dict[str, Any]:
    run = subprocess.run(
        [python, str(SCRIPT), release],
        env={
            **os.environ,
            "PYTHONPATH": f"{target.package.parent}:{ROOT}",
            "SGLANG_USE_CPU_ENGINE": "1",
            **releases.witnessing(change, folder / "witness"),
        },
        cwd=target.package.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert answer["root"] == str(target.package)
    releases.check(answer.pop("evidence"), target, change)
    return answer


def check(answer: dict[str, Any], native: set[str]) -> None:
    assert answer["problems"] == {}
    assert set(answer["states"].values()) <= {"live", "armed", "absent"}, answer["states"]
    assert native <= set(answer["native"]), "the patch made them members of SGLang's own enum"
    registered = answer["registered"].get("values", [])
    added = set(answer["members"]) - set(answer["native"])
    # Where SGLang has a registration the package uses it and leaves the enum alone.
    assert "torch_reference" in (registered or added)
    assert not (registered and added)
    for value in {*native, "torch_reference"}:
        assert answer["choices"].count(value) == 1
    for value in native:
        # The package answers this question for the values that it added; the patched gate asks another one.
        assert value not in answer["tuned"]


def test_the_newest_release(real: Catalog, tmp_path: Path) -> None:
    package = package_root()
    assert package is not None
    target, change = patched(Release("0.5.23", sys.executable, package), real, tmp_path, tree=False)
    answer = ask(sys.executable, "0.5.23", target, change, tmp_path)
    check(answer, {"flashinfer_auto", "flashinfer_b12x"})
    assert (answer["members"]["flashinfer_b12x"], answer["members"]["flashinfer_auto"]) == ("b12x", "auto")
    ours = {b.value for b in BACKENDS.values() if b.implementation is not None}
    assert set(answer["registered"].pop("values")) == ours
    assert answer["registered"] == {"member": "external", "right": True}


@pytest.mark.matrix
@pytest.mark.parametrize("release", OLDER)
def test_an_older_release(
    release: str, real: Catalog, tmp_path: Path, record_sampled: Callable[[str, int, int], None]
) -> None:
    record_sampled("patched with the package", len(OLDER), len(RELEASES) - 1)
    there = published(release)
    target, change = patched(there, real, tmp_path, tree=False)
    answer = ask(there.python, release, target, change, tmp_path)
    native = releases.added_values(change)
    check(answer, set(native))
    assert [answer["members"][value] for value in native] == [releases.NAMES[value] for value in native]
    assert "flashinfer_b12x" in answer["members"], "what a patch does not bring is still added by the package"


@pytest.mark.matrix
@pytest.mark.server
def test_a_spawned_scheduler_of_a_patched_release_resolves_every_value(real: Catalog, tmp_path: Path) -> None:
    package = package_root()
    assert package is not None
    target, change = patched(Release("0.5.23", sys.executable, package), real, tmp_path / "patched", tree=False)
    model = make(tmp_path / "model", Spec(format="modelopt"))
    words = command("launch_server", sys.executable, model, tmp_path, free_port())
    path = os.pathsep.join([str(ROOT / "tests" / "matrix" / "witness"), str(target.package.parent), str(ROOT)])
    watching = releases.witnessing(change, tmp_path / "witness")
    evidence = ask_scheduler(words, tmp_path / "evidence", PYTHONPATH=path, **watching)
    releases.check(evidence["auto"]["patched"], target, change)
    expected = {b.value: "external" for b in BACKENDS.values() if b.implementation is not None}
    expected |= {value: value for value in ("flashinfer_b12x", "flashinfer_auto")}
    for value, member in expected.items():
        found = evidence[value]
        assert found["resolved"] == member, found
        assert found["refusal"] is None
        assert set(found["states"].values()) <= {"live", "absent"}, found["states"]
    assert "10.x" in evidence["flashinfer_trtllm"]["refusal"]
