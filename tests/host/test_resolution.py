"""What SGLang's start does with a request, on cards that are not here: capability and versions are passed in.

The request is put where SGLang 0.5.23 publishes it; servers that really start are in tests/servers and, for every
release, in tests/matrix.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.quantization.fp4_utils as fp4_utils
import sglang.srt.runtime_context as runtime_context

from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, SeamError, SelfTestError, UnsupportedError
from sglang_sm120.host import installer, resolution
from sglang_sm120.host.seams import SEAMS
from sglang_sm120.host.state import STATE
from tests.host.conftest import Serving
from tests.host.linear_layers import make_case
from tests.support.nvfp4 import fresh_generator

NEWEST = {
    "sglang": "0.5.23",
    "flashinfer": "0.7.2",
    "torch": "2.14.1",
    "cuda": "13.0",
    "cuda_toolkit": "13.0",
    "cudnn": "9.15.0",
    "cutlass_dsl": "4.8.0",
    "kernels_cuda": "13.0",
    "tvm_ffi": "0.1.12",
    "driver": "580.95",
}
RTX, SPARK, HOPPER, B200 = (12, 0), (12, 1), (9, 0), (10, 0)


class Start:
    """Runs SGLang's ``initialize_fp4_gemm_config`` for a request, a card and versions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __call__(self, value: str, capability: tuple[int, int] | None, **versions: str | None) -> str:
        installed = {k: v for k, v in {**NEWEST, **versions}.items() if v is not None}
        facts = HostFacts(capability=capability, versions=installed, device_name="a card that is not here")
        self._patch.setattr(resolution, "collect_facts", lambda gpu=None: facts)
        published = SimpleNamespace(kernel=SimpleNamespace(fp4_gemm_runner_backend=value))
        for module in (runtime_context, fp4_utils):
            self._patch.setattr(module, "get_exec", lambda: published)
        fp4_utils.initialize_fp4_gemm_config()
        chosen: str = fp4_utils.get_fp4_gemm_runner_backend().value
        return chosen


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, serving: Serving) -> Start:
    for name in ("SGLANG_SM120_FP4_GEMM_BACKEND", "SGLANG_FLASHINFER_FP4_GEMM_BACKEND", "SGLANG_SM120_ALLOW_UNSAFE"):
        monkeypatch.delenv(name, raising=False)
    return Start(monkeypatch)


@pytest.mark.parametrize("card", [RTX, SPARK])
@pytest.mark.parametrize("value", ["flashinfer_b12x", "flashinfer_auto", "flashinfer_cutedsl", "flashinfer_cutlass"])
def test_a_named_backend_that_runs_here_is_taken(start: Start, card: tuple[int, int], value: str) -> None:
    assert start(value, card) == value
    assert STATE.decision is not None
    assert STATE.decision.explicit
    assert STATE.decision.backend == value


@pytest.mark.parametrize("card", [None, (8, 0), HOPPER, B200, (10, 3), RTX, SPARK])
def test_torch_reference_runs_on_every_card(start: Start, card: tuple[int, int] | None, monkeypatch: Any) -> None:
    from sglang_sm120 import self_test

    on_cpu = self_test.run  # the card is not here, the arithmetic is the same
    monkeypatch.setattr(self_test, "run", lambda backend, device: on_cpu(backend, "cpu"))
    assert start("torch_reference", card) == "torch_reference"


@pytest.mark.parametrize(
    ("value", "card", "versions", "says"),
    [
        ("flashinfer_trtllm", RTX, {}, "10.x"),
        ("flashinfer_trtllm", SPARK, {}, "10.x"),
        ("flashinfer_cutedsl", RTX, {"flashinfer": "0.6.18"}, "flashinfer"),
        ("flashinfer_cutedsl", RTX, {"cuda": "12.9"}, "13.0"),
        ("flashinfer_b12x", RTX, {"flashinfer": "0.6.7.post2"}, "flashinfer"),
        ("flashinfer_b12x", RTX, {"flashinfer": "0.6.18", "cuda_toolkit": "12.9"}, "CUDA"),
        ("flashinfer_b12x", HOPPER, {}, "9.0"),
        ("flashinfer_b12x", B200, {}, "10.0"),
        ("flashinfer_cutlass", RTX, {"flashinfer": "0.6.3", "sglang": "0.5.9"}, "flashinfer#2708"),
        ("flashinfer_cutlass", RTX, {"flashinfer": None}, "not installed"),
        ("flashinfer_b12x", None, {}, "CUDA device"),
    ],
)
def test_what_cannot_be_right_is_refused_before_weights_load(
    start: Start, value: str, card: tuple[int, int] | None, versions: dict[str, str | None], says: str
) -> None:
    start(value, card, **versions)
    with pytest.raises(UnsupportedError) as refusal:
        make_case("modelopt", 128, [128], fresh_generator())
    text = str(refusal.value)
    assert f"--fp4-gemm-backend={value!r}" in text
    assert says in text
    assert "SGLANG_SM120_ALLOW_UNSAFE=1" in text
    assert "instead" in text
    assert STATE.decision is None


def test_a_model_without_fp4_layers_starts_whatever_would_be_refused(start: Start) -> None:
    """The function runs for every model: a bf16 model on a card with an old FlashInfer is none of our business."""
    start("flashinfer_cutlass", RTX, flashinfer="0.6.3", sglang="0.5.9")
    start("auto", RTX, flashinfer=None)
    assert STATE.refusal is not None
    assert STATE.chosen is None


def test_the_unsafe_switch_turns_a_refusal_into_a_warning(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_SM120_ALLOW_UNSAFE", "1")
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        assert start("flashinfer_trtllm", RTX) == "flashinfer_trtllm"
    assert "flashinfer_trtllm" in caplog.text
    assert "10.x" in caplog.text


@pytest.mark.parametrize("card", [RTX, SPARK])
def test_auto_on_sm12x_never_takes_unchecked_code_of_ours(start: Start, card: tuple[int, int]) -> None:
    assert start("auto", card) == "flashinfer_cutlass"
    assert STATE.decision is not None
    assert not STATE.decision.explicit


def test_auto_is_left_to_sglang_when_asked(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_AUTO", "0")
    start("auto", RTX)
    assert STATE.decision is not None
    assert STATE.decision.backend is None


@pytest.mark.parametrize("card", [None, (8, 0), HOPPER, B200, (10, 3)])
@pytest.mark.parametrize("value", ["auto", "flashinfer_cutlass", "flashinfer_trtllm", "marlin"])
def test_on_other_cards_sglang_decides_as_if_we_were_not_there(
    start: Start, card: tuple[int, int] | None, value: str
) -> None:
    start(value, card)
    assert STATE.decision is not None
    assert STATE.decision.backend is None
    assert STATE.backend is None


def test_our_variable_decides_where_the_flag_says_auto(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_FP4_GEMM_BACKEND", "flashinfer_b12x")
    assert start("auto", RTX) == "flashinfer_b12x"
    assert start("flashinfer_cutlass", RTX) == "flashinfer_cutlass"


@pytest.mark.parametrize("card", [None, HOPPER, B200])
@pytest.mark.parametrize("leftover", ["trtllm", "cutlass", "junk"])
def test_a_leftover_of_the_deprecated_variable_changes_nothing_on_other_cards(
    start: Start, monkeypatch: pytest.MonkeyPatch, card: tuple[int, int] | None, leftover: str
) -> None:
    monkeypatch.setenv("SGLANG_FLASHINFER_FP4_GEMM_BACKEND", leftover)
    start("auto", card)
    assert STATE.chosen is None
    assert STATE.refusal is None


@pytest.mark.parametrize("written", ["b12x", "flashinfer_b12x"])
def test_the_deprecated_variable_still_works_with_a_warning(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, written: str
) -> None:
    monkeypatch.setenv("SGLANG_FLASHINFER_FP4_GEMM_BACKEND", written)
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        assert start("auto", RTX) == "flashinfer_b12x"
    assert "deprecated" in caplog.text
    assert "--fp4-gemm-backend flashinfer_b12x" in caplog.text


def test_a_deprecated_value_that_nobody_knows_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FLASHINFER_FP4_GEMM_BACKEND", "fastest")
    with pytest.raises(ConfigError, match="SGLANG_FLASHINFER_FP4_GEMM_BACKEND='fastest'"):
        start("auto", RTX)


def test_a_wrong_result_in_the_self_test_stops_the_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_sm120.backends import torch_reference

    right = torch_reference.linear
    monkeypatch.setattr(torch_reference, "linear", lambda *args: right(*args) * 2)
    with pytest.raises(SelfTestError, match="torch_reference gave"):
        start("torch_reference", None)


class Kernels:
    """Stands for what ``build.load`` gives: counts the loads, and can fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, seconds: float = 0.0) -> None:
        from sglang_sm120 import native, self_test

        self.loaded: list[str] = []
        self.tested: list[tuple[str, str]] = []
        clock = [0.0]
        monkeypatch.setattr(native, "time", SimpleNamespace(monotonic=lambda: clock[0]))

        def load(device: Any) -> Any:
            self.loaded.append(str(device))
            clock[0] += seconds
            if error is not None:
                raise error
            return None, True

        monkeypatch.setattr(native, "_library", load)
        monkeypatch.setattr(self_test, "run", lambda backend, device: self.tested.append((backend, str(device))))


@pytest.mark.parametrize("card", [(8, 0), HOPPER, RTX, SPARK])
def test_our_kernels_are_loaded_and_tested_before_any_layer_exists(
    start: Start, card: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels(monkeypatch)
    assert start("sm120", card) == "sm120"
    assert kernels.loaded == ["cuda:0"]
    assert kernels.tested == [("sm120", "cuda:0")]


@pytest.mark.parametrize(("seconds", "told"), [(0.1, False), (41.3, True)])
def test_the_time_of_compiling_is_told_and_that_of_loading_is_not(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, told: bool
) -> None:
    Kernels(monkeypatch, seconds=seconds)
    with caplog.at_level(logging.INFO, "sglang_sm120"):
        start("sm120", RTX)
    assert ("ready after 41.3 s" in caplog.text) == told


def test_kernels_that_cannot_be_loaded_stop_the_first_nvfp4_layer_by_name(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels(monkeypatch, UnsupportedError("The driver offers CUDA 12.8, the kernels need 13.0."))
    start("sm120", RTX)
    assert kernels.tested == []
    with pytest.raises(UnsupportedError, match=r"--fp4-gemm-backend='sm120'.*12\.8.*13\.0.*torch_reference"):
        make_case("modelopt", 128, [128], fresh_generator())


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"driver": "575.57.08"}, r">= 580.*575\.57\.08"),
        ({"kernels_cuda": None}, r"CUDA for the kernels.*>=12\.9"),
        ({"tvm_ffi": None}, "pip install .*apache-tvm-ffi"),
    ],
)
def test_what_our_kernels_need_is_named(
    start: Start, versions: dict[str, str | None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels(monkeypatch)
    start("sm120", RTX, **versions)
    with pytest.raises(UnsupportedError, match=says):
        make_case("modelopt", 128, [128], fresh_generator())
    assert kernels.loaded == []


def test_a_seam_that_somebody_replaced_stops_the_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.layers.quantization.modelopt_quant as modelopt

    monkeypatch.setattr(modelopt.ModelOptFp4LinearMethod, "apply", lambda self, layer, x, bias=None: x)
    with pytest.raises(SeamError, match=r"apply \(ModelOpt\) is broken"):
        start("torch_reference", None)


def test_a_server_that_is_checked_needs_every_seam_though_sglang_chooses(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.srt.layers.quantization.modelopt_quant as modelopt

    monkeypatch.setattr(modelopt.ModelOptFp4LinearMethod, "apply", lambda self, layer, x, bias=None: x)
    start("auto", HOPPER)
    assert STATE.chosen is None
    monkeypatch.setenv("SGLANG_SM120_VERIFY", "8")
    with pytest.raises(SeamError, match=r"apply \(ModelOpt\) is broken"):
        start("auto", HOPPER)


def test_one_line_says_what_was_chosen_and_why(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sglang_sm120"):
        start("auto", RTX)
    lines = [r for r in caplog.records if r.name == "sglang_sm120" and r.levelno == logging.INFO]
    assert len(lines) == 1
    for part in ("flashinfer_cutlass", "default", "a card that is not here", "0.5.23", "0.7.2", "seams live"):
        assert part in lines[0].getMessage()


@pytest.mark.parametrize(("rank", "level"), [(0, logging.INFO), (1, logging.DEBUG)])
@pytest.mark.parametrize("holder", ["direct", "ps"])
def test_only_rank_zero_reports(rank: int, level: int, holder: str, caplog: pytest.LogCaptureFixture) -> None:
    from sglang_sm120.dispatch import Decision

    scheduler: Any = SimpleNamespace(tp_rank=rank)
    if holder == "ps":
        scheduler = SimpleNamespace(ps=scheduler)
    with caplog.at_level(logging.DEBUG, "sglang_sm120"):
        resolution._report(Decision("flashinfer_b12x", "default", False, "r"), HostFacts(RTX), scheduler)
    assert [r.levelno for r in caplog.records if r.name == "sglang_sm120"] == [level]


def test_every_existing_seam_is_live_in_this_process(start: Start) -> None:
    start("torch_reference", None)
    states = {s.name: s.state for s in installer.verify()}
    gone = {seam.name for seam in SEAMS if seam.until is not None}  # code of earlier releases
    assert {name for name, state in states.items() if state == "absent"} == gone, states
    assert {state for name, state in states.items() if name not in gone} == {"live"}, states
