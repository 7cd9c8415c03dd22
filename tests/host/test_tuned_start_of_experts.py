"""``--moe-runner-backend sm120_tuned`` before weights load: which sizes nobody can serve, and whose table counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sm120.backends import torch_reference
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.host import moe_choice, moe_layers, moe_patches, moe_tuning, ranks
from sglang_sm120.host.moe_choice import Runners
from sglang_sm120.host.patching import Patcher
from sglang_sm120.tuning.expert_cases import read_experts
from tests.dispatch.machines import RTX, machine
from tests.host.conftest import Serving
from tests.host.expert_layers import ExpertLayer, Shape, serve_with
from tests.support.moe_problem import random_moe


@pytest.fixture(autouse=True)
def clean(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(moe_choice, "RUNNERS", Runners())
    monkeypatch.delenv(moe_choice.CARRIER, raising=False)
    monkeypatch.delenv("SGLANG_SM120_ALLOW_UNSAFE", raising=False)
    moe_tuning.forget()
    yield
    moe_tuning.forget()


def test_a_size_that_sglang_cannot_prepare_is_refused_and_not_left_to_it() -> None:
    """ModelOpt's gated experts end in an assertion of SGLang's after the weights were read, whatever then serves."""
    serve_with("sm120_tuned", "ModelOpt", facts=machine(RTX))
    with pytest.raises(UnsupportedError, match=r"leaves 88 of 704 .* no multiple of 64; .* works is 11"):
        ExpertLayer("ModelOpt", Shape(inner=88, tensor_parallel=8))


def test_experts_without_a_gate_are_looked_up_as_they_are_measured() -> None:
    serve_with("torch_reference", "ModelOpt")
    layer = ExpertLayer("ModelOpt", Shape(gated=False, inner=48))
    (measured,) = read_experts(["6x3x128x48:relu2"], 1)
    assert moe_layers.shape_of(layer.layer, layer.method.sm120_experts) == measured


def start_of_a_scheduler() -> Any:
    module: Any = ModuleType("utils")
    member = SimpleNamespace(value="auto")
    module.initialize_moe_config = lambda: None
    module.get_moe_runner_backend = module.get_speculative_moe_runner_backend = lambda: member
    moe_patches.note_runners(module, Patcher())
    return module


def test_a_server_that_runs_prefill_and_decode_at_once_is_noted() -> None:
    module = start_of_a_scheduler()

    class Scheduler:
        def __init__(self, pdmux: bool) -> None:
            self.server_args = SimpleNamespace(enable_pdmux=pdmux)
            module.initialize_moe_config()

    for pdmux in (True, False):
        Scheduler(pdmux)
        assert moe_choice.RUNNERS.two_streams == pdmux


def test_another_server_of_the_process_finds_its_own_table() -> None:
    module = start_of_a_scheduler()
    serve_with("sm120_tuned", "ModelOpt")
    device = torch.device("cpu")
    before = moe_tuning.start(device)
    assert moe_tuning.start(device) is before
    module.initialize_moe_config()
    assert moe_tuning.start(device) is not before


def test_the_plan_of_a_kind_of_experts_is_made_once() -> None:
    """It has an entry for each number of tokens that a table names, up to 999,999; models have dozens of layers."""
    serve_with("sm120_tuned", "ModelOpt")
    plans = [ExpertLayer("ModelOpt", Shape()).method.sm120_experts.plan for _ in range(2)]
    assert plans[0] is plans[1]


def test_a_batch_without_tokens_stays_here_where_sglang_serves_the_others() -> None:
    serve_with("sm120_tuned", "ModelOpt", facts=machine(RTX))
    layer = ExpertLayer("ModelOpt", Shape())
    assert layer.method.sm120_experts.runner_for(1) is None
    assert layer.run(*layer.batch(0)).shape == (0, 128)


@pytest.mark.parametrize(("theirs", "own"), [("sm120", "sm120"), ("torch_reference", "torch_reference")])
def test_experts_without_an_entry_get_what_passed_its_probe_on_every_rank(
    theirs: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, and only one of them may have a probe record."""
    probed = replace(machine(RTX), probed_experts={"sm120": "ok"})
    monkeypatch.setattr(moe_tuning, "_load", lambda *_: None)
    monkeypatch.setattr(ranks, "gather", lambda told: [told, theirs if isinstance(told, str) else told])
    serve_with("sm120_tuned", "ModelOpt", facts=probed)
    assert moe_tuning.start(torch.device("cpu")).own == own


def test_the_oracle_says_what_a_cuda_graph_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_moe(1, 4, 2, 64, 32)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    with pytest.raises(UnsupportedError, match=r"--moe-runner-backend='torch_reference' .* --disable-cuda-graph"):
        torch_reference.moe(on_gpu, case.ids, case.weights, case.w13, case.w2, "silu", False, 0)
