"""``sglang-sm120 tune``: from times to a table, for whole shapes only, resumed after an interruption."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_sm120 import device, env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.cli import tune as room
from sglang_sm120.cli.bench import Wish
from sglang_sm120.device import collect_facts
from sglang_sm120.errors import RecordError
from sglang_sm120.models.source import presets
from sglang_sm120.probing import record
from sglang_sm120.probing.record import Outcome
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import results, run, table, timing
from sglang_sm120.tuning.cases import ROWS, shapes_of_model
from sglang_sm120.tuning.choice import Timing
from sglang_sm120.tuning.expert_cases import experts_of_model
from sglang_sm120.tuning.results import Entry
from sglang_sm120.tuning.timing import Measured
from tests.cli.bare import ROOT

FACTS = HostFacts(None, {"torch": "2.13.0"})


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A CPU on which the oracle passed its probe; the cases that are measured, in times that are made up."""
    seen: list[tuple[int, int]] = []

    def fake(values: list[str], m: int, n: int, k: int, *rest: object) -> Measured:
        if (m, n) == (3, 64) and not seen.count((3, 64)):
            seen.append((m, n))
            raise KeyboardInterrupt
        seen.append((m, n))
        return Measured({value: Timing(m, m, m) for value in values}, {})

    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(device, "collect_facts", lambda: FACTS)
    monkeypatch.setattr(timing, "measure", fake)
    record.save(identity_of(FACTS), {"torch_reference": Outcome("ok", "test")})
    return seen


def tune(output: Path | None = None, **changes: Any) -> room.Tuned:
    asked = {"model": None, "shapes": ("32x32", "64x32"), "tp": 1, "rows": "1,3", "backends": (), "dtype": "bfloat16"}
    return room.tune(Wish(**{"compile_budget": 600.0, **asked, **changes}), output, again=False, quiet=True)


def test_a_shape_enters_the_table_once_every_m_was_measured(counted: list[tuple[int, int]]) -> None:
    tuned = tune()
    assert tuned.session.ended == "interrupted"
    assert [shape.n for shape in tuned.unfinished] == [64]
    assert tuned.table is not None
    assert tuned.table.shapes == [(32, 32, "bfloat16")]
    data = room.report(tuned)
    assert data["unfinished"] == [{"n": 64, "k": 32, "label": "N=64 K=32"}]
    assert [shape["n"] for shape in data["shapes"]] == [32]

    counted.clear()
    counted.append((3, 64))
    tuned = tune()
    assert counted == [(3, 64), (3, 64)], "what was measured before is not measured again"
    assert tuned.unfinished == ()
    assert tuned.table is not None
    assert tuned.table.shapes == [(32, 32, "bfloat16"), (64, 32, "bfloat16")]


def test_times_of_backends_that_are_not_asked_for_do_not_choose(counted: list[tuple[int, int]]) -> None:
    """An earlier run may have timed one that failed its probe since."""
    timings = {"torch_reference": Timing(9, 9, 9), "sm120": Timing(1, 1, 1)}
    results.save(identity_of(FACTS), [Entry(32, 32, "bfloat16", 1, "sm120", timings)], [])
    tuned = tune(shapes=("32x32",), rows="1")
    assert counted == []
    assert tuned.table is not None
    assert tuned.table.choices(32, 32, "bfloat16", table.CANDIDATES) == {1: "torch_reference"}


def test_the_report_says_who_serves_what_and_where_the_table_lies(
    counted: list[tuple[int, int]], tmp_path: Path
) -> None:
    tuned = tune(tmp_path / "copy.json", shapes=("32x32",))
    data = room.report(tuned)
    assert data["shapes"][0]["choices"] == {"1": "torch_reference", "3": "torch_reference"}
    assert data["shapes"][0]["batch_invariant"] is True
    assert json.loads(json.dumps(data)) == data
    assert table.read(tmp_path / "copy.json") == tuned.table
    console = Console(file=io.StringIO(), width=200)
    room.render(data, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("N=32 K=32: every M torch_reference", "copy.json", "--fp4-gemm-backend sm120_tuned", "tuning"):
        assert part in text


def test_nothing_is_measured_that_could_not_be_kept(counted: list[tuple[int, int]], tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for output in (blocked / "copy.json", tmp_path):  # a folder is no file
        with pytest.raises(RecordError, match="cannot be written: .*; name another file"):
            tune(output)
    assert counted == []


def test_the_oracle_is_timed_only_where_nothing_else_is() -> None:
    assert run.without_oracle(["sm120", "torch_reference"], {"marlin": "x"}) == (
        ["sm120"],
        {"marlin": "x", "torch_reference": "runs anywhere and wins nowhere"},
    )
    assert run.without_oracle(["torch_reference"], {}) == (["torch_reference"], {})


def test_a_model_of_sixty_layers_is_measured_within_three_minutes() -> None:
    """Predicted: layers share shapes, so what counts is their number. The worst preset, all backends of an RTX card."""
    backends = [value for value in table.CANDIDATES if value != "torch_reference"]
    runners = [value for value in table.RUNNERS if value != "torch_reference"]
    counts = {name: (len(shapes_of_model(name, 1)), len(experts_of_model(name, 1, 1))) for name in presets()}
    assert max(dense for dense, _ in counts.values()) >= 4
    assert max(experts for _, experts in counts.values()) >= 1
    most = max(dense * len(backends) + experts * len(runners) for dense, experts in counts.values())
    assert run.estimate(most * len(ROWS), 1) < 180


def test_the_command_measures_this_cpu_resumes_after_ctrl_c_and_writes_what_a_server_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    facts = collect_facts()
    record.save(identity_of(facts), {"torch_reference": Outcome("ok", "test")})
    shapes = [f"{n}x32" for n in range(32, 32 * 33, 32)]
    words = [word for shape in shapes for word in ("--shape", shape)]
    command = [sys.executable, "-m", "sglang_sm120.cli.main", "tune", *words, "--rows", "1", "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    kept = results.results_path(identity_of(facts))
    # A shell that runs tests in the background ignores Ctrl-C for them, and their children inherit that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed
    ) as process:
        end = time.monotonic() + 200
        while not kept.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 1, err.decode()
    first = json.loads(out)
    assert first["bench"]["ended"] == "interrupted"
    assert first["unfinished"]
    measured = results.read(kept).entries

    copy = tmp_path / "copy.json"
    done = subprocess.run(
        [*command, "--output", str(copy)], cwd=ROOT, env=environment, capture_output=True, timeout=400
    )
    assert done.returncode == 0, done.stderr.decode()
    assert len(json.loads(done.stdout)["shapes"]) == len(shapes)
    assert str(tmp_path).encode() not in done.stdout
    found, problem = table.find(facts)
    assert problem == ""
    assert found is not None
    assert len(found.shapes) == len(shapes)
    assert table.read(copy) == found
    assert f"--shape {shapes[0]}" in found.command
    assert str(tmp_path) not in copy.read_text()
    for key, entry in measured.items():
        assert found.dense[key] == entry, "what was measured before the interruption was measured again"
