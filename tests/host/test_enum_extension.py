"""SGLang's enum grows in place on every Python that SGLang runs on."""

from __future__ import annotations

import subprocess
from enum import Enum
from pathlib import Path

import pytest

from sglang_sm120.errors import SeamError
from sglang_sm120.host.enum_extension import add_members, remove_members
from tests.support.pythons import SUPPORTED, interpreter

ROOT = Path(__file__).resolve().parents[2]

# Runs in a bare interpreter of each version: the file needs nothing but the standard library.
CHECKS = """
import copy, pickle, sys
from enum import Enum
from sglang_sm120.host.enum_extension import add_members, remove_members

class Backend(Enum):
    AUTO = "auto"
    MARLIN = "marlin"
    def is_auto(self):
        return self == Backend.AUTO
    def is_flashinfer(self):
        return self.value.startswith("flashinfer_")

before = Backend
added = add_members(Backend, {"FLASHINFER_B12X": "flashinfer_b12x", "OTHER_NAME": "marlin"})
assert added == ["FLASHINFER_B12X"], added
assert Backend is before
member = Backend("flashinfer_b12x")
assert member is Backend.FLASHINFER_B12X and member is Backend["FLASHINFER_B12X"]
assert isinstance(member, Backend) and type(member) is Backend
assert [m.name for m in Backend] == ["AUTO", "MARLIN", "FLASHINFER_B12X"] and len(Backend) == 3
assert list(reversed(Backend))[0] is member and member in Backend
assert list(Backend.__members__) == ["AUTO", "MARLIN", "FLASHINFER_B12X"] and "FLASHINFER_B12X" in dir(Backend)
assert member.is_flashinfer() and not member.is_auto() and Backend.AUTO.is_auto()
assert member.name == "FLASHINFER_B12X" and member.value == "flashinfer_b12x"
assert repr(member) == "<Backend.FLASHINFER_B12X: 'flashinfer_b12x'>", repr(member)
assert str(member) == "Backend.FLASHINFER_B12X"
assert hash(member) == hash(Backend("flashinfer_b12x")) and {member: 1}[Backend.FLASHINFER_B12X] == 1
for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
    assert pickle.loads(pickle.dumps(member, protocol)) is member
assert copy.copy(member) is member and copy.deepcopy(member) is member
if sys.version_info >= (3, 12):
    assert "flashinfer_b12x" in Backend and "bogus" not in Backend
for wrong in ("bogus", None, 3):
    try:
        Backend(wrong)
    except ValueError:
        continue
    raise AssertionError(wrong)
assert add_members(Backend, {"FLASHINFER_B12X": "flashinfer_b12x"}) == []
remove_members(Backend, added)
assert len(Backend) == 2 and not hasattr(Backend, "FLASHINFER_B12X")
assert "flashinfer_b12x" not in Backend._value2member_map_
print("checked", sys.version.split()[0])
"""


@pytest.mark.parametrize("minor", SUPPORTED)
def test_enum_grows_in_place_on_every_supported_python(minor: int) -> None:
    path = interpreter(minor)
    if path is None:
        pytest.skip(f"interpreter missing: python3.{minor}")
    run = subprocess.run([path, "-S", "-c", CHECKS], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"checked 3.{minor}.")


def test_a_name_taken_by_another_value_adds_nothing() -> None:
    class Backend(Enum):
        AUTO = "auto"
        SM120 = "something else"

    with pytest.raises(SeamError, match="SM120"):
        add_members(Backend, {"TORCH_REFERENCE": "torch_reference", "SM120": "sm120"})
    assert [m.name for m in Backend] == ["AUTO", "SM120"]


def test_a_name_taken_by_a_method_adds_nothing() -> None:
    class Backend(Enum):
        AUTO = "auto"

        def sm120(self) -> str:
            return self.value

    with pytest.raises(SeamError, match="sm120"):
        add_members(Backend, {"sm120": "sm120"})
    assert Backend.AUTO.sm120() == "auto"
    assert len(Backend) == 1


def test_removing_restores_the_class() -> None:
    class Backend(Enum):
        AUTO = "auto"

    remove_members(Backend, add_members(Backend, {"SM120": "sm120"}))
    assert list(Backend) == [Backend.AUTO]
    with pytest.raises(ValueError, match="sm120"):
        Backend("sm120")
