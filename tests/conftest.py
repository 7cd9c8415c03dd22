"""What a test run leaves out is counted, and leaving out more than ``skip_ledger.json`` allows fails the run.

The ledger has one entry for each selection, named by its marker expression (``pytest -m``); the entry ``""`` serves
every other run. ``skips`` holds the largest allowed number of skips for each class of reason, where the class is the
text before the first colon: ``pytest.skip("no compiler: g++ was not found")`` counts for ``no compiler``.
``sampled`` holds, for each name given to ``record_sampled``, the smallest allowed share of the cases.
A reason or a name that is not listed is allowed zero times: write it into the ledger, where reviewers see it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

LEDGER = Path(__file__).with_name("skip_ledger.json")
#: Markers of tests that last long, the longest first.
LONG = ("matrix", "server", "long", "slow")


@pytest.fixture
def record_sampled(request: pytest.FixtureRequest) -> Callable[[str, int, int], None]:
    """Report that a test tried only ``tested`` of ``total`` cases: ``record_sampled(name, tested, total)``."""

    def record(name: str, tested: int, total: int) -> None:
        if not 0 < tested <= total:
            raise ValueError(f"record_sampled({name!r}, {tested}, {total}): 0 < tested <= total is needed")
        request.node.user_properties.append(("sampled", (name, tested, total)))

    return record


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What this package logs, and nothing else: SGLang's level depends on which tests ran in this process before."""
    ours = logging.Filter("sglang_sm120")
    caplog.handler.addFilter(ours)
    yield caplog
    caplog.handler.removeFilter(ours)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For operands so small that threads only wait for one another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Ledger:
    """Collects skips and samples during a run and compares them with the ledger at its end."""

    def __init__(self, selection: str) -> None:
        ledger = json.loads(LEDGER.read_text(encoding="utf-8"))
        self.selection = selection if selection in ledger else ""
        self.allowed = ledger[self.selection]
        self.skips: Counter[str] = Counter()
        self.sampled: dict[str, tuple[int, int]] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._count(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # An expected failure is also reported as skipped, but it ran.
        if report.skipped and not hasattr(report, "wasxfail"):
            self._count(report.longrepr)
        if report.when == "teardown":
            for key, value in report.user_properties:
                if key == "sampled":
                    name, tested, total = value
                    # The poorest sample of a name counts, else a good one would hide it.
                    known = self.sampled.get(name, (1, 1))
                    self.sampled[name] = min(known, (tested, total), key=lambda pair: pair[0] / pair[1])

    def _count(self, longrepr: Any) -> None:
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        self.skips[reason.removeprefix("Skipped: ").partition(":")[0].strip()] += 1

    def violations(self) -> Iterator[str]:
        """Say what was left out beyond the allowance."""
        for reason, count in sorted(self.skips.items()):
            allowed = self.allowed["skips"].get(reason, 0)
            if count > allowed:
                yield f"{count} skipped for {reason!r}, allowed are {allowed}"
        for name, (tested, total) in sorted(self.sampled.items()):
            allowed = self.allowed["sampled"].get(name, 1.0)
            if tested / total < allowed:
                yield f"{name!r} tried {tested} of {total} cases ({tested / total:.4g}), needed is a share of {allowed}"

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and any(self.violations()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.skips and not self.sampled:
            return
        terminalreporter.section("left out")
        for reason, count in sorted(self.skips.items()):
            terminalreporter.line(f"skipped: {count} for {reason!r}")
        for name, (tested, total) in sorted(self.sampled.items()):
            terminalreporter.line(f"sampled: {name!r} tried {tested} of {total} cases")
        for violation in self.violations():
            terminalreporter.line(f"FAILED {LEDGER.name}[{self.selection!r}]: {violation}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-results", type=Path, metavar="PATH", help="write what the tests found to this .json file or folder"
    )
    parser.addoption(
        "--e2e-seconds", type=float, default=120.0, metavar="S", help="how long tests of load last, each concurrency"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Under pytest-xdist the workers report to the main process, which counts for all of them.
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(Ledger(config.option.markexpr), "skip-ledger")
    target = config.getoption("--gpu-results")
    if target is not None:
        from tests.support.gpu_results import GpuResults
        from tools.result_files import without_folders

        command = without_folders(["pytest", *config.invocation_params.args])
        kind = "e2e tests" if config.option.markexpr == "e2e" else "gpu tests"
        config.pluginmanager.register(GpuResults(target, kind, command), "gpu-results")


# After the selection by markers, so that a run without GPU tests does not import torch for them.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        _long_files_first(items)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    gpus = _gpus() if on_gpu else 0
    for item in on_gpu:
        if gpus == 0:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif gpus == 1 and item.get_closest_marker("two_gpus"):
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


def _long_files_first(items: list[pytest.Item]) -> None:
    """Put files that start servers and compilers first, so that no worker is left with one when the others are done.

    pytest-xdist alone orders files by their number of tests, and a test of a server lasts a thousand others.
    """
    place: dict[Path, int] = {}
    for item in items:
        known = [LONG.index(mark.name) for mark in item.iter_markers() if mark.name in LONG]
        place[item.path] = min([*known, place.get(item.path, len(LONG))])
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (place[item.path], -counts[item.path]))


def _gpus() -> int:
    if find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
