"""What a measurement keeps: merged, strict, of this card and these versions only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120 import env
from sglang_sm120.errors import RecordError
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import results
from sglang_sm120.tuning.choice import Timing
from sglang_sm120.tuning.results import Entry, find, save
from tests.dispatch.machines import RTX, machine

FACTS = machine(RTX)
ENTRY = Entry(128, 256, "bfloat16", 8, "sm120", {"sm120": Timing(4, 3, 5), "flashinfer_b12x": Timing(9, 8, 10)})
OTHER = Entry(128, 256, "bfloat16", 16, "sm120", {"sm120": Timing(5, 4.5, 5)})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache"


def path() -> Path:
    return results.results_path(identity_of(FACTS))


def test_what_was_saved_is_found_with_its_provenance() -> None:
    save(identity_of(FACTS), [ENTRY], ["sglang-sm120", "bench", "a b"])
    found, problem = find(FACTS)
    assert found is not None
    assert problem == ""
    assert found.entries == {ENTRY.key: ENTRY}
    assert found.command == "sglang-sm120 bench 'a b'"
    assert found.identity.versions["driver"] == "580.95.05"
    assert found.created.endswith("Z")


def test_entries_of_other_cases_stay_and_the_same_case_is_replaced() -> None:
    save(identity_of(FACTS), [ENTRY, OTHER], [])
    newer = Entry(128, 256, "bfloat16", 8, "sm120", {"sm120": Timing(2, 2, 2)})
    save(identity_of(FACTS), [newer], [])
    found, _ = find(FACTS)
    assert found is not None
    assert found.entries == {OTHER.key: OTHER, newer.key: newer}


def test_two_commands_at_once_keep_the_times_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    right = results.read

    def slow(place: Path) -> results.Results:
        try:
            return right(place)
        finally:
            time.sleep(0.05)

    monkeypatch.setattr(results, "read", slow)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda entry: save(identity_of(FACTS), [entry], []), (ENTRY, OTHER)))
    assert right(path()).entries.keys() == {ENTRY.key, OTHER.key}


def test_other_versions_have_results_of_their_own_and_the_change_is_named() -> None:
    save(identity_of(FACTS), [ENTRY], [])
    newer = machine(RTX, driver="590.10")
    found, problem = find(newer)
    assert found is None
    assert "driver 580.95.05 → 590.10" in problem
    save(identity_of(newer), [OTHER], [])
    assert [set(kept.entries) for kept, _ in map(find, (FACTS, newer)) if kept] == [{ENTRY.key}, {OTHER.key}]


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
    def spoil() -> None:
        value = json.loads(path().read_text())
        change(value)
        path().write_text(json.dumps(value))

    return spoil


SPOILT = {
    "backend that nobody measured": (_edit(lambda v: v["entries"][0].update(backend="marlin")), "backend='marlin'"),
    "a winner against its times": (
        _edit(lambda v: v["entries"][0].update(backend="flashinfer_b12x")),
        "does not follow from its times",
    ),
    "unknown backend": (
        _edit(lambda v: v["entries"][0]["timings"].update(os=v["entries"][0]["timings"]["sm120"])),
        "names 'os'",
    ),
    "no times": (_edit(lambda v: v["entries"][0].update(timings={})), "does not follow from its times"),
    "negative time": (_edit(lambda v: v["entries"][0]["timings"]["sm120"].update(low=-1)), "low=-1"),
    "median outside": (_edit(lambda v: v["entries"][0]["timings"]["sm120"].update(high=1)), "outside its quartiles"),
    "M of zero": (_edit(lambda v: v["entries"][0].update(m=0)), "m=0"),
    "M as text": (_edit(lambda v: v["entries"][0].update(m="8")), "m='8'"),
    "another dtype": (_edit(lambda v: v["entries"][0].update(dtype="float32")), "dtype='float32'"),
    "a case twice": (_edit(lambda v: v["entries"].append(v["entries"][0])), "repeats the case"),
    "field too many": (_edit(lambda v: v["entries"][0].update(path="/etc")), "unknown fields: path"),
    "entries no list": (_edit(lambda v: v.update(entries={})), "entries that is no list"),
    "a probe record": (_edit(lambda v: v.update(kind="probe record")), "kind='probe record'"),
    "no JSON": (lambda: path().write_text("x"), "no strict JSON"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_results_are_refused_by_name_and_measured_anew(name: str) -> None:
    save(identity_of(FACTS), [ENTRY], [])
    spoil, text = SPOILT[name]
    spoil()
    with pytest.raises(RecordError) as refusal:
        results.read(path())
    assert text in str(refusal.value)
    found, problem = find(FACTS)
    assert found is None
    assert text in problem
    save(identity_of(FACTS), [ENTRY], [])
    assert find(FACTS)[0] is not None


def test_renamed_results_are_not_believed() -> None:
    save(identity_of(machine(RTX, driver="590.10")), [ENTRY], [])
    results.results_path(identity_of(machine(RTX, driver="590.10"))).rename(path())
    found, problem = find(FACTS)
    assert found is None
    assert "another machine" in problem
