"""A run that leaves out more than the ledger allows fails, and says what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """An empty project under the conftest of this repository, and a ledger that allows two skips."""
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    allowed = {"skips": {"listed": 2}, "sampled": {"pairs": 0.5}}
    nothing = {"skips": {}, "sampled": {}}
    (pytester.path / "skip_ledger.json").write_text(json.dumps({"": allowed, "strict": nothing}), encoding="utf-8")
    pytester.makeini(
        "[pytest]\nmarkers =\n    gpu: needs a GPU\n    two_gpus: two\n    strict: a selection of its own\n"
    )
    return pytester


def skips(*reasons: str) -> str:
    """A test module in which one test is skipped for each reason."""
    tests = [f"@pytest.mark.strict\ndef test_{n}():\n    pytest.skip({r!r})\n" for n, r in enumerate(reasons)]
    return "import pytest\n\n" + "\n".join(tests)


def test_listed_skips_pass_and_are_counted(project: pytest.Pytester) -> None:
    project.makepyfile(skips("listed: one thing", "listed: another"))
    result = project.runpytest()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*left out*", "skipped: 2 for 'listed'"])
    assert "2 skipped" in result.outlines[-1]


def test_one_skip_too_many_fails(project: pytest.Pytester) -> None:
    project.makepyfile(skips("listed: a", "listed: b", "listed"))
    result = project.runpytest()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED skip_ledger.json*3 skipped for 'listed', allowed are 2"])


def test_unlisted_reason_fails(project: pytest.Pytester) -> None:
    project.makepyfile(skips("somebody was lazy"))
    assert project.runpytest().ret == pytest.ExitCode.TESTS_FAILED


def test_skipped_module_is_counted(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\npytest.importorskip('no_such_module_anywhere')\n")
    project.makepyfile(test_other="def test_runs():\n    pass\n")
    result = project.runpytest()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAILED skip_ledger.json*no_such_module_anywhere*"])


def test_each_selection_has_its_own_allowance(project: pytest.Pytester) -> None:
    project.makepyfile(skips("listed"))
    assert project.runpytest().ret == 0
    assert project.runpytest("-m", "strict").ret == pytest.ExitCode.TESTS_FAILED


def test_expected_failure_is_no_skip(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n\n@pytest.mark.xfail\ndef test_it():\n    assert False\n")
    assert project.runpytest().ret == 0


@pytest.mark.parametrize(
    ("samples", "passes"),
    [
        ([("pairs", 50, 100)], True),
        ([("pairs", 49, 100)], False),
        ([("pairs", 100, 100), ("pairs", 1, 100)], False),
        ([("unlisted", 100, 100)], True),
        ([("unlisted", 99, 100)], False),
    ],
)
def test_shrinking_sample_fails(project: pytest.Pytester, samples: list[tuple[str, int, int]], passes: bool) -> None:
    calls = "\n".join(f"    record_sampled{sample}" for sample in samples)
    project.makepyfile(f"def test_it(record_sampled):\n{calls}\n")
    assert (project.runpytest().ret == 0) is passes


def test_impossible_sample_is_an_error(project: pytest.Pytester) -> None:
    project.makepyfile("def test_it(record_sampled):\n    record_sampled('pairs', 3, 2)\n")
    project.runpytest().assert_outcomes(failed=1)


def test_gpu_tests_are_skipped_without_a_gpu(project: pytest.Pytester) -> None:
    project.makepyfile(torch="class cuda:\n    is_available = staticmethod(lambda: False)\n")
    project.makepyfile("import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    assert False\n")
    result = project.runpytest_subprocess()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["skipped: 1 for 'needs a GPU'"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(("gpus", "outcomes"), [(1, {"passed": 1, "skipped": 1}), (2, {"passed": 2})])
def test_tests_of_two_gpus_are_skipped_with_one(project: pytest.Pytester, gpus: int, outcomes: dict[str, int]) -> None:
    counts = f"    is_available = staticmethod(lambda: True)\n    device_count = staticmethod(lambda: {gpus})\n"
    project.makepyfile(torch=f"class cuda:\n{counts}")
    two = "@pytest.mark.gpu\n@pytest.mark.two_gpus\ndef test_two():\n    pass\n"
    project.makepyfile(f"import pytest\n\n@pytest.mark.gpu\ndef test_one():\n    pass\n\n{two}")
    result = project.runpytest_subprocess()
    result.assert_outcomes(**outcomes)
    assert ("skipped: 1 for 'needs two GPUs'" in result.stdout.lines) == ("skipped" in outcomes)


def test_workers_report_to_one_ledger(project: pytest.Pytester) -> None:
    project.makepyfile(skips("listed: a", "listed: b", "listed: c"))
    result = project.runpytest_subprocess("-n", "2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["skipped: 3 for 'listed'"])
