"""The file of a failed call is read strictly, and made again in a process of its own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_sm120 import env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.cli import replay as command
from sglang_sm120.cli.main import app
from sglang_sm120.errors import ConfigError, RecordError, UnsupportedError
from sglang_sm120.probing import child, children
from sglang_sm120.probing.children import Job
from sglang_sm120.probing.record import Outcome
from sglang_sm120.records import Identity
from sglang_sm120.verification import failed_file, replay
from sglang_sm120.verification.failed_file import DenseFacts, ExpertFacts
from sglang_sm120.verification.failed_replay import failed_again

CPU = HostFacts(capability=None)
DENSE = DenseFacts("linear", 3, (40, 24), 96, "bfloat16", one_alpha=False, bias=True)
EXPERTS = ExpertFacts(4, 6, 3, 2, 64, 32, "silu", gate_first=True, dtype="float16")
IDENTITY = Identity("a card", "12.0", {"torch": "2.13"})
PLANTED = "tests.verification.calls:"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache" / failed_file.FOLDER


def write(
    call: DenseFacts | ExpertFacts = DENSE, error: Exception | None = None, backend: str = "torch_reference"
) -> Path:
    raised = error or RuntimeError("CUDA error: misaligned address")
    return failed_file.write(call, backend, "model.layers.3.mlp.down_proj", raised, IDENTITY)


@pytest.mark.parametrize(
    "call", [DENSE, replace(DENSE, operation="gemm", widths=(16,), one_alpha=True), EXPERTS], ids=lambda c: c.operation
)
def test_what_was_written_is_read(call: DenseFacts | ExpertFacts) -> None:
    found = replay.read(write(call))
    assert isinstance(found, failed_file.FailedCall)
    assert (found.call, found.backend, found.layer) == (call, "torch_reference", "model.layers.3.mlp.down_proj")
    assert (found.error, found.said, found.identity) == ("RuntimeError", "CUDA error: misaligned address", IDENTITY)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (replace(DENSE, m=0), "m=0"),
        (replace(DENSE, dtype="float32"), "dtype='float32'"),
        (replace(DENSE, widths=(2**20,), k=2**20), "more than 4294967296 are not made"),
        (replace(EXPERTS, inner=2**20, hidden=2**14), "more than 4294967296 are not made"),
    ],
)
def test_what_could_not_be_read_is_not_written(call: DenseFacts | ExpertFacts, words: str, folder: Path) -> None:
    with pytest.raises(RecordError, match=words):
        write(call)
    assert not folder.exists()


def changed(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda told: told.update(values)


def call(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda told: told["call"].update(values)


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a newer format": (changed(schema=2), "format version 2"),
    "another kind": (changed(kind="probe record"), "kind='probe record', expected is one of wrong call, failed call"),
    "an unknown field": (changed(path="/etc/passwd"), "unknown fields: path"),
    "an unknown field of the call": (call(weights="x"), "unknown fields: weights"),
    "an unknown operation": (changed(operation="exec"), "operation='exec'"),
    "sizes of the other kind": (changed(operation="moe"), "no field activation"),
    "no backend": (lambda told: told.pop("backend"), "no field backend"),
    "no call": (changed(call=[]), "no JSON object"),
    "no rows": (call(m=0), "m=0, expected is an integer from 1"),
    "half a row": (call(m=1.5), "m=1.5"),
    "a truth for a number": (call(m=True), "m=True"),
    "too many rows": (call(m=2**20 + 1), "m=1048577"),
    "no product": (call(widths=[]), "0 widths, expected are 1 to 64"),
    "too many products": (call(widths=[16] * 65), "65 widths"),
    "a width of nothing": (call(widths=[16, 0]), r"widths=\[16, 0\]"),
    "one width": (call(widths=16), "widths=16"),
    "an odd K": (call(k=40), "k=40, which is no multiple of 16"),
    "too much memory": (call(widths=[2**20] * 64, k=960), "more than 4294967296 are not made"),
    "another type": (call(dtype="float64"), "dtype='float64'"),
    "a word for a truth": (call(bias="no"), "bias='no'"),
    "a seed below nothing": (changed(seed=-1), "seed=-1"),
    "colours": (changed(said="\x1b[31m"), "control characters in said"),
    "an odd identity": (changed(identity={"card": "x"}), "no field versions"),
}
BAD_EXPERTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "more here than there are": (call(local=7), "local=7, expected is an integer from 1 to 6"),
    "more for a token than there are": (call(top_k=7), "top_k=7"),
    "too many": (call(experts=2**14 + 1), "experts=16385"),
    "an odd I": (call(inner=40), "inner=40, which is no multiple of 16"),
    "another activation": (call(activation="gelu"), "activation='gelu'"),
    "too much memory": (call(hidden=2**20, inner=2**14), "more than 4294967296 are not made"),
}


@pytest.mark.parametrize(("facts", "what"), [(DENSE, what) for what in BAD] + [(EXPERTS, what) for what in BAD_EXPERTS])
def test_a_bad_file_is_refused_with_one_error(facts: DenseFacts | ExpertFacts, what: str) -> None:
    spoil, text = (BAD if facts is DENSE else BAD_EXPERTS)[what]
    path = write(facts)
    told = json.loads(path.read_text())
    spoil(told)
    path.write_text(json.dumps(told))
    with pytest.raises(RecordError, match=text):
        replay.read(path)


def test_spoilt_and_foreign_files_are_refused() -> None:
    path = write()
    whole = path.read_text()
    for text in (whole[:-10], "[]", whole.replace('"seed"', '"seed": 1, "seed"')):
        path.write_text(text)
        with pytest.raises(RecordError):
            replay.read(path)
    path.write_text(whole)
    path.chmod(0o666)
    with pytest.raises(RecordError, match="chmod go-w"):
        replay.read(path)


def in_this_process(monkeypatch: pytest.MonkeyPatch, factory: str = "") -> None:
    """The child's part of the work without a process; a factory of ``calls.py`` plants a fault."""

    def run(job: Job, timeout: float) -> Outcome:
        planted = replace(job, factory=PLANTED + factory) if factory else job
        status: Any
        status, reason = child.run_job(json.loads(json.dumps(planted.to_json())), lambda **_: None)
        return Outcome(status, children.one_line(reason))

    monkeypatch.setattr(children, "run", run)


@pytest.mark.parametrize(
    ("facts", "error", "factory", "verdict", "words"),
    [
        (DENSE, RuntimeError("x"), "", "right here, with these versions and random operands", "max error"),
        (DENSE, RuntimeError("x"), "negated", "wrong", "linear M=3 N=64 K=96, call 1 of N=40: "),
        (DENSE, RuntimeError("x"), "failing", "failed again", "linear M=3 N=64 K=96, call 1 of N=40: RuntimeError: "),
        (DENSE, UnsupportedError("x"), "refusing", "failed again", "call 1 of N=40: UnsupportedError: no kernel"),
        (DENSE, RuntimeError("x"), "refusing", "unsupported", "call 1 of N=40: UnsupportedError: no kernel"),
        (DENSE, RuntimeError("x"), "without_memory", "crash", "out of memory"),
        (EXPERTS, RuntimeError("x"), "shifted_ids", "wrong", "moe M=4 E=6 local=3 top_k=2 H=64 I=32 silu, call 1: "),
        (EXPERTS, RuntimeError("x"), "failing_experts", "failed again", "I=32 silu, call 1: RuntimeError: misaligned"),
    ],
)  # fmt: skip
def test_the_verdict_says_whether_it_failed_again(
    facts: DenseFacts | ExpertFacts, error: Exception, factory: str, verdict: str, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    in_this_process(monkeypatch, factory)
    report, code = command.replay(write(facts, error), None, 300)
    assert report["verdict"] == verdict, report
    assert words in report["outcome"]["reason"]
    assert code == (0 if "right" in verdict else 1)


def test_two_replays_compute_the_same_and_two_errors_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    first, again, other = (
        command.replay(write(error=RuntimeError(text)), None, 300)[0] for text in ("one", "one", "two")
    )
    assert first == again
    assert first["call"]["seed"] != other["call"]["seed"]
    assert first["outcome"]["reason"] != other["outcome"]["reason"]


def test_the_command_makes_the_call_again_in_a_process_of_its_own() -> None:
    path = write()
    result = CliRunner().invoke(app, ["replay", str(path), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["call"]["failed"] == "RuntimeError: CUDA error: misaligned address"
    assert (report["call"]["m"], report["call"]["n"], report["call"]["k"]) == (3, 64, 96)
    assert any(text.startswith("card a card") for text in report["differences"])
    screen = io.StringIO()
    command.render(report, Console(file=screen, width=200))
    lines = screen.getvalue().splitlines()
    assert lines[0] == "model.layers.3.mlp.down_proj: linear M=3 N=64 K=96"
    assert lines[1] == "in the server, torch_reference: RuntimeError: CUDA error: misaligned address"
    assert lines[2] == f"the operands are random numbers, seed {report['call']['seed']}"
    assert lines[-1].startswith("here, torch_reference: right here, with these versions and random operands: max error")


def test_a_call_that_kills_its_process_failed_again() -> None:
    path = write(EXPERTS)
    outcome = replay.run(path, None, CPU, 300, factory=PLANTED + "killed_experts")
    assert (outcome.status, outcome.reason) == (
        "crash", "moe M=4 E=6 local=3 top_k=2 H=64 I=32 silu, call 1: killed by SIGSEGV",
    )  # fmt: skip
    case = replay.read(path)
    assert isinstance(case, failed_file.FailedCall)
    assert failed_again(case, outcome)


def test_what_cannot_run_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--backend='sm120_tuned'.*torch_reference"):
        replay.run(write(backend="sm120_tuned"), None, CPU, 300)
    with pytest.raises(ConfigError, match="--backend='cutlass'.*sm120, torch_reference"):
        replay.run(write(EXPERTS), "cutlass", CPU, 300)
    for path in (write(), write(EXPERTS)):
        assert replay.run(path, "flashinfer_cutlass", CPU, 300).status == "unsupported"
