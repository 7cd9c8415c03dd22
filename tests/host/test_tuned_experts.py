"""``--moe-runner-backend sm120_tuned``: each batch goes to the runner that the table names, and every rank agrees.

The layers are the real classes of SGLang 0.5.23; times are made up, so that the choice is known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpu_host.kernels import build
from cpu_host.kernels.library import EmulatedLibrary
from sglang_sm120 import env, native, native_moe, ops, self_test
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.host import moe_choice, moe_layers, moe_resolution, moe_tuning, ranks
from sglang_sm120.host.moe_choice import Runners
from sglang_sm120.probing import expert_bound
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import table
from sglang_sm120.tuning.choice import Timing, choose
from sglang_sm120.tuning.expert_cases import ExpertShape
from sglang_sm120.tuning.results import ExpertEntry
from tests.dispatch.machines import RTX, machine
from tests.host.conftest import Serving
from tests.host.expert_layers import KINDS, ExpertLayer, Shape, serve_with
from tests.support.nvfp4 import assert_matches_oracle

pytestmark = pytest.mark.usefixtures("one_thread")
ON_A_CPU = HostFacts(capability=None)
ON_RTX = machine(RTX)
GEOMETRY = ExpertShape(6, 6, 3, 128, 64)
CPU_TIMES = {4: {"torch_reference": 1.0, "sm120": 9.0}, 64: {"torch_reference": 9.0, "sm120": 1.0}}
RTX_TIMES = {16: {"sm120": 1.0, "flashinfer_cutlass": 9.0}, 64: {"sm120": 9.0, "flashinfer_cutlass": 1.0}}

Times = dict[int, dict[str, float]]


@pytest.fixture(autouse=True)
def clean(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(moe_choice, "RUNNERS", Runners())
    monkeypatch.delenv("SGLANG_SM120_ALLOW_UNSAFE", raising=False)
    moe_tuning.forget()
    yield
    moe_tuning.forget()


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    return EmulatedLibrary(build.library_path())


@pytest.fixture(autouse=True)
def checked(library: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels are emulated; their check at the start takes seconds there and is only counted."""
    found: list[str] = []
    monkeypatch.setattr(native, "_library", lambda device: (library, True))
    monkeypatch.setattr(native_moe, "start", lambda device: None)
    monkeypatch.setattr(self_test, "run_moe", lambda runner, device: found.append(runner))
    return found


def entries(times: Times, shape: ExpertShape = GEOMETRY) -> list[ExpertEntry]:
    found = []
    for m, by_value in times.items():
        timings = {value: Timing(t, t, t) for value, t in by_value.items()}
        found.append(ExpertEntry(shape, "bfloat16", m, choose(timings), timings))
    return found


def tuned_layer(kind: str, facts: HostFacts, times: Times, shape: Shape | None = None) -> ExpertLayer:
    if times:
        table.save(identity_of(facts), entries(times), ["sglang-sm120", "tune", "some/model"])
    serve_with("sm120_tuned", kind, facts=facts)
    return ExpertLayer(kind, shape or Shape())


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runners of ours that the operator was asked for."""
    found: list[str] = []
    right = ops.nvfp4_moe

    def nvfp4_moe(*given: Any) -> torch.Tensor:
        found.append(given[-1])
        return right(*given)

    monkeypatch.setattr(ops, "nvfp4_moe", nvfp4_moe)
    return found


def by_sglang(layer: ExpertLayer, tokens: int) -> bool:
    """Whether SGLang's own method gets a batch."""
    got: list[int] = []
    layer.method.runner = SimpleNamespace(run=lambda given, _: got.append(len(given.hidden_states)) or given)
    layer.run(*layer.batch(tokens))
    return got == [tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_go_to_one_runner_and_many_to_another_and_both_are_right(
    kind: str, called: list[str], checked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As on a card where SGLang's own kernels do not run."""
    facts = machine(RTX, flashinfer="0.6.7")
    with caplog.at_level(logging.INFO, "sglang_sm120"):
        layer = tuned_layer(kind, facts, CPU_TIMES)
    for tokens in (0, 1, 4, 5, 70):
        batch = layer.batch(tokens)
        total, bound = expert_bound.expected(*layer.oracle_arguments(*batch))
        assert_matches_oracle(layer.run(*batch), total, bound)
    assert called == ["torch_reference"] * 3 + ["sm120"] * 2
    assert checked == ["sm120", "torch_reference"], "no kernel serves unchecked"
    assert f"{GEOMETRY.label} bfloat16: M<=4 torch_reference, above sm120" in caplog.text
    caplog.clear()
    ExpertLayer(kind, Shape())
    assert "M<=4" not in caplog.text, "a kind of experts is said once"


def test_kernels_that_want_up_first_serve_no_layer_whose_gate_comes_first() -> None:
    """``tune`` measures the order of ``flashinfer_cutlass``; some releases load compressed-tensors the other way."""
    shape = ExpertShape(6, 6, 3, 256, 256)
    times: Times = {8: {"flashinfer_b12x": 1.0, "flashinfer_cutlass": 9.0}}
    table.save(identity_of(ON_RTX), entries(times, shape), ["sglang-sm120", "tune", "some/model"])
    tuning = moe_tuning.ExpertTuning(ON_RTX, table.find(ON_RTX)[0], "torch_reference")
    plans = [tuning.plan(shape, "bfloat16", "modelopt_fp4", gate_first=first) for first in (False, True)]
    assert [plan[8] for plan in plans] == ["flashinfer_b12x", None]


def test_kernels_that_want_one_stream_serve_no_server_with_two() -> None:
    shape = ExpertShape(6, 6, 3, 256, 256)
    table.save(identity_of(ON_RTX), entries({8: {"flashinfer_b12x": 1.0, "sm120": 9.0}}, shape), ["tune"])
    for two, served in ((False, "flashinfer_b12x"), (True, "sm120")):
        moe_choice.RUNNERS.two_streams = two
        tuning = moe_tuning.ExpertTuning(ON_RTX, table.find(ON_RTX)[0], "torch_reference")
        assert tuning.plan(shape, "bfloat16", "modelopt_fp4", gate_first=False)[8] == served


@pytest.mark.parametrize("kind", KINDS)
def test_beyond_the_measured_crossover_sglangs_own_method_serves(kind: str, called: list[str]) -> None:
    layer = tuned_layer(kind, ON_RTX, RTX_TIMES)
    assert [by_sglang(layer, tokens) for tokens in (1, 16, 17, 64, 65)] == [False, False, True, True, True]
    assert called == ["sm120"] * 2
    layer.layer.dispatcher.local_expert_mapping = torch.empty(0)  # ids that SGLang's kernels would misread
    assert not by_sglang(layer, 17)


@pytest.mark.parametrize(
    ("facts", "times", "served"),
    [
        (ON_RTX, {}, {1: None, 100: None}),
        (ON_A_CPU, {}, {1: "torch_reference", 100: "torch_reference"}),
        # SGLang's kernels run here and were not measured: the limit of sm120 holds.
        (ON_RTX, {8: {"sm120": 1.0}, 512: {"sm120": 1.0}}, {64: "sm120", 65: None}),
        (ON_RTX, {8: {"flashinfer_cutlass": 1.0}}, {1: None, 9: None}),
        # SGLang 0.5.14 serves compressed-tensors experts with kernels of its own, whatever FlashInfer's took.
        (machine(RTX, sglang="0.5.14"), RTX_TIMES, {16: "sm120", 64: "sm120", 65: None}),
        # The oracle and the kernels of a card that is not here cannot serve on a CPU.
        (ON_A_CPU, RTX_TIMES, {1: "torch_reference"}),
    ],
)
def test_what_serves_follows_from_the_table_and_from_what_runs(
    facts: HostFacts, times: Times, served: dict[int, str | None]
) -> None:
    layer = tuned_layer("compressed-tensors", facts, times)
    assert {m: layer.method.sm120_experts.runner_for(m) for m in served} == served


@pytest.mark.parametrize(
    ("probed", "served"),
    [
        ({"sm120": "wrong"}, {1: None, 64: None}),
        ({"flashinfer_cutlass": "crash"}, {1: "sm120", 64: "sm120", 9999: "sm120"}),
        ({"sm120": "ok", "flashinfer_cutlass": "timeout"}, {64: "sm120"}),
        ({"sm120": "wrong", "flashinfer_cutlass": "wrong"}, {1: "torch_reference"}),
    ],
)
def test_a_runner_that_failed_its_probe_serves_nothing_and_one_warning_says_so(
    probed: dict[str, str], served: dict[int, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    facts = HostFacts(ON_RTX.capability, ON_RTX.versions, device_name=ON_RTX.device_name, probed_experts=probed)
    layer = tuned_layer("ModelOpt", facts, RTX_TIMES)
    assert {m: layer.method.sm120_experts.runner_for(m) for m in served} == served
    failed = [value for value, status in probed.items() if status != "ok"]
    for value in failed:
        told = [r.getMessage() for r in caplog.records if r.getMessage().startswith(f"{value} is not used by")]
        assert told == [
            f"{value} is not used by --moe-runner-backend sm120_tuned in this server: "
            f"probe says {probed[value]} of its experts"
        ]


def test_without_a_table_one_warning_names_the_command(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        tuned_layer("ModelOpt", ON_A_CPU, {})
    told = [r.getMessage() for r in caplog.records if "no tuning table" in r.getMessage()]
    assert len(told) == 1
    assert told[0].endswith(
        "tune MODEL. Until then SGLang's own kernels serve experts where they run here, else torch_reference."
    )


@pytest.mark.parametrize(
    ("shape", "words"),
    [(Shape(inner=88, tensor_parallel=8), "leaves 88 of 704"), (Shape(config={"gemm1_clamp_limit": 7.0}), "clamps")],
)
def test_experts_that_ours_do_not_compute_are_left_to_sglang_where_it_runs(
    shape: Shape, words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = tuned_layer("compressed-tensors", ON_RTX, RTX_TIMES, shape)
    experts = layer.method.sm120_experts
    assert words in experts.left
    assert experts.runner_for(1) is None
    layer.layer.dispatcher.local_expert_mapping = torch.empty(0)
    batch = SimpleNamespace(hidden_states=torch.empty(1, 128))
    assert moe_layers.runner_of(layer.layer, experts, batch) is None
    assert f"flashinfer_cutlass serves experts that {moe_resolution.FLAG} sm120_tuned does not" in caplog.text
    with pytest.raises(UnsupportedError, match=words):
        tuned_layer("compressed-tensors", ON_A_CPU, {}, shape)


def test_what_one_rank_cannot_use_none_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {"sm120": "its kernels cannot be had"}
    monkeypatch.setattr(ranks, "gather", lambda told: [told, without if isinstance(told, dict) else told])
    layer = tuned_layer("ModelOpt", ON_RTX, RTX_TIMES)
    assert layer.method.sm120_experts.runner_for(1) is None
