"""The tuning table that servers on a GPU are given is made with the commands that users have."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serve import checkpoints, tuning
from benchmarks.serve.checkpoints import Geometry
from sglang_sm120 import env
from sglang_sm120.device import collect_facts
from sglang_sm120.probing import record
from sglang_sm120.probing.record import Outcome
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import table

VALUE = "torch_reference"


def test_a_table_of_one_backend_can_choose_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    model = checkpoints.make(tmp_path / "model", Geometry("tiny", 64, 128, 1, 2, 1, 32, 512), device="cpu")
    record.save(identity_of(collect_facts()), {VALUE: Outcome("ok", "a test")})
    tuning.tune(model, tmp_path / "table.json", VALUE, rows=(1,))
    made = table.read(tmp_path / "table.json")
    assert [shape[:2] for shape in made.shapes] == [(64, 64), (64, 128), (128, 64), (256, 64)]
    assert all(set(entry.timings) == {VALUE} for entry in made.dense.values())


def test_a_command_that_fails_says_what_it_printed() -> None:
    with pytest.raises(RuntimeError, match="probe exited with 2:\n.*no_such_value"):
        tuning.probe("no_such_value")
