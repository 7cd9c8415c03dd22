"""The MoE rows are complete, consistent and sourced, as the dense rows are; the routes cover what SGLang has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sglang_sm120.backends.moe_record import NVFP4_QUANTIZATIONS
from sglang_sm120.backends.moe_table import MOE_AUTO, MOE_RUNNERS, ROUTES
from sglang_sm120.backends.record import CAPABILITIES, Backend, Requirement, Source

ROOT = Path(__file__).parents[2]

every_runner = pytest.mark.parametrize("record", MOE_RUNNERS.values(), ids=list(MOE_RUNNERS))


def _requirements(record: Backend) -> Iterator[Requirement]:
    for row in record.rows:
        yield from row.requires
    for fault in record.faults:
        yield from fault.when


def _every_source() -> Iterator[Source]:
    for record in MOE_RUNNERS.values():
        yield from (row.source for row in record.rows)
        yield from (absence.source for absence in record.absent)
        yield from (fault.source for fault in record.faults)
        yield from (requirement.source for requirement in _requirements(record))
    yield from (route.source for route in ROUTES)
    for preferences in MOE_AUTO.values():
        for preference in preferences:
            yield preference.source
            yield from (bound.source for bound in preference.when)


@every_runner
def test_every_capability_has_one_row_or_one_reason_to_have_none(record: Backend) -> None:
    with_row = [row.capability for row in record.rows]
    without = [capability for absence in record.absent for capability in absence.capabilities]
    assert Counter([*with_row, *without]) == Counter(CAPABILITIES)


def test_every_statement_has_a_source_that_can_be_looked_up() -> None:
    for source in _every_source():
        if source.kind == "issue":
            project, _, number = source.ref.partition("#")
            assert project
            assert number.isdigit(), source.ref
        elif source.kind == "test":
            assert (ROOT / source.ref).is_file(), source.ref
        else:
            package, version, path = source.ref.split(" ", 2)
            assert package in ("flashinfer", "sglang", "cuda")
            assert Version(version)
            assert path


@every_runner
def test_bounds_and_faults_can_be_applied(record: Backend) -> None:
    for requirement in _requirements(record):
        assert SpecifierSet(requirement.specifier)
    with_row = {row.capability for row in record.rows}
    for fault in record.faults:
        assert set(fault.capabilities) <= with_row, fault.name
        assert fault.effect
        assert fault.remedy


def test_routes_end_in_a_record_or_say_what_happens_instead() -> None:
    for route in ROUTES:
        assert SpecifierSet(route.releases) is not None
        assert (route.runner in MOE_RUNNERS) != bool(route.effect), route


def test_values_are_unique_and_what_sglang_lacks_is_implemented_here() -> None:
    assert [record.value for record in MOE_RUNNERS.values()] == list(MOE_RUNNERS)
    assert "auto" not in MOE_RUNNERS
    for record in MOE_RUNNERS.values():
        assert record.can_be_added == (record.native_since is None)
        if record.implementation is not None:
            assert callable(import_module(record.implementation).moe)


def test_auto_never_becomes_a_runner_that_changes_the_numbers() -> None:
    for quantization, preferences in MOE_AUTO.items():
        assert quantization in NVFP4_QUANTIZATIONS
        values = {preference.value for preference in preferences}
        assert values <= {"auto", "flashinfer_cutlass"} or quantization == "nvfp4_weight_only"
