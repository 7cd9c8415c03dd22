"""Under pytest-xdist, files of long tests start first: the last file then ends soon after the other worker is done."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
FIRST = ("matrix", "server", "long", "slow")
MARKED = "import pytest\n\n@pytest.mark.{}\ndef test_marked():\n    pass\n\ndef test_other():\n    pass\n"


def test_markers_of_long_tests_come_before_the_number_of_tests(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    (pytester.path / "skip_ledger.json").write_text('{"": {"skips": {}, "sampled": {}}}', encoding="utf-8")
    pytester.makeini("[pytest]\nmarkers =\n" + "".join(f"    {marker}: x\n" for marker in FIRST))
    pytester.makepyfile(
        test_few="def test_one():\n    pass\n",
        test_many="".join(f"def test_{n}():\n    pass\n\n" for n in range(5)),
        **{f"test_{marker}": MARKED.format(marker) for marker in reversed(FIRST)},
    )
    run = pytester.runpytest("-v", "-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")
    run.assert_outcomes(passed=14)
    started = [line.split("::")[0].rpartition(" ")[2] for line in run.outlines if "PASSED" in line]
    assert list(dict.fromkeys(started)) == [f"test_{name}.py" for name in (*FIRST, "many", "few")]
