"""Every supported SGLang release, as published, in the processes that really serve.

Each test starts the release's own command; the scheduler process that it spawns testifies (see ``witness``).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from sglang_sm120 import env
from sglang_sm120.backends import BACKENDS
from sglang_sm120.host.conventions import CONVENTIONS
from sglang_sm120.host.seams import SEAMS
from sglang_sm120.host.watch_seams import WATCH_SEAMS
from tests.matrix.conftest import ROOT, interpreter_of
from tests.matrix.values import DEADLINE, OURS
from tools.envs import RELEASES

pytestmark = pytest.mark.matrix

PLUGINS_SINCE = Version("0.5.11")

#: Asking whether the model is a diffusion model, this release's ``sglang serve`` imports the packages of its extra
#: ``diffusion``. Without them it serves nothing, with or without us.
SERVES_WITH_ITS_DIFFUSION_EXTRA_ONLY = ("0.5.9", "sglang serve")

SERVER = ["--model-path", "{model}", "--device", "cpu", "--quantization", "modelopt_fp4"]
SERVER += ["--fp4-gemm-backend", "torch_reference", "--attention-backend", "torch_native"]
SERVER += ["--max-total-tokens", "2048", "--host", "127.0.0.1", "--port", "{port}"]
ENGINE = """
import sys
import sglang
if __name__ == "__main__":
    sglang.Engine(model_path=sys.argv[1], device="cpu", quantization="modelopt_fp4", max_total_tokens=2048,
                  fp4_gemm_runner_backend="torch_reference", attention_backend="torch_native")
"""


def command(kind: str, python: str, model: Path, scratch: Path, port: int) -> list[str]:
    words = [w.format(model=model, port=port) for w in SERVER]
    if kind == "Engine":
        script = scratch / "engine.py"
        script.write_text(ENGINE)
        return [python, str(script), str(model)]
    if kind == "sglang serve":
        return [str(Path(python).parent / "sglang"), "serve", *words]
    return [python, "-m", "sglang.launch_server", *words]


def ask_scheduler(words: list[str], evidence: Path, **env: str) -> dict[str, Any]:
    """Start ``words``, wait until its scheduler has testified, stop everything, return the evidence by value."""
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": str(ROOT / "tests" / "matrix" / "witness"),
        "SM120_MATRIX_EVIDENCE": str(evidence),
        **env,
    }
    log = evidence.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            words, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=evidence.parent
        )
        try:
            _wait(process, evidence, log)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                assert process.poll() is not None
            process.wait()
    return {p.stem: json.loads(p.read_text()) for p in evidence.glob("*.json")}


def _wait(process: subprocess.Popen[bytes], evidence: Path, log: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not (evidence / "complete").exists():
        ended = process.poll() is not None
        assert not ended or (evidence / "complete").exists(), f"ended without testimony:\n{log.read_text()[-6000:]}"
        assert time.monotonic() < end, f"no testimony within {DEADLINE} s:\n{log.read_text()[-6000:]}"
        time.sleep(0.1)


def check(evidence: dict[str, Any], release: str) -> None:
    """Accepted, resolved, verified; one process per value."""
    version = Version(release)
    check_expert_layers(evidence.pop("moe")["runners"], version)
    experts = evidence.pop("experts")
    assert experts["equal"] == {"ModelOpt": [True] * 3, "compressed-tensors": [True] * 2}
    check_part_of_experts(experts["a part of them"], version)
    assert set(evidence) == {"auto", *BACKENDS}
    for value in OURS:
        facts = evidence[value]
        assert facts.get("resolved") == value, facts
        assert facts["is_member"]
        assert facts["flashinfer_name"] == (BACKENDS[value].flashinfer_name or value)
    assert "10.x" in evidence["flashinfer_trtllm"]["refusal"]
    assert [v for v in OURS if evidence[v]["refusal"] is not None] == []
    # 0.5.9 cannot tell its default from the flag, so only an explicit auto is ours there; here it is explicit.
    expected_auto = "flashinfer_cutlass" if version >= Version("0.5.13") else "flashinfer_cudnn"
    assert evidence["auto"]["resolved"] == expected_auto, evidence["auto"]
    unknown = {value for value, facts in evidence.items() if "unknown to SGLang" in facts}
    assert unknown <= {"cutlass", "marlin", "flashinfer_trtllm"} - set(OURS)
    for facts in (f for value, f in evidence.items() if value not in unknown):
        waiting = {name for name, state in facts["states"].items() if state not in ("live", "absent")}
        assert waiting <= {seam.name for seam in SEAMS if seam.on_demand}, facts["states"]
        assert {facts["states"][name] for name in waiting} <= {"armed"}, facts["states"]
        assert {name for name, state in facts["states"].items() if state == "absent"} == absent_in(version)
    assert len({facts["pid"] for facts in evidence.values() if "pid" in facts}) >= len(OURS)


def check_part_of_experts(refusal: str, version: Version) -> None:
    """Expert parallelism with compressed-tensors under ``auto`` is refused where SGLang numbers the experts wrongly."""
    if version == Version("0.5.16"):
        assert "sglang#32430" in refusal  # gate and up are swapped there, on one rank too
        return
    wrong = Version("0.5.17") <= version < Version("0.5.23")
    assert ("every rank but the first add nothing" in refusal) == wrong, refusal
    assert ("use --moe-runner-backend flashinfer_cutlass instead" in refusal) == wrong, refusal
    assert bool(refusal) == wrong


def check_expert_layers(found: dict[str, dict[str, str]], version: Version) -> None:
    """On an RTX card: TensorRT-LLM and CuTe DSL are refused, CUTLASS is not, and auto only where it ends badly.

    Except that one release swaps gate and up of compressed-tensors.
    """
    swapped = {"compressed-tensors"} if version == Version("0.5.16") else set()
    routed = found.pop("flashinfer_trtllm_routed")
    assert ("unknown to SGLang" in routed) == (version < Version("0.5.10"))
    for value, classes in found.items():
        refused = {name for name, text in classes.items() if text.startswith("refused: ")}
        for name in refused:
            assert f"--moe-runner-backend={value!r}" in classes[name]
            assert ("10.x" in classes[name]) or (name in swapped and "sglang#32430" in classes[name])
        expected = {
            "auto": swapped | ({"ModelOpt"} if version >= Version("0.5.16") else set()),
            "flashinfer_cutlass": swapped,
            "flashinfer_trtllm": {"ModelOpt", "compressed-tensors", "unquantized"},
            "flashinfer_cutedsl": swapped | {"ModelOpt"},
        }[value]
        assert refused == expected, (value, classes)
    if version >= Version("0.5.10"):
        assert routed["ModelOpt"].startswith("refused: ")


def check_watched(evidence: dict[str, Any], version: Version) -> None:
    """Where a server is to be checked, every release has the seams for it. Takes their states out of the evidence."""
    others = ("decode", "prefill", "CPU") if version < Version("0.5.14") else ("all", "piecewise", "CPU, old")
    absent = {f"graphs ({kind})" for kind in others}
    absent |= set() if Version("0.5.11") <= version < Version("0.5.14") else {"graphs (breakable)"}
    draft_names = "" if version < Version("0.5.14") else ", old"
    absent |= {f"graphs (draft, {kind}{draft_names})" for kind in ("decode", "extend", "layers", "frozen")}
    absent |= {"graphs (draft, frozen, old)"} if version < Version("0.5.12") else set()
    absent |= set() if version >= Version("0.5.20") else {"watch pre-emption"}
    absent |= {f"watch ({c.label})" for c in CONVENTIONS if c.since is not None and version < c.since}
    for facts in evidence.values():
        states = facts.get("states", {})
        found = {seam.name: states.pop(seam.name) for seam in WATCH_SEAMS if seam.name in states}
        assert {name for name, state in found.items() if state == "absent"} == (absent if states else set())
        assert {state for name, state in found.items() if not name.startswith("graphs")} <= {"live", "absent"}, found
        assert set(found.values()) <= {"live", "armed", "absent"}, found


def absent_in(version: Version) -> set[str]:
    """Seams whose code a release does not have, by the release that brought it."""
    absent = set() if version >= Version("0.5.20") else {"pre-emption"}
    absent |= set() if version >= Version("0.5.16") else {"moe draft runner"}
    absent |= {"moe value"} if version >= Version("0.5.15") else {"lm_head", "moe runner"}
    operators = {"operators (experts)", "operators (dense)", "operators (module)"}
    absent |= operators if version >= Version("0.5.16") else set()
    absent |= {"operators (module)"} if version < Version("0.5.10") else set()
    for convention in CONVENTIONS:
        if convention.since is not None and Version(version.base_version) < convention.since:
            absent |= {f"weights ({convention.label})", f"apply ({convention.label})"}
    return absent


def test_a_spawned_scheduler_has_every_value(release: str, checkpoint: Path, tmp_path: Path, unused_port: int) -> None:
    kind = "sglang serve"
    if (release, kind) == SERVES_WITH_ITS_DIFFUSION_EXTRA_ONLY:
        kind = "launch_server"
    words = command(kind, interpreter_of(release), checkpoint, tmp_path, unused_port)
    check(ask_scheduler(words, tmp_path / "evidence"), release)


def test_the_release_whose_serve_command_needs_an_extra_still_does(
    checkpoint: Path, tmp_path: Path, unused_port: int
) -> None:
    release, kind = SERVES_WITH_ITS_DIFFUSION_EXTRA_ONLY
    words = command(kind, interpreter_of(release), checkpoint, tmp_path, unused_port)
    with pytest.raises(AssertionError, match=r"No module named 'remote_pdb'"):
        ask_scheduler(words, tmp_path / "evidence", SGLANG_SM120_DISABLE="1")


def test_an_engine_has_every_value_and_the_boot_hook_alone_is_enough(
    release: str, checkpoint: Path, tmp_path: Path, unused_port: int
) -> None:
    words = command("Engine", interpreter_of(release), checkpoint, tmp_path, unused_port)
    asked = {"SM120_MATRIX_WITHOUT": "entry point", env.VERIFY: "8"}
    evidence = ask_scheduler(words, tmp_path / "evidence", **asked)
    check_watched(evidence, Version(release))
    check(evidence, release)


#: The plugin loader did not change from 0.5.11 to 0.5.23, so the first, the last and two between stand for all.
WITH_ENTRY_POINT_ONLY = ["0.5.11", "0.5.16", "0.5.20", "0.5.23"]


@pytest.mark.parametrize("release", WITH_ENTRY_POINT_ONLY)
def test_the_entry_point_alone_is_enough(
    release: str,
    checkpoint: Path,
    tmp_path: Path,
    unused_port: int,
    record_sampled: Callable[[str, int, int], None],
) -> None:
    record_sampled("entry point alone", len(WITH_ENTRY_POINT_ONLY), sum(Version(r) >= PLUGINS_SINCE for r in RELEASES))
    words = command("launch_server", interpreter_of(release), checkpoint, tmp_path, unused_port)
    check(ask_scheduler(words, tmp_path / "evidence", SM120_MATRIX_WITHOUT="boot"), release)


@pytest.mark.parametrize("release", [r for r in RELEASES if Version(r) < PLUGINS_SINCE])
def test_before_plugins_existed_only_the_boot_hook_brings_us_in(
    release: str, checkpoint: Path, tmp_path: Path, unused_port: int
) -> None:
    words = command("launch_server", interpreter_of(release), checkpoint, tmp_path, unused_port)
    with pytest.raises(AssertionError, match="invalid choice: 'torch_reference'"):
        ask_scheduler(words, tmp_path / "evidence", SM120_MATRIX_WITHOUT="boot")


def test_nothing_but_the_autotune_gate_asks_the_predicate_that_we_extend(release: str) -> None:
    """``is_flashinfer_cutlass`` answers yes for FlashInfer's new values so that they are autotuned. If a release
    asks it anywhere else, that answer would do something that we do not know."""
    python = interpreter_of(release)
    where = "import importlib.util as u; print(next(iter(u.find_spec('sglang').submodule_search_locations)))"
    root = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    gates = {"flashinfer_autotune.py", "base_runner.py", "model_runner.py"}
    for file in root.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if re.search(r"get_fp4_gemm_runner_backend\(\)\s*\.is_flashinfer_cutlass\(\)", text):
            assert file.name in gates, f"SGLang {release}: {file.relative_to(root)} asks is_flashinfer_cutlass"
