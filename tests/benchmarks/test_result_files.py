"""Result files say what ran and nothing about the machine; the tables of docs/results.md are what they say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import checkpoints
from sglang_sm120.records import NO_CAPABILITY, Identity
from tests.support.gpu_results import GpuResults
from tools import result_files, result_tables

CARD = Identity("NVIDIA Test 9000", "9.0", {"torch": "2.11.0", "driver": "580.1", "sglang": "0.5.16"})
TESTS = """
    import pytest

    def test_right(): pass
    def test_wrong(): assert 0
    def test_left_out(): pytest.skip("why: not")

    @pytest.fixture
    def broken_end():
        yield
        raise RuntimeError("late")

    def test_right_until_its_end(broken_end): pass
"""


@pytest.fixture
def results(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The file that a run of :data:`TESTS` and a right file leaves."""
    monkeypatch.setenv(result_files.COMMIT_VARIABLE, "0123456789abcdef")
    pytester.makepyfile(test_mixed=TESTS, test_good="def test_one(): pass\ndef test_two(): pass\n")
    plugin = GpuResults(pytester.path / "out", "gpu tests", "pytest -m gpu", lambda: CARD)
    run = pytester.runpytest_inprocess(plugins=[plugin])
    run.stdout.fnmatch_lines(["results written to gpu_tests_nvidia_test_9000.json"])
    (file,) = (pytester.path / "out").iterdir()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_outcomes_are_counted_by_file(results: dict[str, Any]) -> None:
    assert results["total"] == {"passed": 3, "failed": 2, "skipped": 1}
    counts = {name: Counter(file) for name, file in results["files"].items()}
    assert counts["test_good.py"]["passed"] == 2
    assert {key: counts["test_mixed.py"][key] for key in ("passed", "failed", "skipped")} == {
        "passed": 1, "failed": 2, "skipped": 1,
    }  # fmt: skip
    assert results["failures"] == ["test_mixed.py::test_right_until_its_end", "test_mixed.py::test_wrong"]


def test_the_file_says_what_ran_where(results: dict[str, Any]) -> None:
    assert (results["card"], results["capability"], results["command"]) == (CARD.card, "9.0", "pytest -m gpu")
    assert results["versions"] == dict(CARD.versions)
    assert results["commit"] == "0123456789abcdef"


def test_nothing_is_written_without_a_gpu(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_one(): pass")
    nothing = Identity("no CUDA device", NO_CAPABILITY, {})
    plugin = GpuResults(pytester.path / "out", "gpu tests", "pytest", lambda: nothing)
    pytester.runpytest_inprocess(plugins=[plugin]).stdout.fnmatch_lines(["no result file was written: there is no GPU"])
    assert not (pytester.path / "out").exists()


def serving_record() -> dict[str, Any]:
    def spread(median: float) -> dict[str, float]:
        return {"median": median, "low": median - 1, "high": median + 1}

    def row(contender: str, rate: float) -> dict[str, Any]:
        measures = {"tokens_per_s": spread(rate), "ttft_ms": spread(20.0), "per_token_ms": spread(3.0)}
        return {"concurrency": 16, "contender": contender, "repeats": 3, **measures, "requests": 48, "errors": []}

    profile = {"steps": 10, "step_us": 4000.0, "shares": {"FP4 GEMM": 0.5, "no kernel runs": 0.5}, "kernels": []}
    return {
        **result_files.header("serving", "serving.py", CARD),
        "model": checkpoints.description(checkpoints.GEOMETRIES["dense"]),
        "load": {"input_tokens": 128, "output_tokens": 256, "repeats": 3, "waves": 1, "concurrency": [16]},
        "contenders": {"sm120": {"ready_s": 60.0}, "humming": {"error": "ImportError: no humming"}},
        "rows": [row("sm120", 300.0), row("marlin", 200.0)],
        "profiles": {"sm120": {"16": profile}, "marlin": {"16": {"error": "RuntimeError: no trace"}}},
    }


def test_tables_show_every_file(tmp_path: Path, results: dict[str, Any]) -> None:
    for name in (result_tables.gpu_tests, result_tables.serving, result_tables.profiles, result_tables.kernels):
        assert name(tmp_path) == result_tables.NOTHING
    result_files.write(tmp_path, results)
    result_files.write(tmp_path, {**results, "card": "Another"})
    result_files.write(tmp_path, serving_record())
    tests = result_tables.gpu_tests(tmp_path)
    assert tests.count("3 passed, 2 failed, 1 skipped") == 2
    assert tests.count("| `test_good.py` | 2 | 0 | 0 |") == 2
    assert "`test_mixed.py::test_wrong`" in tests
    served = result_tables.serving(tmp_path)
    assert "| 16 | `marlin` | 200 (199 – 201) | 1.50 | 20.0 (19.0 – 21.0) | 3.00 (2.00 – 4.00) | 0 |" in served
    assert "`humming` is left out: ImportError: no humming" in served
    shares = result_tables.profiles(tmp_path)
    assert "| `sm120` | 16 | 4.00 | FP4 GEMM 50%, no kernel runs 50% |" in shares
    assert "RuntimeError: no trace" in shares


def test_other_kernels_are_multiples_of_ours(tmp_path: Path) -> None:
    rows = [{"M": 1, "N": n, "K": 64, "pdl": 1.0, "plain": 2.0, "humming": time} for n, time in ((8, 2.0), (16, 8.0))]
    text = json.dumps({"card": "X", "rows": [*rows, {"M": 8, "N": 8, "K": 64, "pdl": 1.0, "plain": 1.0}]})
    (tmp_path / "gemm_x.json").write_text(text)
    assert "| gemm_x.json | X | 1 | humming | 2 | 4.00 | 2.00 | 2.00 | 1.00 |" in result_tables.kernels(tmp_path)


def test_a_goal_is_met_or_missed_by_the_best_other_value(tmp_path: Path) -> None:
    record = serving_record()
    better = {**record["rows"][1], "contender": "humming"}
    record["rows"].append({**better, "tokens_per_s": {"median": 250.0, "low": 250.0, "high": 250.0}})
    result_files.write(tmp_path / "dense.json", record)
    experts = {**record, "model": {**record["model"], "name": "experts", "experts": 8}}
    result_files.write(tmp_path / "moe.json", experts)
    alone = {**record, "rows": record["rows"][:1]}
    result_files.write(tmp_path / "alone.json", alone)
    lines = result_tables.goals(tmp_path).splitlines()[2:]
    assert lines == [
        "| Qwen3-8B geometry | 16 | 1.2 | 1.20 | met | FP4 GEMM 50%, no kernel runs 50% |",
        "| experts | 16 | 1.3 | 1.20 | **missed** | FP4 GEMM 50%, no kernel runs 50% |",
    ]


def test_a_file_of_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(ValueError, match=r"old\.json"):
        list(result_files.read_all("serving", tmp_path))


def test_a_result_file_names_no_folder() -> None:
    given = ["serving.py", "--json", "/home/ann/x/out.json", "--folder=/data/run", "tests/gpu", "https://a/b"]
    assert result_files.without_folders(given) == "serving.py --json out.json --folder=run tests/gpu https://a/b"


def test_what_a_server_said_before_it_died_names_no_folder(tmp_path: Path) -> None:
    record = serving_record()
    record["contenders"]["humming"] = {"error": "OSError: /home/ann/models/x is missing"}
    record["rows"][0]["errors"] = ["HTTP 500: no file /data/run/model.json"]
    text = result_files.write(tmp_path / "out.json", record).read_text(encoding="utf-8")
    assert "OSError: <path> is missing" in text
    assert "/home/ann" not in text
    assert "/data/run" not in text
