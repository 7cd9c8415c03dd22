"""The plots of docs/results.md show what the result files say, and a stale or left-over one is noticed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import generate_docs, result_plots
from tools.svg_chart import Axis, Series, line_chart, nice_log_ticks

SVG = "{http://www.w3.org/2000/svg}"


def points(svg: str) -> list[tuple[float, float]]:
    """Where the points are; the marks of the legend are larger."""
    found = [circle.attrib for circle in ElementTree.fromstring(svg).iter(f"{SVG}circle")]
    return [(float(circle["cx"]), float(circle["cy"])) for circle in found if circle["r"] == "3.5"]


def rates(concurrency: int, contender: str, low: float, median: float, high: float) -> dict:
    return {
        "concurrency": concurrency,
        "contender": contender,
        "tokens_per_s": {"low": low, "median": median, "high": high},
    }


def test_a_larger_value_lies_higher_and_further_right() -> None:
    x, y = Axis("x", (1.0, 4.0, 16.0), log=True), Axis("y", (0.0, 10.0))
    series = [Series("a", ((1, 0, 0, 0), (4, 5, 5, 5), (16, 10, 10, 10))), Series("b <&>", ((4, 2, 2, 2),), line=False)]
    (left, bottom), (middle, half), (right, top), (same, lower) = points(line_chart("t", x, y, series))
    assert middle - left == pytest.approx(right - middle)
    assert bottom - half == pytest.approx(half - top)
    assert (same, lower > half) == (middle, True)


def test_ticks_enclose_every_value() -> None:
    assert nice_log_ticks([263.0, 6645.0]) == (200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)
    assert nice_log_ticks([1.0, 1.0]) == (1.0,)


def test_a_burst_without_an_answer_is_left_out() -> None:
    record = {
        "card": "NVIDIA Test 9000",
        "model": {"name": "M", "layers": 2, "experts": 8},
        "rows": [
            rates(1, "sm120", 90, 100, 110),
            rates(64, "sm120", 900, 1000, 1100),
            rates(1, "marlin", 0, 0, 0),
            rates(64, "marlin", 400, 500, 600),
        ],
    }
    assert result_plots.name_of(record) == "serving_moe_nvidia_test_9000.svg"
    (_, few), (_, many), (_, theirs) = points(result_plots.serving(record))
    assert many < theirs < few


def test_plots_are_current_and_none_is_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for page in generate_docs.PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(json.dumps(page), encoding="utf-8")
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    folder = tmp_path / generate_docs.PLOTS
    assert generate_docs.main(["--check"]) == 1, "no plot is there yet"
    assert generate_docs.main([]) == 0
    assert generate_docs.main(["--check"]) == 0
    (folder / "old.svg").write_text("<svg/>", encoding="utf-8")
    assert generate_docs.main(["--check"]) == 1
    assert generate_docs.main([]) == 0
    assert {file.name for file in folder.iterdir()} == set(result_plots.plots())


def test_every_plot_stands_on_the_page() -> None:
    page = (generate_docs.ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(plots/([\w.]+)\)", page)) == sorted(result_plots.plots())
