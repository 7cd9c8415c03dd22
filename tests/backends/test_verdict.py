"""The guard matrix: what the table says about machines that are not here."""

from __future__ import annotations

import pytest

from sglang_sm120.backends import BACKENDS, available_values, offered_values, verdict
from sglang_sm120.backends.record import Capability
from sglang_sm120.backends.verdict import is_native
from sglang_sm120.errors import ConfigError
from tests.dispatch.machines import AMPERE, B200, B300, CARDS, HOPPER, RTX, SPARK, machine, released

EVERYTHING_FOR_SM12X = ["flashinfer_cutlass", "flashinfer_cudnn", "flashinfer_b12x", "flashinfer_cutedsl"]
EVERYTHING_FOR_SM12X += ["flashinfer_auto", "marlin", "sm120", "torch_reference", "sm120_tuned"]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (AMPERE, ["marlin", "sm120", "torch_reference", "sm120_tuned"]),
        (HOPPER, ["marlin", "sm120", "torch_reference", "sm120_tuned"]),
        (
            B200,
            ["flashinfer_cutlass", "flashinfer_cudnn", "flashinfer_cutedsl", "flashinfer_auto", "flashinfer_trtllm"],
        ),
        (
            B300,
            ["flashinfer_cutlass", "flashinfer_cudnn", "flashinfer_cutedsl", "flashinfer_auto", "flashinfer_trtllm"],
        ),
        (RTX, EVERYTHING_FOR_SM12X),
        (SPARK, EVERYTHING_FOR_SM12X),
        (None, ["torch_reference", "sm120_tuned"]),
    ],
    ids=str,
)
def test_what_runs_on_each_card_with_the_newest_versions(capability: Capability | None, expected: list[str]) -> None:
    if capability in (B200, B300):
        expected = [*expected, "marlin", "sm120", "torch_reference", "sm120_tuned"]
    assert available_values(machine(capability)) == expected


# Letters: C cutlass, N cudnn, B b12x, D cute-dsl, A FlashInfer's auto. Upper case runs, lower case runs with a
# warning, a missing letter is refused or unsupported.
GUARD_MATRIX = """
flashinfer    dsl    cuda  | 12.0   | 12.1
0.6.3         4.3.4  12.8  | N      | -
0.6.3         4.3.4  12.9  | N      | N
0.6.3         4.3.4  13.0  | N      | N
0.6.6         4.3.4  13.0  | N      | N
0.6.7         4.4.1  13.0  | CNA    | CNA
0.6.7.post2   4.4.1  12.8  | -      | -
0.6.7.post2   4.4.1  12.9  | CNA    | CNA
0.6.8.post1   4.4.2  13.0  | CNA    | CNA
0.6.9         4.4.2  12.9  | CNA    | CNA
0.6.9         4.4.2  13.0  | CNAb   | CNA
0.6.11.post1  4.5.0  12.8  | -      | -
0.6.11.post1  4.5.0  12.9  | CNA    | CNA
0.6.11.post1  4.5.0  13.0  | CNAb   | CNAb
0.6.12        4.5.2  13.0  | Cnab    | Cnab
0.6.14        4.6.0  12.9  | Cna    | Cna
0.6.14        4.6.0  13.0  | CnaB   | CnaB
0.6.18        4.6.2  12.8  | -      | -
0.6.18        4.6.2  13.0  | CnaB   | CnaB
0.7.0         4.6.2  12.8  | -      | -
0.7.0         4.6.2  12.9  | CNAB   | CNAB
0.7.0         4.6.2  13.0  | CNAB   | CNAB
0.7.1         4.8.0  12.8  | CNA    | -
0.7.1         4.8.0  12.9  | CNAB   | CNAB
0.7.1         4.8.0  13.0  | CNABD  | CNABD
0.7.2         4.8.0  12.9  | CNAB   | CNAB
0.7.2         4.8.0  13.0  | CNABD  | CNABD
0.7.4         4.8.0  13.0  | CNABD  | CNABD
0.7.4         4.4.2  13.0  | CNAbd  | CNA
"""
LETTERS = {
    "c": "flashinfer_cutlass",
    "n": "flashinfer_cudnn",
    "b": "flashinfer_b12x",
    "d": "flashinfer_cutedsl",
    "a": "flashinfer_auto",
}


def _matrix() -> list[tuple[str, str, str, Capability, str]]:
    cells = []
    for line in GUARD_MATRIX.strip().splitlines()[1:]:
        versions, on_rtx, on_spark = (part.strip() for part in line.split("|"))
        flashinfer, dsl, cuda = versions.split()
        cells.append((flashinfer, dsl, cuda, RTX, on_rtx))
        cells.append((flashinfer, dsl, cuda, SPARK, on_spark))
    return cells


@pytest.mark.parametrize(("flashinfer", "dsl", "cuda", "card", "expected"), _matrix())
def test_guards_on_sm12x(flashinfer: str, dsl: str, cuda: str, card: Capability, expected: str) -> None:
    facts = machine(card, flashinfer=flashinfer, cutlass_dsl=dsl, cuda=cuda)
    found = ""
    for letter, value in LETTERS.items():
        judged = verdict(value, facts)
        if judged.status == "ok":
            found += letter if judged.warnings else letter.upper()

    assert sorted(found) == sorted(expected.replace("-", ""))


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize("value", BACKENDS)
def test_every_refusal_says_why_and_what_helps(value: str, card: Capability | None) -> None:
    for facts in (machine(card), machine(card, flashinfer=None), released(card, "0.5.9", cuda="12.8")):
        judged = verdict(value, facts)
        assert judged.backend == value
        assert judged.reason
        if judged.status != "ok":
            assert judged.remedy
            assert judged.source is not None or card is None


@pytest.mark.parametrize("card", [RTX, SPARK], ids=str)
def test_trtllm_is_refused_whatever_is_installed(card: Capability) -> None:
    for sglang in ("0.5.9", "0.5.12", "0.5.23"):
        judged = verdict("flashinfer_trtllm", released(card, sglang))
        assert judged.status == "unsupported"
        assert "shuffled" in judged.reason


def test_the_pdl_race_is_a_fault_and_not_a_missing_version() -> None:
    judged = verdict("flashinfer_cutlass", machine(RTX, flashinfer="0.6.6"))

    assert judged.status == "refused"
    assert judged.source is not None
    assert judged.source.ref == "flashinfer#2708"


def test_without_flashinfer_only_what_does_not_need_it_is_left() -> None:
    assert available_values(machine(RTX, flashinfer=None)) == ["marlin", "sm120", "torch_reference", "sm120_tuned"]


@pytest.mark.parametrize(
    ("installed", "status"), [("9.10.1", "unsupported"), ("9.10.2", "ok"), ("9.20.0", "ok"), (None, "unsupported")]
)
def test_cudnn_floor(installed: str | None, status: str) -> None:
    assert verdict("flashinfer_cudnn", machine(RTX, cudnn=installed)).status == status


@pytest.mark.parametrize("n", [64, 96, 128, 5120])
@pytest.mark.parametrize("k", [64, 96, 128, 3712])
def test_shape_rules(n: int, k: int) -> None:
    facts = machine(RTX)
    fits_64 = n % 64 == 0 and k % 64 == 0

    assert (verdict("flashinfer_cutedsl", facts, n=n, k=k).status == "ok") == fits_64
    for value in ("flashinfer_cutlass", "flashinfer_cudnn", "flashinfer_b12x"):
        assert verdict(value, facts, n=n, k=k).status == "ok"


@pytest.mark.parametrize(("n", "k"), [(464, 64), (64, 464), (3696, 3696), (16, 16)])
def test_ragged_layers_are_refused_by_name_and_size(n: int, k: int) -> None:
    judged = verdict("flashinfer_cutlass", machine(RTX), n=n, k=k)

    assert judged.status == "unsupported"
    assert f"N={n}" in judged.reason or f"K={k}" in judged.reason
    assert verdict("torch_reference", machine(RTX), n=n, k=k).status == "ok"


@pytest.mark.parametrize(
    ("value", "card", "half_runs"),
    [
        ("flashinfer_cutedsl", RTX, False),
        ("flashinfer_cutedsl", B200, True),
        ("flashinfer_trtllm", B200, False),
        ("flashinfer_b12x", RTX, True),
        ("flashinfer_cutlass", RTX, True),
        ("torch_reference", RTX, True),
    ],
)
def test_half_precision_output(value: str, card: Capability, half_runs: bool) -> None:
    facts = machine(card)
    assert verdict(value, facts, out_dtype="bfloat16").status == "ok"
    assert (verdict(value, facts, out_dtype="float16").status == "ok") == half_runs


class TestFlashInferIsAsked:
    def test_a_no_counts_even_where_the_recorded_release_is_reached(self) -> None:
        judged = verdict("flashinfer_b12x", machine(RTX, support={"b12x": False}))
        assert judged.status == "unsupported"

    def test_a_yes_stands_in_for_the_recorded_release(self) -> None:
        """A build between two releases has the backend before its version number says so."""
        facts = machine(RTX, support={"cute-dsl": True}, flashinfer="0.7.1.dev20260801")
        assert verdict("flashinfer_cutedsl", facts).status == "ok"
        assert verdict("flashinfer_cutedsl", machine(RTX, flashinfer="0.7.1.dev20260801")).status == "unsupported"

    def test_a_newer_flashinfer_may_admit_a_card_that_the_table_does_not_know(self) -> None:
        judged = verdict("flashinfer_trtllm", machine(RTX, support={"trtllm": True}, flashinfer="0.8.0"))
        assert judged.status == "ok"
        assert any("0.8.0" in warning for warning in judged.warnings)

    def test_one_that_the_table_was_checked_against_may_not(self) -> None:
        facts = machine(RTX, support={"trtllm": True}, flashinfer="0.7.4")
        assert verdict("flashinfer_trtllm", facts).status == "unsupported"

    def test_a_yes_does_not_outweigh_a_known_fault(self) -> None:
        facts = machine(RTX, support={"cutlass": True}, flashinfer="0.6.6")
        assert verdict("flashinfer_cutlass", facts).status == "refused"

    def test_the_toolkit_that_flashinfer_compiles_with_counts_for_what_it_compiles(self) -> None:
        """torch built with CUDA 13 next to an nvcc 12.8 is how some RTX machines come."""
        facts = machine(RTX, cuda="13.0", cuda_toolkit="12.8")
        assert verdict("flashinfer_b12x", facts).status == "unsupported"
        assert verdict("flashinfer_cutlass", facts).status == "ok"


@pytest.mark.parametrize(
    ("native", "offered"),
    [
        (
            {"auto", "flashinfer_cudnn", "flashinfer_cutlass", "flashinfer_trtllm"},  # SGLang 0.5.9
            ["flashinfer_b12x", "flashinfer_cutedsl", "flashinfer_auto", "sm120", "torch_reference", "sm120_tuned"],
        ),
        (
            {"auto", "cutlass", "flashinfer_cudnn", "flashinfer_cutedsl", "flashinfer_cutlass", "flashinfer_trtllm"},
            ["flashinfer_b12x", "flashinfer_auto", "sm120", "torch_reference", "sm120_tuned"],
        ),
        (
            {"auto", "flashinfer_b12x", "flashinfer_cudnn", "flashinfer_cutedsl", "flashinfer_cutlass", "marlin"}
            | {"flashinfer_trtllm"},  # a future one that took our value over
            ["flashinfer_auto", "sm120", "torch_reference", "sm120_tuned"],
        ),
    ],
    ids=["0.5.9", "0.5.12", "future"],
)
def test_values_that_sglang_lacks_are_offered(native: set[str], offered: list[str]) -> None:
    assert offered_values(native) == offered


@pytest.mark.parametrize(
    ("value", "sglang", "native"),
    [
        ("flashinfer_cutedsl", "0.5.11", False),
        ("flashinfer_cutedsl", "0.5.12.post1", True),
        ("marlin", "0.5.12", False),
        ("marlin", "0.5.13", True),
        ("cutlass", "0.5.9", False),
        ("cutlass", "0.5.15.post1", True),
        ("cutlass", "0.5.16", False),
        ("flashinfer_b12x", "0.5.23", False),
        ("marlin", None, True),
        ("marlin", "not a version", True),
        ("torch_reference", None, False),
    ],
)
def test_which_sglang_has_a_value_itself(value: str, sglang: str | None, native: bool) -> None:
    assert is_native(BACKENDS[value], machine(RTX, sglang=sglang)) is native


def test_an_unknown_value_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="flashinfer_cutlass.*torch_reference"):
        verdict("sm999", machine(RTX))


@pytest.mark.parametrize("version", ["", "unknown", "1.2.3.4.x", "0.7"])
def test_unreadable_versions_are_not_met_and_do_not_raise(version: str) -> None:
    assert verdict("flashinfer_cutedsl", machine(RTX, flashinfer=version)).status == "unsupported"


@pytest.mark.parametrize(
    ("flashinfer", "cudnn", "status"),
    [
        ("0.6.9", "9.21.0", "refused"),
        ("0.6.10.post1", "9.23.1", "refused"),
        ("0.6.9", "9.20.0", "ok"),  # without graphs for ranges of M
        ("0.6.11", "9.21.0", "ok"),
        ("0.6.7.post2", "9.21.0", "ok"),
    ],
)
def test_plans_of_another_graph_are_refused_where_there_are_such_graphs(
    flashinfer: str, cudnn: str, status: str
) -> None:
    """flashinfer#3192: a few NaN in prefill."""
    judged = verdict("flashinfer_cudnn", machine(RTX, flashinfer=flashinfer, cudnn=cudnn, sglang="0.5.11"))
    assert judged.status == status
    if status == "refused":
        assert judged.source is not None
        assert judged.source.ref == "flashinfer#3192"
