"""The tuning table: whole shapes, choices that follow from times, strict reading, and what is believed by whom."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120 import env, records
from sglang_sm120.errors import ConfigError, RecordError
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import table
from sglang_sm120.tuning.choice import Timing, choose
from sglang_sm120.tuning.results import Entry
from sglang_sm120.tuning.table import CANDIDATES, by_rows, find, read, save, spans
from tests.dispatch.machines import RTX, SPARK, machine

FACTS = machine(RTX)
COMMAND = ["sglang-sm120", "tune", "some/model", "--tp", "2"]


def entry(m: int, n: int = 128, k: int = 256, **times: float) -> Entry:
    timings = {value: Timing(t, t, t) for value, t in (times or {"sm120": 1.0, "flashinfer_b12x": 2.0}).items()}
    return Entry(n, k, "bfloat16", m, choose(timings), timings)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache"


def path() -> Path:
    return table.table_path(identity_of(FACTS))


def test_what_was_saved_is_found_with_its_provenance() -> None:
    save(identity_of(FACTS), [entry(1), entry(8)], COMMAND)
    found, problem = find(FACTS)
    assert found is not None
    assert problem == ""
    assert found.dense == {entry(1).key: entry(1), entry(8).key: entry(8)}
    assert found.command == "sglang-sm120 tune some/model --tp 2"
    assert found.identity == identity_of(FACTS)
    assert found.created.endswith("Z")
    assert found.shapes == [(128, 256, "bfloat16")]


def test_a_shape_that_is_measured_again_is_replaced_as_a_whole_and_others_stay() -> None:
    """Its M may be others; an old one between two new ones would be a choice of another day."""
    save(identity_of(FACTS), [entry(1), entry(8), entry(16)], COMMAND)
    save(identity_of(FACTS), [entry(4, n=64)], COMMAND)
    made = save(identity_of(FACTS), [entry(2), entry(32)], COMMAND)
    assert sorted(made.dense) == [entry(4, n=64).key, entry(2).key, entry(32).key]


def test_equal_choices_have_equal_digests_whenever_they_were_written() -> None:
    first = save(identity_of(FACTS), [entry(1)], COMMAND)
    assert replace(first, created="another day", command="another").digest == first.digest
    assert replace(first, dense={entry(2).key: entry(2)}).digest != first.digest
    assert replace(first, identity=identity_of(machine(SPARK))).digest != first.digest


def test_a_choice_is_the_best_of_what_may_serve() -> None:
    made = save(identity_of(FACTS), [entry(1, sm120=1, flashinfer_b12x=2, flashinfer_cutlass=2)], COMMAND)
    usable = {"flashinfer_b12x", "flashinfer_cutlass"}
    assert made.choices(128, 256, "bfloat16", {*usable, "sm120"}) == {1: "sm120"}
    assert made.choices(128, 256, "bfloat16", usable) == {1: "flashinfer_cutlass"}, "a tie goes to the more trusted"
    assert made.choices(128, 256, "bfloat16", {"torch_reference"}) == {}
    assert made.choices(128, 256, "float16", usable) == {}
    assert made.choices(256, 128, "bfloat16", usable) == {}


def test_an_m_between_two_measured_ones_takes_the_choice_of_the_larger() -> None:
    by_m = by_rows({2: "a", 4: "b", 8: "c"})
    assert by_m == ["a", "a", "a", "b", "b", "c", "c", "c", "c"]
    assert by_m[-1] == "c", "the last one serves any larger M"


def test_spans_say_where_the_choice_changes_and_that_results_depend_on_m() -> None:
    assert spans({1: "a", 8: "a"}) == "every M a"
    assert spans({1: "a", 4: "a", 8: "b", 16: "c", 32: "c"}).startswith("M<=4 a, M<=8 b, above c (")
    assert "not batch-invariant" in spans({1: "a", 8: "b"})


def test_only_what_takes_the_prepared_weights_is_a_candidate() -> None:
    assert set(CANDIDATES) == {
        "flashinfer_cutlass", "flashinfer_cudnn", "flashinfer_b12x", "flashinfer_cutedsl", "flashinfer_auto", "sm120",
        "torch_reference",
    }  # fmt: skip


def test_a_stale_table_is_ignored_with_the_difference_and_the_command() -> None:
    save(identity_of(FACTS), [entry(1)], COMMAND)
    found, problem = find(machine(RTX, driver="590.10", flashinfer="0.7.4"))
    assert found is None
    assert "driver 580.95.05 → 590.10, flashinfer 0.7.2 → 0.7.4" in problem
    assert problem.endswith("Run again: sglang-sm120 tune some/model --tp 2")


def test_without_a_table_the_command_is_named() -> None:
    found, problem = find(FACTS)
    assert found is None
    assert "There is no tuning table" in problem
    assert "sglang-sm120 tune" in problem


def test_a_copy_serves_another_machine_with_the_same_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "shipped.json"
    made = save(identity_of(FACTS), [entry(1)], COMMAND, copy)
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "another"))
    monkeypatch.setenv(env.TUNING_TABLE, str(copy))
    assert find(FACTS) == (made, "")


def test_a_named_table_of_another_card_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "shipped.json"
    save(identity_of(FACTS), [entry(1)], COMMAND, copy)
    monkeypatch.setenv(env.TUNING_TABLE, str(copy))
    for other in (machine(SPARK), replace(FACTS, device_name="NVIDIA GeForce RTX 5090")):
        with pytest.raises(
            ConfigError, match=r"SGLANG_SM120_TUNING_TABLE=.*measured on a card that is not here \(12.0\)"
        ):
            find(other)
    found, problem = find(machine(RTX, driver="590.10"))
    assert found is None
    assert "driver 580.95.05 → 590.10" in problem


@pytest.mark.parametrize("text", ["shipped.json", "/nowhere/shipped.json"])
def test_a_named_table_that_is_not_there_stops_the_start(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.TUNING_TABLE, text)
    with pytest.raises(ConfigError, match=f"SGLANG_SM120_TUNING_TABLE='{text}'"):
        find(FACTS)


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(where: Path) -> None:
        value = json.loads(where.read_text())
        change(value)
        where.write_text(json.dumps(value))

    return spoil


def _fifo(where: Path) -> None:
    where.unlink()
    os.mkfifo(where)


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut off": (lambda where: where.write_text(where.read_text()[:-40]), "no strict JSON"),
    "empty": (lambda where: where.write_text(""), "no strict JSON"),
    "no text": (lambda where: where.write_bytes(b"\xff\xfe\x00"), "no strict JSON"),
    "too large": (lambda where: where.write_text(" " * (records.MAX_BYTES + 1)), "is larger than"),
    "a field twice": (lambda where: where.write_text('{"schema": 1, "schema": 1}'), "stands there twice"),
    "not a number": (lambda where: where.write_text(where.read_text().replace("1.0", "NaN", 1)), "no number"),
    "a list": (lambda where: where.write_text("[]"), "no JSON object"),
    "a pipe": (_fifo, "no regular file"),
    "others may write": (lambda where: where.chmod(0o666), "written by other users"),
    "an unknown format": (_edit(lambda v: v.update(schema=3)), "format version 3"),
    "of a release before experts": (
        _edit(lambda v: (v.update(schema=1), v.pop("experts"))),
        "format version 1 and this package reads 2",
    ),
    "results of bench": (_edit(lambda v: v.update(kind="bench results")), "kind='bench results'"),
    "a case twice": (_edit(lambda v: v["dense"].append(v["dense"][0])), "repeats the case"),
    "a winner against its times": (_edit(lambda v: v["dense"][0].update(backend="flashinfer_b12x")), "does not follow"),
    "an unknown backend": (
        _edit(lambda v: v["dense"][0]["timings"].update(os=v["dense"][0]["timings"]["sm120"])),
        "names 'os'",
    ),
    "a backend for whole servers only": (
        _edit(lambda v: v["dense"][0]["timings"].update(marlin=v["dense"][0]["timings"]["flashinfer_b12x"])),
        "names 'marlin'",
    ),
    "itself": (
        _edit(lambda v: v["dense"][0]["timings"].update(sm120_tuned=v["dense"][0]["timings"]["flashinfer_b12x"])),
        "names 'sm120_tuned'",
    ),
    "M of zero": (_edit(lambda v: v["dense"][0].update(m=0)), "m=0"),
    "M that would fill the memory of a server": (_edit(lambda v: v["dense"][0].update(m=2**31)), "m=2147483648"),
    "text that steers a terminal": (_edit(lambda v: v.update(command="\x1b]0;x\x07")), "control characters"),
    "a name that steers a terminal": (_edit(lambda v: v["identity"]["versions"].update({"a\nb": "1"})), "'a\\nb'"),
    "half a character": (_edit(lambda v: v.update(created="\ud800")), "control characters"),
    "a field too many": (_edit(lambda v: v.update(run="rm -rf /")), "unknown fields: run"),
    "a missing field": (_edit(lambda v: v.pop("identity")), "no field identity"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_table_is_refused_by_name_and_counts_as_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(identity_of(FACTS), [entry(1)], COMMAND)
    spoil, text = SPOILT[name]
    spoil(path())
    with pytest.raises(RecordError) as refusal:
        read(path())
    assert text in str(refusal.value)
    found, problem = find(FACTS)
    assert found is None
    assert text in problem
    monkeypatch.setenv(env.TUNING_TABLE, str(path()))
    with pytest.raises(ConfigError, match="SGLANG_SM120_TUNING_TABLE") as stop:
        find(FACTS)
    assert text in str(stop.value)


def test_a_table_under_another_machines_name_is_not_believed() -> None:
    save(identity_of(machine(RTX, driver="590.10")), [entry(1)], COMMAND)
    table.table_path(identity_of(machine(RTX, driver="590.10"))).rename(path())
    found, problem = find(FACTS)
    assert found is None
    assert "another machine" in problem


def test_a_folder_that_others_may_write_to_is_not_read(cache: Path) -> None:
    save(identity_of(FACTS), [entry(1)], COMMAND)
    (cache / "tuning").chmod(0o777)
    found, problem = find(FACTS)
    assert found is None
    assert "other users may write" in problem
