"""The probe record: written whole, read strictly, ignored when it is not of this card and these versions."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120 import env, records
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, RecordError
from sglang_sm120.probing import record
from sglang_sm120.probing.record import Outcome, find, save, with_probe
from sglang_sm120.records import identity_of
from tests.dispatch.machines import RTX, SPARK, machine

OUTCOMES = {
    "quantizer": Outcome("wrong", "quantizer M=512 K=2048: zeros", 3.5),
    "flashinfer_cutlass": Outcome("ok", "300 steps", 41.0),
}
FACTS = machine(RTX)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache"


def path() -> Path:
    return record.record_path(identity_of(FACTS))


def test_what_was_saved_is_found() -> None:
    save(identity_of(FACTS), OUTCOMES)
    found, problem = find(FACTS)
    assert found is not None
    assert found.outcomes == OUTCOMES
    assert problem == ""
    facts, problem = with_probe(FACTS)
    assert facts.probed == {"quantizer": "wrong", "flashinfer_cutlass": "ok"}
    assert facts.passed_probe("flashinfer_cutlass")
    assert not facts.passed_probe("quantizer")
    assert not facts.passed_probe("flashinfer_b12x")
    assert problem == ""


def test_experts_have_verdicts_of_their_own() -> None:
    experts = {"sm120": Outcome("wrong", "experts M=9"), "flashinfer_cutlass": Outcome("ok", "60 steps")}
    save(identity_of(FACTS), OUTCOMES, {"sm120": experts["sm120"]})
    save(identity_of(FACTS), {}, {"flashinfer_cutlass": experts["flashinfer_cutlass"]})
    found, _ = find(FACTS)
    assert found is not None
    assert (found.outcomes, found.experts) == (OUTCOMES, experts)
    facts, _ = with_probe(FACTS)
    assert facts.probed_experts == {"sm120": "wrong", "flashinfer_cutlass": "ok"}
    assert "sm120" not in facts.probed


def test_nothing_is_found_where_nothing_was_saved(cache: Path) -> None:
    assert find(FACTS) == (None, "")
    assert not cache.exists()
    assert with_probe(FACTS) == (FACTS, "")


def test_a_later_run_keeps_the_verdicts_of_an_earlier_one() -> None:
    save(identity_of(FACTS), OUTCOMES)
    save(identity_of(FACTS), {"quantizer": Outcome("ok", "32 steps", 4.0)})
    found, _ = find(FACTS)
    assert found is not None
    assert found.outcomes == {**OUTCOMES, "quantizer": Outcome("ok", "32 steps", 4.0)}


def test_only_the_user_can_read_or_write_it(cache: Path) -> None:
    save(identity_of(FACTS), OUTCOMES)
    assert stat.S_IMODE(path().stat().st_mode) == 0o600
    assert stat.S_IMODE(path().parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [p.name for p in path().parent.iterdir()] == [path().name]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (machine(RTX, driver="590.10"), "driver 580.95.05 → 590.10"),
        (machine(RTX, flashinfer="0.7.4"), "flashinfer 0.7.2 → 0.7.4"),
        (machine(RTX, cudnn=None), "cudnn 9.20.0 → missing"),
        (replace(FACTS, device_name="another card"), "card a card that is not here → another card"),
    ],
)
def test_a_record_of_other_versions_or_another_card_is_stale_and_says_why(other: HostFacts, text: str) -> None:
    save(identity_of(FACTS), OUTCOMES)
    found, problem = find(other)
    assert found is None
    assert text in problem
    facts, warning = with_probe(other)
    assert facts is other
    assert warning.startswith("The probe record is not used: ")


def test_a_record_of_another_capability_is_no_record() -> None:
    save(identity_of(FACTS), OUTCOMES)
    assert find(machine(SPARK)) == (None, "")


def test_a_renamed_record_is_not_believed() -> None:
    save(identity_of(machine(RTX, driver="590.10")), OUTCOMES)
    os.rename(record.record_path(identity_of(machine(RTX, driver="590.10"))), path())
    found, problem = find(FACTS)
    assert found is None
    assert "belongs to another machine" in problem
    save(identity_of(FACTS), {"quantizer": OUTCOMES["quantizer"]})
    found, _ = find(FACTS)
    assert found is not None
    assert found.outcomes.keys() == {"quantizer"}


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))

    return spoil


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown status": (_edit(lambda v: v["outcomes"]["quantizer"].update(status="fine")), "status='fine'"),
    "unknown backend": (_edit(lambda v: v["outcomes"].update(nobody=v["outcomes"]["quantizer"])), "names 'nobody'"),
    "field too many": (_edit(lambda v: v.update(run="rm")), "unknown fields: run"),
    "field missing": (_edit(lambda v: v.pop("created")), "no field created"),
    "number as text": (_edit(lambda v: v["outcomes"]["quantizer"].update(seconds="3")), "expected is a number"),
    "boolean as number": (_edit(lambda v: v["outcomes"]["quantizer"].update(seconds=True)), "expected is a number"),
    "list as object": (_edit(lambda v: v.update(outcomes=[])), "is no JSON object"),
    "a runner that only a server can call": (
        _edit(lambda v: v["experts"].update(marlin=v["outcomes"]["quantizer"])),
        "names 'marlin'",
    ),
    "of a release before experts": (
        _edit(lambda v: (v.update(schema=1), v.pop("experts"))),
        "format version 1 and this package reads 2",
    ),
    "another format": (_edit(lambda v: v.update(schema=99)), "format version 99"),
    "another kind": (_edit(lambda v: v.update(kind="tuning table")), "kind='tuning table'"),
    "no JSON": (lambda file: file.write_text("{"), "no strict JSON"),
    "NaN": (lambda file: file.write_text('{"schema": NaN}'), "NaN is no number"),
    "a field twice": (lambda file: file.write_text('{"schema": 1, "schema": 1}'), "stands there twice"),
    "deep nesting": (lambda file: file.write_text("[" * 200_000), "no strict JSON"),
    "no UTF-8": (lambda file: file.write_bytes(b'{"schema": "\xff"}'), "no strict JSON"),
    "writable by others": (lambda file: file.chmod(0o622), "written by other users"),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), "no regular file"),
    "too large": (lambda file: file.write_bytes(b" " * (records.MAX_BYTES + 1)), "larger than"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_record_is_ignored_by_name(name: str) -> None:
    save(identity_of(FACTS), OUTCOMES)
    spoil, text = SPOILT[name]
    spoil(path())
    with pytest.raises(RecordError, match=None) as refusal:
        record.read(path())
    assert text in str(refusal.value)
    found, problem = find(FACTS)
    assert found is None
    assert text in problem
    assert "sglang-sm120 probe" in problem


def test_two_commands_at_once_keep_the_verdicts_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    right = record.read

    def slow(place: Path) -> record.ProbeRecord:
        try:
            return right(place)
        finally:
            time.sleep(0.05)

    monkeypatch.setattr(record, "read", slow)
    subjects = ("quantizer", "torch_reference", "flashinfer_b12x", "flashinfer_cutlass")
    with ThreadPoolExecutor(len(subjects)) as pool:
        list(pool.map(lambda name: save(identity_of(FACTS), {name: Outcome("ok", "test")}), subjects))
    assert right(path()).outcomes.keys() == set(subjects)


def test_a_file_system_without_locks_keeps_the_record_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(records.fcntl, "flock", refuse)
    save(identity_of(FACTS), OUTCOMES)
    assert find(FACTS)[0] is not None


def test_a_spoilt_record_is_replaced_by_the_next_run() -> None:
    save(identity_of(FACTS), OUTCOMES)
    path().write_text("{")
    save(identity_of(FACTS), OUTCOMES)
    assert find(FACTS)[0] is not None


def test_an_interrupted_write_leaves_the_old_record(monkeypatch: pytest.MonkeyPatch) -> None:
    save(identity_of(FACTS), OUTCOMES)
    before = path().read_bytes()

    def replace_fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace_fails)
    with pytest.raises(KeyboardInterrupt):
        save(identity_of(FACTS), {"quantizer": Outcome("ok", "32 steps")})
    assert path().read_bytes() == before
    assert [p.name for p in path().parent.iterdir()] == [path().name]


def test_a_folder_that_cannot_be_looked_at_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server must start where the home of its user cannot be read, or has an impossible name."""
    monkeypatch.setenv(env.CACHE_DIR, "/" + "x" * 5000)
    assert find(FACTS) == (None, "")


def test_a_place_where_nothing_can_be_written_is_told_beforehand(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    (cache / "probe").write_text("")
    with pytest.raises(ConfigError, match="probe"):
        record.require_place(identity_of(FACTS))


def test_a_link_in_place_of_the_folder_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    cache.mkdir(mode=0o700)
    (cache / "probe").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="it is a link"):
        save(identity_of(FACTS), OUTCOMES)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_full_disk_is_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(RecordError, match=f"No space left on device; name another folder in {env.CACHE_DIR}"):
        record.require_place(identity_of(FACTS))


def test_an_unsafe_cache_folder_is_refused(cache: Path) -> None:
    save(identity_of(FACTS), OUTCOMES)
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write to it"):
        save(identity_of(FACTS), OUTCOMES)
    found, problem = find(FACTS)
    assert found is None
    assert "other users may write to it" in problem
