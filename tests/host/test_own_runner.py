"""SGLang's own runner of experts, where it has no code for the card: whose function is called, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.dispatch import Decision
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.host import moe_resolution, operators
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.state import STATE
from tests.dispatch.machines import RTX, SPARK, released
from tests.support.moe_problem import random_moe


def old_module() -> ModuleType:
    """What ``sglang.srt.layers.moe.cutlass_moe`` binds up to 0.5.15, on a machine without its operators."""
    module: Any = ModuleType("cutlass_moe")
    module.cutlass_moe_fp4 = lambda *args, **kwargs: "SGLang's"
    return module  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def undecided() -> Iterator[None]:
    yield
    STATE.__init__()  # type: ignore[misc]


def decide(backend: str, facts: HostFacts) -> None:
    STATE.decide(Decision(backend, "command line", True, "test"), facts, BACKENDS[backend])


def test_the_whole_runner_is_ours_while_the_operators_are() -> None:
    module, patcher = old_module(), Patcher()
    original = module.cutlass_moe_fp4
    operators.route_experts(module, patcher)
    assert module.cutlass_moe_fp4() == "SGLang's"
    decide("torch_reference", released(SPARK, "0.5.9"))
    case = random_moe(2, 4, 2, 64, 32, gate_first=True, per_expert=True)
    stacks = {
        name: value
        for number, stack in ((1, case.w13), (2, case.w2))
        for name, value in (
            (f"a{number}_gscale", stack.input_global_scale),
            (f"w{number}_fp4", stack.packed),
            (f"w{number}_blockscale", stack.scales),
            (f"w{number}_alphas", stack.alpha),
        )
    }
    out = module.cutlass_moe_fp4(
        a=case.hidden, **stacks, topk_weights=case.weights, topk_ids=case.ids, params=None, no_combine=False
    )
    assert torch.equal(out, case.run("torch_reference"))
    patcher.undo()
    assert module.cutlass_moe_fp4 is original


@pytest.mark.parametrize("quantization", ["modelopt_fp4", "compressed-tensors"])
def test_a_layer_for_it_is_made_only_where_ours_stands_in(quantization: Any) -> None:
    decide("sm120", released(SPARK, "0.5.9"))
    assert STATE.operators == "sm120"
    moe_resolution.check_layer("cutlass", quantization)
    with pytest.raises(UnsupportedError, match="flashinfer_trtllm"):
        moe_resolution.check_layer("flashinfer_trtllm", quantization)
    STATE.operators = None
    with pytest.raises(UnsupportedError, match="'cutlass'.*needs SGLang >=0.5.10"):
        moe_resolution.check_layer("cutlass", quantization)


def test_a_part_of_modelopts_experts_is_refused_before_sglang_fails_to_prepare_it() -> None:
    """Ours stand in at the end of SGLang's way, and it does not get there."""
    decide("sm120", released(SPARK, "0.5.9"))
    with pytest.raises(UnsupportedError, match="stops with a RuntimeError when the weights are loaded"):
        moe_resolution.check_layer("auto", "modelopt_fp4", expert_parallel=True)
    moe_resolution.check_layer("auto", "compressed-tensors", expert_parallel=True)


def test_a_card_that_sglang_has_code_for_keeps_it() -> None:
    decide("sm120", released(RTX, "0.5.9"))
    assert STATE.operators is None
