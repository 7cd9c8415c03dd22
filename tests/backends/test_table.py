"""The capability table is complete, consistent and sourced: everything else is derived from it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sglang_sm120.backends import AUTO_ORDER, BACKENDS
from sglang_sm120.backends.record import CAPABILITIES, Backend, Requirement, Source
from sglang_sm120.backends.table import FLASHINFER_NAMES, NEWEST_FLASHINFER_READ

ROOT = Path(__file__).parents[2]
PACKAGES = {"sglang", "flashinfer", "torch", "cuda", "cuda_toolkit", "kernels_cuda", "tvm_ffi", "cudnn", "cutlass_dsl"}
PACKAGES |= {"driver"}

every_backend = pytest.mark.parametrize("record", BACKENDS.values(), ids=list(BACKENDS))


def _requirements(record: Backend) -> Iterator[Requirement]:
    for row in record.rows:
        yield from row.requires
    for fault in record.faults:
        yield from fault.when


def _sources(record: Backend) -> Iterator[Source]:
    for row in record.rows:
        yield row.source
        if row.shape is not None:
            yield row.shape.source
    yield from (absence.source for absence in record.absent)
    yield from (fault.source for fault in record.faults)
    yield from (requirement.source for requirement in _requirements(record))


@every_backend
def test_every_capability_has_one_row_or_one_reason_to_have_none(record: Backend) -> None:
    with_row = [row.capability for row in record.rows]
    without = [capability for absence in record.absent for capability in absence.capabilities]

    assert Counter([*with_row, *without]) == Counter(CAPABILITIES)


@every_backend
def test_every_statement_has_a_source_that_can_be_looked_up(record: Backend) -> None:
    for source in _sources(record):
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


@every_backend
def test_bounds_can_be_read_and_name_known_packages(record: Backend) -> None:
    for requirement in _requirements(record):
        assert requirement.package in PACKAGES
        assert SpecifierSet(requirement.specifier)


@every_backend
def test_faults_concern_capabilities_that_have_a_row(record: Backend) -> None:
    with_row = {row.capability for row in record.rows}
    for fault in record.faults:
        assert set(fault.capabilities) <= with_row, fault.name
        assert fault.effect
        assert fault.remedy


def test_values_enum_names_and_flashinfer_names_are_unique() -> None:
    records = list(BACKENDS.values())

    assert [record.value for record in records] == list(BACKENDS)
    assert len({record.enum_name for record in records}) == len(records)
    names = [record.flashinfer_name for record in records if record.flashinfer_name is not None]
    assert len(set(names)) == len(names)
    assert "auto" not in BACKENDS


@every_backend
def test_a_value_can_be_added_only_if_something_of_its_own_multiplies(record: Backend) -> None:
    """No value is an alias of another, and none is offered without an implementation."""
    if record.provider == "sglang_sm120":
        assert record.implementation is not None
        assert record.flashinfer_name is None
    elif record.provider == "flashinfer":
        assert record.flashinfer_name is not None
        assert record.implementation is None
    else:
        assert not record.can_be_added
        assert record.native_since is not None


def test_auto_takes_only_flashinfer_backends() -> None:
    """Code of ours that nobody has checked on the card is never chosen silently."""
    assert {BACKENDS[preference.value].provider for preference in AUTO_ORDER} == {"flashinfer"}
    assert not any(BACKENDS[preference.value].needs_probe for preference in AUTO_ORDER)


def test_flashinfer_is_asked_about_every_name_but_its_auto() -> None:
    names = {record.flashinfer_name for record in BACKENDS.values()} - {None, "auto"}
    assert set(FLASHINFER_NAMES) == names
    assert Version(NEWEST_FLASHINFER_READ)


def test_the_table_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; import sglang_sm120.backends, sglang_sm120.dispatch, sglang_sm120.env, sglang_sm120.device;"
        "bad = {'torch', 'sglang', 'flashinfer'} & set(sys.modules); sys.exit(repr(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
