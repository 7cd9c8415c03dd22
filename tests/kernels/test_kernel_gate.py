"""The SM12x gate passes on our kernels and notices what it is there to notice."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import cuda_tools

ROOT = Path(__file__).resolve().parents[2]
GATE = ROOT / "tools" / "kernel_gate.py"


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    """tools/kernel_gate.py as a module."""
    spec = importlib.util.spec_from_file_location("kernel_gate", GATE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_gate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


GOOD = [
    ("op", "S2R R0, SR_TID.X"),
    ("op", "@P0 BRA `(.L_x_1)"),
    ("op", "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]"),
    ("label", ".L_x_1"),
    ("op", "PREEXIT"),
    ("op", "ACQBULK"),
    ("op", "LDG.E R3, desc[UR4][R4.64]"),
    ("op", "EXIT"),
]


def test_a_good_order_passes(gate: ModuleType) -> None:
    assert gate.dependency_failures(GOOD) == []


@pytest.mark.parametrize(
    ("at", "replacement", "complaint"),
    [
        (0, ("op", "LDG.E R3, desc[UR4][R4.64]"), "memory access"),
        (0, ("op", "@P1 STG.E desc[UR4][R4.64], R3"), "memory access"),
        (0, ("op", "@P1 EXIT"), "exit before"),
        (1, ("op", "@P0 BRA `(.L_x_9)"), "jumps over"),
        (4, ("op", "NOP"), "never launched"),
        (5, ("op", "NOP"), "0 dependency waits"),
        (5, ("op", "@P0 ACQBULK"), "conditional"),
    ],
)
def test_each_violation_is_named(gate: ModuleType, at: int, replacement: tuple[str, str], complaint: str) -> None:
    code = [*GOOD[:at], replacement, *GOOD[at + 1 :]]
    assert any(complaint in failure for failure in gate.dependency_failures(code))


def test_early_loads_and_a_late_launch_are_checked(gate: ModuleType) -> None:
    load = ("op", "@!P0 LDG.E.STRONG.GPU R2, desc[UR8][R2.64]")
    assert gate.dependency_failures([load, *GOOD], early_loads=1) == []
    assert gate.dependency_failures([load, *GOOD], early_loads=2) == [
        "1 loads past L1 before the dependency wait, not 2"
    ]
    assert any("memory access" in failure for failure in gate.dependency_failures([load, *GOOD]))
    weak = ("op", "LDG.E R2, desc[UR8][R2.64]")
    assert any("memory access" in failure for failure in gate.dependency_failures([weak, *GOOD], early_loads=1))
    late = [entry for entry in GOOD if entry[1] != "PREEXIT"] + [("op", "PREEXIT")]
    assert gate.dependency_failures(late, late_launch=True) == []
    assert gate.dependency_failures(GOOD, late_launch=True) == ["dependents are launched before the dependency wait"]


@pytest.mark.parametrize(("rule", "complaints"), [(1, ["no e2m1 conversion"]), (0, [])])
def test_a_fast_quantizer_without_the_conversion_is_named(gate: ModuleType, rule: int, complaints: list[str]) -> None:
    name = f"_ZN5sm1208quantize15quantize_kernelILNS0_9InputTypeE1ELNS0_4RuleE{rule}ELi4EEEvNS0_6ParamsE"
    facts = {"registers": 48, "stack": 0}
    code = [entry for entry in GOOD if "LDGSTS" not in entry[1]]
    assert gate.inspect("120f", name, code, facts).failures == complaints
    converted = [*code[:-1], ("op", "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C R0, R1, R2, RZ"), code[-1]]
    assert gate.inspect("120f", name, converted, facts).failures == []


def test_a_gemm_that_quantizes_needs_the_conversion_beside_its_multiplies(gate: ModuleType) -> None:
    name = (
        "_ZN5sm1206skinny22quantizing_gemm_kernelILNS_8quantize9InputTypeE1ELi2ELi2EEEvNS0_16QuantizingParamsE"
    )  # fmt: skip
    copy = ("op", "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]")
    multiply = ("op", "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R8, R12, R4, R16, R17")
    code = [*[copy] * 10, ("op", "PREEXIT"), ("op", "ACQBULK"), *[multiply] * 8, ("op", "EXIT")]
    facts = {"registers": 128, "stack": 0}
    entry = gate.inspect("120f", name, code, facts)
    assert entry.kernel == "skinny from fp16, tiles 2"
    assert entry.failures == ["no e2m1 conversion"]
    converted = [*code[:-1], ("op", "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C R0, R1, R2, RZ"), code[-1]]
    assert gate.inspect("120f", name, converted, facts).failures == []


@pytest.mark.parametrize(
    ("copies", "multiplies", "facts", "complaint"),
    [
        (5, 64, {"registers": 220, "stack": 0}, None),
        (6, 64, {"registers": 220, "stack": 0}, "6 copies before"),
        (5, 63, {"registers": 220, "stack": 0}, "63 OMMA.SF instead of 64"),
        (5, 64, {"registers": 220, "stack": 8}, "spills"),
        (5, 64, {"registers": 255, "stack": 0}, None),
    ],
)
def test_what_a_tiled_gemm_must_have_is_checked(
    gate: ModuleType, copies: int, multiplies: int, facts: dict[str, int], complaint: str | None
) -> None:
    name = "_ZN5sm1205tiled17tiled_gemm_kernelILNS0_5ShapeE128ELb1EEEvNS_4gemm6ParamsE"
    copy = ("op", "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]")
    multiply = ("op", "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R8, R12, R4, R16, R17")
    code = [*[copy] * copies, ("op", "PREEXIT"), ("op", "ACQBULK"), *[multiply] * multiplies, ("op", "EXIT")]
    failures = gate.inspect("120f", name, code, facts).failures
    assert failures == [] if complaint is None else any(complaint in failure for failure in failures)


def test_an_unknown_kernel_is_an_error(gate: ModuleType) -> None:
    with pytest.raises(SystemExit, match="unknown kernel"):
        gate.identify("_Z12other_kernelv")


def test_our_kernels_pass() -> None:
    done = subprocess.run([sys.executable, str(GATE)], capture_output=True, text=True, env=cuda_tools.environ())
    assert done.returncode == 0, done.stdout + done.stderr
