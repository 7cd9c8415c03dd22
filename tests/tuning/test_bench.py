"""``sglang-sm120 bench``: real times on this machine's CPU, kept at once, resumed, and shown."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console

from sglang_sm120 import env
from sglang_sm120.cli import bench, bench_report, plot
from sglang_sm120.errors import ConfigError, RecordError, UnsupportedError
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import results, run, timing
from sglang_sm120.tuning.choice import Timing
from sglang_sm120.tuning.results import Entry
from sglang_sm120.tuning.timing import CompileBudget, Measured
from tests.cli.bare import ROOT
from tests.tuning.conftest import FACTS

SHAPES = ("32x32", "64x32")
pytestmark = pytest.mark.usefixtures("here")


def wish(**changes: Any) -> bench.Wish:
    asked = {"model": None, "shapes": SHAPES, "tp": 1, "rows": "1,3", "backends": (), "dtype": "bfloat16"}
    return bench.Wish(**{"compile_budget": 600.0, **asked, **changes})


def measure(**changes: Any) -> bench.Session:
    again = changes.pop("again", False)
    return bench.measure(wish(**changes), again=again, quiet=True)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The cases that are really measured; a fixed time is returned for each."""
    seen: list[tuple[int, int, int]] = []

    def fake(values: list[str], m: int, n: int, k: int, *rest: object) -> Measured:
        seen.append((m, n, k))
        return Measured({value: Timing(m, m, m) for value in values}, {})

    monkeypatch.setattr(timing, "measure", fake)
    return seen


def test_real_times_of_this_cpu() -> None:
    session = measure()
    assert [(r.m, r.shape.n, r.shape.k) for r in session.results] == [
        (1, 32, 32),
        (3, 32, 32),
        (1, 64, 32),
        (3, 64, 32),
    ]
    for result in session.results:
        assert result.entry is not None
        times = result.entry.timings["torch_reference"]
        assert 0 < times.low <= times.median <= times.high
        assert result.entry.backend == "torch_reference"
    assert session.compile_seconds["torch_reference"] > 0
    assert session.left_out["flashinfer_cutlass"] == "needs a CUDA device"
    kept, _ = results.find(FACTS)
    assert kept is not None
    assert {e.key for e in kept.entries.values()} == {r.entry.key for r in session.results if r.entry}


def test_a_slow_backend_is_seen_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock measures the call and nothing else: a call that waits 5 ms takes at least that."""
    import time

    from sglang_sm120.backends import torch_reference

    monkeypatch.setattr(torch_reference, "linear", lambda x, weight, *rest: time.sleep(0.005) or x.new_zeros(1, 32))
    found = timing.measure(
        ["torch_reference"], 1, 32, 32, torch.bfloat16, torch.device("cpu"), CompileBudget(600.0)
    ).timings["torch_reference"]
    assert found.low >= 5000


def test_an_interrupted_run_keeps_its_results_and_the_next_goes_on(
    counted: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = timing.measure

    def interrupted(values: list[str], m: int, n: int, k: int, *rest: object) -> Measured:
        if (m, n) == (1, 64):
            raise KeyboardInterrupt
        return right(values, m, n, k, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(timing, "measure", interrupted)
    session = measure()
    assert session.ended == "interrupted"
    assert [(r.m, r.shape.n) for r in session.results] == [(1, 32), (3, 32)]
    monkeypatch.setattr(timing, "measure", right)
    counted.clear()
    session = measure()
    assert counted == [(1, 64, 32), (3, 64, 32)]
    assert session.ended == ""
    assert len(session.results) == 4
    measure(again=True)
    assert len(counted) == 6


def test_a_backend_that_is_new_since_the_last_run_is_measured(counted: list[tuple[int, int, int]]) -> None:
    old = Entry(32, 32, "bfloat16", 1, "sm120", {"sm120": Timing(1, 1, 1)})
    results.save(identity_of(FACTS), [old], [])
    measure(shapes=("32x32",), rows="1")
    assert counted == [(1, 32, 32)]


def test_a_case_that_one_backend_cannot_take_is_measured_once(
    counted: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of such a case lack that backend for good; waiting for it would measure it in every run."""
    monkeypatch.setattr(run, "candidates", lambda *_: (["torch_reference", "picky"], {}))
    monkeypatch.setattr(run, "fitting", lambda values, facts, n, k, dtype: values if n == 64 else values[:1])
    monkeypatch.setattr(run, "verdict", lambda *_, **__: MagicMock(status="unsupported", reason="N"))
    monkeypatch.setattr(run, "choose", lambda timings: "torch_reference")
    measure(shapes=("32x32",), rows="1")
    measure(shapes=("32x32",), rows="1")
    assert counted == [(1, 32, 32)]


def test_nothing_is_measured_that_could_not_be_kept(
    counted: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RecordError("no room")

    monkeypatch.setattr(results.records, "require_writable", refuse)
    with pytest.raises(RecordError, match="no room"):
        measure()
    assert counted == []


def test_a_cuda_error_ends_the_run_names_the_case_and_keeps_the_rest(
    counted: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = timing.measure

    def fails(values: list[str], m: int, n: int, k: int, *rest: object) -> Measured:
        if n == 64:
            raise RuntimeError("CUDA error: misaligned address\nfor details see")
        return right(values, m, n, k, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(timing, "measure", fails)
    session = measure()
    assert "M=1 N=64 K=32 with torch_reference: CUDA error: misaligned address for details" in session.ended
    assert len(session.results) == 2


@pytest.mark.parametrize(
    ("error", "name"),
    [(UnsupportedError("no kernel"), "UnsupportedError"), (torch.OutOfMemoryError("no memory"), "OutOfMemoryError")],
)
def test_a_backend_that_refuses_a_case_costs_that_case_only(
    error: Exception, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_sm120.backends import torch_reference

    right = torch_reference.linear

    def linear(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if x.shape[0] == 3:
            raise error
        return right(x, *rest)

    monkeypatch.setattr(torch_reference, "linear", linear)
    session = measure(shapes=("32x32",))
    assert session.ended == ""
    assert [bool(result.entry) for result in session.results] == [True, False]
    assert session.results[1].problems["torch_reference"].startswith(name)
    text = shown(bench_report.report(session))
    assert name in text


def test_a_used_up_compile_budget_leaves_the_backend_out() -> None:
    session = measure(compile_budget=0.0)
    assert session.results[0].entry is not None
    assert session.results[1].problems == {"torch_reference": "its first calls took longer than 0 s"}


def test_calls_rotate_over_copies_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a small weight would be read from the cache and every time would flatter."""
    from sglang_sm120.backends import torch_reference

    seen: list[int] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(weight.data_ptr())
        return x.new_zeros(1, 32)

    monkeypatch.setattr(torch_reference, "linear", linear)
    timing.measure(["torch_reference"], 1, 32, 32, torch.bfloat16, torch.device("cpu"), CompileBudget(600.0))
    first, second = (seen.count(address) for address in dict.fromkeys(seen))
    assert abs(first - second) <= timing.REPEATS + 2, "each repeat may have one call more with the first copy"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "x", "shapes": SHAPES}, "either a MODEL"),
        ({"shapes": ()}, "MODEL or at least one --shape or --experts"),
        ({"dtype": "float32"}, "--dtype='float32'"),
        ({"backends": ("marlin",)}, "--backend='marlin'"),
        ({"backends": ("sm120",)}, "sglang-sm120 probe first"),
        ({"model": "nobody/nothing", "shapes": ()}, "MODEL='nobody/nothing'"),
    ],
)
def test_misuse(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        measure(**changes)
    assert text in str(refusal.value)


def test_the_rows_of_a_cpu_are_few_and_its_times_are_labelled(counted: list[tuple[int, int, int]]) -> None:
    session = measure(shapes=("32x32",), rows="")
    assert [m for m, _, _ in counted] == list(bench.CPU_ROWS)
    assert bench_report.CPU_NOTE in shown(bench_report.report(session))


def shown(data: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200)
    bench_report.render(data, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


RTX_REPORT: dict[str, Any] = {
    "device": {"name": "NVIDIA GeForce RTX 5090", "capability": "12.0"},
    "versions": {"flashinfer": "0.7.2"},
    "note": "",
    "clocks": ["2400 MHz, 50", "2300 MHz, 60"],
    "left_out": {"flashinfer_trtllm": "for 10.x"},
    "left_out_runners": {},
    "compile_seconds": {"flashinfer_cutlass": 12.0},
    "expert_compile_seconds": {},
    "ended": "",
    "kept_in": "somewhere",
    "cases": [
        {
            "n": 256,
            "k": 512,
            "label": "N=256 K=512",
            "layers": ["mlp.down_proj"],
            "m": m,
            "dtype": "bfloat16",
            "fastest": "sm120",
            "timings": {
                "flashinfer_cutlass": {"median": 8.0 * m, "low": 7.0 * m, "high": 9.0 * m},
                "sm120": {"median": 4.0 * m, "low": 3.0 * m, "high": 5.0 * m},
            },
            "problems": {"flashinfer_b12x": "ValueError: no"},
            "floor_us": 1.0 * m,
            "limit": "DRAM",
        }
        for m in (1, 16)
    ],
}


def test_a_table_says_times_spread_share_of_the_limit_and_conditions() -> None:
    text = shown(RTX_REPORT)
    for part in ("N=256 K=512 (mlp.down_proj)", "8.0 ± 1.0", "64.0 ± 16.0", "25 % DRAM", "2300 MHz, 60", "12.0 s"):
        assert part in text
    assert "flashinfer_b12x: ValueError: no" in text
    assert "left out: flashinfer_trtllm (for 10.x)" in text


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A stand-in for matplotlib, which tests do not install; it keeps what was drawn."""
    module = MagicMock()
    panel = MagicMock()
    panel.get_legend_handles_labels.return_value = ([], [])
    module.Figure.return_value.subplots.return_value.flatten.return_value = [panel]
    monkeypatch.setitem(sys.modules, "matplotlib", MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    return module


def test_a_plot_draws_medians_quartiles_and_the_limit(figure: MagicMock, tmp_path: Path) -> None:
    plot.draw(RTX_REPORT, tmp_path / "a.svg")
    (panel,) = figure.Figure.return_value.subplots.return_value.flatten.return_value
    drawn = {call.kwargs["label"]: tuple(map(list, call.args)) for call in panel.plot.call_args_list}
    assert drawn["flashinfer_cutlass"] == ([1, 16], [8.0, 128.0])
    assert drawn["sm120"] == ([1, 16], [4.0, 64.0])
    assert drawn["limit of DRAM or FP4 (data sheet)"] == ([1, 16], [1.0, 16.0])
    assert panel.fill_between.call_args_list[0].args == ([1, 16], [7.0, 112.0], [9.0, 144.0])
    figure.Figure.return_value.savefig.assert_called_once()


@pytest.mark.parametrize("name", ["a.pdf", "a", "missing/a.png"])
def test_a_plot_that_could_not_be_written_is_refused_first(name: str, figure: MagicMock, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--plot="):
        plot.check_path(tmp_path / name)
    plot.check_path(tmp_path / "a.png")


def test_without_matplotlib_a_package_that_exists_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):  # ours is published nowhere
        plot.check_path(tmp_path / "a.png")


def test_the_command_names_what_is_missing(tmp_path: Path) -> None:
    """Nothing was probed: no time is shown, and the next step is named."""
    environment = {**os.environ, env.CACHE_DIR: str(tmp_path / "empty")}
    command = [sys.executable, "-m", "sglang_sm120.cli.main", "bench", "--shape", "32x32", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "Run sglang-sm120 probe first" in done.stderr
    assert done.stdout == ""


def test_json_is_plain_data() -> None:
    data = bench_report.report(measure(shapes=("32x32",), rows="1"))
    assert json.loads(json.dumps(data)) == data
    assert data["cases"][0]["timings"]["torch_reference"]["median"] > 0
    assert data["cases"][0]["floor_us"] is None


@pytest.mark.gpu
def test_graphs_of_a_gpu_are_timed() -> None:
    found = timing.measure(["torch_reference"], 4, 64, 64, torch.bfloat16, torch.device("cuda"), CompileBudget(600.0))
    assert found.problems == {}
    assert found.timings["torch_reference"].median > 1
