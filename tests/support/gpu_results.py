"""Write what a run of the GPU tests found to a result file: passed, failed and skipped tests for each test file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120.records import NO_CAPABILITY, Identity
from tools import result_files

OUTCOMES = ("passed", "failed", "skipped")


class GpuResults:
    """Collects outcomes during a run and writes them at its end.

    Args:
        target: a ``.json`` file, or the folder for one.
        kind: of the file, ``gpu tests`` or ``e2e tests``.
        command: how the run was started.
        ask: gives card and versions; called at the end, when the tests have initialised CUDA anyway.
    """

    def __init__(
        self, target: Path, kind: str, command: str, ask: Callable[[], Identity] = result_files.this_machine
    ) -> None:
        self.target, self.kind, self.command, self.ask = target, kind, command, ask
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.message = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[_file(report.nodeid)] += report.duration  # type: ignore[assignment]
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.outcomes[report.nodeid] = "skipped"
        elif report.when == "call":
            self.outcomes[report.nodeid] = "passed"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"

    def record(self, identity: Identity) -> dict[str, Any]:
        """What is written."""
        files: dict[str, Any] = {}
        for node, outcome in sorted(self.outcomes.items()):
            name = _file(node)
            counts = files.setdefault(name, {**dict.fromkeys(OUTCOMES, 0), "seconds": round(self.seconds[name], 1)})
            counts[outcome] += 1
        total = {outcome: sum(counts[outcome] for counts in files.values()) for outcome in OUTCOMES}
        failures = sorted(node for node, outcome in self.outcomes.items() if outcome == "failed")
        header = result_files.header(self.kind, self.command, identity)
        return {**header, "total": total, "failures": failures, "files": files}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        identity = self.ask()
        if identity.capability == NO_CAPABILITY:
            self.message = "no result file was written: there is no GPU"
        elif not self.outcomes:
            self.message = "no result file was written: no test ran"
        else:
            self.message = f"results written to {result_files.write(self.target, self.record(identity)).name}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.line(self.message)


def _file(node: str) -> str:
    return node.partition("::")[0]
