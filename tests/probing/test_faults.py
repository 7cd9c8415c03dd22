"""Every planted fault costs its own backend only and is named.

What ends or stops a process is tried in real child processes, as in ``sglang-sm120 probe``. Wrong numbers and errors
are judged by the child's own function in this process, because a child spends its time importing torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120.probing import child, children
from sglang_sm120.probing.children import Job
from sglang_sm120.probing.plan import Plan
from sglang_sm120.probing.record import Outcome
from tests.cli.bare import ROOT
from tests.probing.faulty import FAULTS

PLAN = Plan(rows=(1, 33), shapes=((128, 256), (96, 160)), widths=(160,), repeats=1, burst=4)
FACTORY = "tests.probing.faulty:make"

#: Verdict, and what its one line must say, by fault.
EXPECTED = {
    "none": ("ok", "steps"),
    "none, quantizer alone": ("ok", "2 steps"),
    "none, noisy": ("ok", "steps"),
    "zeros": ("wrong", "(zeros)"),
    "NaN": ("wrong", "NaN"),
    "one NaN": ("wrong", "is nan"),
    "unwritten rows": ("wrong", "GEMM M=1 N=128"),
    "stale rows": ("wrong", "M=33"),
    "linear scales read as swizzled": ("wrong", "GEMM M=1 N=128 K=256"),
    "only M=33": ("wrong", "GEMM M=33"),
    "only M=47, which no probe tries": ("ok", "steps"),
    "only after 1,000 calls": ("ok", "steps"),
    "last block of K dropped": ("wrong", "GEMM M=1"),
    "bias forgotten": ("wrong", "GEMM M=1"),
    "one alpha for all columns": ("wrong", "GEMM M=1"),
    "alpha squared": ("wrong", "a wrong global scale"),
    "rounded twice": ("wrong", "GEMM M=1"),
    "two columns swapped": ("wrong", "GEMM M=1"),
    "wrong shape": ("wrong", "shape (1, 127) instead of (1, 128)"),
    "fused operator forgets the scale": ("wrong", "linear M=1"),
    "race with the quantizer": ("wrong", "4 launches in a row"),
    "quantizer: zero scales for M=33": ("wrong", "quantizer M=33 K=160: "),
    "quantizer: NaN padding": ("wrong", "padded columns are NaN"),
    "quantizer: scales not swizzled": ("wrong", "block scales are wrong"),
    "quantizer: one wrong code": ("wrong", "column 6"),
    "segfault": ("crash", "GEMM M=1 N=128 K=256 bfloat16: killed by SIGSEGV"),
    "out of memory": ("crash", "out of memory: cannot allocate 8 GiB"),
    "CUDA error": ("crash", "CUDA error: an illegal memory access was encountered"),
    "refuses": ("unsupported", "no kernel image"),
    "refuses by ValueError": ("unsupported", "GEMM M=1 N=128 K=256 bfloat16: ValueError: needs CUDA 13"),
    "refuses as FlashInfer does": ("unsupported", "BackendSupportedError: not on 120"),
    "refuses M=33 only": ("crash", "GEMM M=33 N=128 K=256 bfloat16: ValueError"),
    "import fails": ("unsupported", "no_such_package_of_a_backend"),
    "hang": ("timeout", "in step GEMM M=1 N=128 K=256"),
    "hang after the verdict": ("timeout", "after its verdict"),
    "crash after the verdict": ("crash", "after its verdict: killed by SIGSEGV"),
}


#: Planted, and not noticed: the verdict is about the sizes that were tried, and about a few calls of each.
MISSED = {"only M=47, which no probe tries", "only after 1,000 calls"}

#: What goes through a real child.
IN_CHILD = {"none, noisy", "zeros", "segfault", "hang", "hang after the verdict", "crash after the verdict"}
PROCESS = "tests.probing.faulty_process:make"


def run(fault: str, timeout: float = 300.0) -> Outcome:
    return children.run(Job(fault, PLAN, "cpu", FACTORY), timeout)


@pytest.fixture(scope="module")
def patience() -> float:
    """Seconds after which a child that does nothing wrong has surely ended: most of them are the import of torch."""
    return max(6.0, 3 * run("none, quantizer alone").seconds)


def judged_here(fault: str) -> Outcome:
    status, reason = child.run_job(Job(fault, PLAN, "cpu", FACTORY).to_json(), lambda **message: None)
    return Outcome(status, children.one_line(reason))  # type: ignore[arg-type]


def test_every_fault_has_an_expectation() -> None:
    assert EXPECTED.keys() == FAULTS.keys()
    right = {fault for fault in EXPECTED if fault.startswith("none")}
    assert {fault for fault, (status, _) in EXPECTED.items() if status == "ok"} == right | MISSED


def test_the_guide_has_the_rate_and_every_miss() -> None:
    lines = [
        f"| {fault} | {'**missed**' if fault in MISSED else f'`{status}`'} |"
        for fault, (status, _) in EXPECTED.items()
        if not fault.startswith("none")
    ]
    table = "\n".join(["| planted below the interface | verdict |", "|---|---|", *lines])
    rate = f"Of {len(lines)} faults that the tests plant, the probe finds {len(lines) - len(MISSED)}"
    guide = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert rate in guide
    assert table in guide, f"docs/tuning.md must hold\n{table}"


@pytest.mark.parametrize("fault", EXPECTED)
def test_verdict(fault: str, patience: float) -> None:
    status, text = EXPECTED[fault]
    limit = patience if status == "timeout" else 300.0
    outcome = run(fault, limit) if fault in IN_CHILD else judged_here(fault)
    assert outcome.status == status, outcome.reason
    assert text in outcome.reason
    assert "\n" not in outcome.reason


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("SIGILL", "import: killed by SIGILL"),
        ("SIGKILL", "killed by SIGKILL (the system's out-of-memory killer does this)"),
        ("SIGABRT", "killed by SIGABRT"),
        ("exit", "import: exit code 3"),
    ],
)
def test_a_process_that_ends_early(end: str, text: str) -> None:
    outcome = children.run(Job(end, PLAN, "cpu", PROCESS), 300.0)
    assert outcome.status == "crash"
    assert text in outcome.reason


def test_what_a_hanging_child_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that hangs must not stay behind."""
    monkeypatch.setenv("SM120_TEST_FOLDER", str(tmp_path))
    outcome = children.run(Job("grandchild", PLAN, "cpu", PROCESS), 5.0)
    assert outcome.status == "timeout"
    number = int((tmp_path / "pid").read_text())
    _wait_until(lambda: not _lives(number))


def test_a_child_that_cannot_be_killed_is_left_behind_as_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process inside a driver that hangs takes no signal; here none is sent to it."""
    monkeypatch.setenv("SM120_TEST_FOLDER", str(tmp_path))
    monkeypatch.setattr(children, "_SECONDS_TO_DIE", 0.2)
    killpg = os.killpg
    monkeypatch.setattr(children.os, "killpg", lambda group, signal: None)
    groups: list[int] = []
    start = children._start

    def noted(*args: Any) -> subprocess.Popen[bytes]:
        process = start(*args)
        groups.append(process.pid)
        return process

    monkeypatch.setattr(children, "_start", noted)
    try:
        outcome = children.run(Job("short sleep", PLAN, "cpu", PROCESS), 1.0)
        assert outcome.status == "timeout"
        assert f"its process {groups[0]} cannot be killed" in outcome.reason
        assert [record.args[0] for record in caplog.records if record.args] == groups
    finally:
        killpg(groups[0], signal.SIGKILL)


def test_a_child_ends_with_the_command_that_was_killed(tmp_path: Path) -> None:
    """It leads a session of its own, so only the kernel can tell it."""
    code = (
        "from sglang_sm120.probing import children; from sglang_sm120.probing.plan import Plan; "
        f"children.run(children.Job('sleep', Plan((), (), ()), 'cpu', {PROCESS!r}), 300.0)"
    )
    environment = {**os.environ, "SM120_TEST_FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment) as command:
        try:
            _wait_until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text() != "")
            number = int((tmp_path / "pid").read_text())
            assert _lives(number)
        finally:
            command.kill()
    _wait_until(lambda: not _lives(number))


def test_a_child_finds_nothing_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert run("none, quantizer alone").status == "ok"


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(number: int) -> bool:
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z" and os.path.exists(f"/proc/{number}")
