"""A real server with NVFP4 experts and MoE runners of ours, by a tuning table, answers like an independent model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from cpu_host import hf_reference
from cpu_host.checkpoints import Spec
from cpu_host.kernels.build import library_path
from cpu_host.runtime import KERNELS_VARIABLE
from cpu_host.server import Server
from sglang_sm120 import env
from sglang_sm120.device import collect_facts
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import table
from sglang_sm120.tuning.choice import Timing
from sglang_sm120.tuning.expert_cases import ExpertShape, experts_of_model
from sglang_sm120.tuning.results import ExpertEntry
from tests.support.checkpoints import Checkpoints
from tests.support.servers import ask, judge, launch

pytestmark = pytest.mark.server

SPEC = Spec(format="modelopt", experts=6)
RUNNER = "sm120_tuned"


@pytest.fixture(scope="module")
def shape(checkpoints: Checkpoints) -> ExpertShape:
    """What ``tune MODEL`` would measure."""
    (found,) = experts_of_model(str(checkpoints.folder(SPEC)), 1, 1)
    return found


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, shape: ExpertShape, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its table has times that were made up so that decode goes to the kernels (emulated) and prefill to the oracle."""
    workdir = tmp_path_factory.mktemp("experts")
    first, second = Timing(1, 1, 1), Timing(9, 9, 9)
    decode, prefill = {"sm120": first, "torch_reference": second}, {"sm120": second, "torch_reference": first}
    entries = [
        ExpertEntry(shape, "bfloat16", 4, "sm120", decode),
        ExpertEntry(shape, "bfloat16", 64, "torch_reference", prefill),
    ]
    environ = {env.CACHE_DIR: str(workdir / "cache"), KERNELS_VARIABLE: str(library_path())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.CACHE_DIR, environ[env.CACHE_DIR])
        table.save(identity_of(collect_facts()), entries, ["sglang-sm120", "tune"])
    arguments = ["--moe-runner-backend", RUNNER]
    options = launch(SPEC, checkpoints.folder(SPEC), workdir, arguments=arguments, environ=environ)
    with Server(options) as running:
        yield running


def swap_gate_and_up(expert: nn.Module) -> None:
    expert.gate_proj, expert.up_proj = expert.up_proj, expert.gate_proj


def enlarge(expert: nn.Module) -> None:
    expert.down_proj.weight64 *= 2


def turn_inputs(expert: nn.Module) -> None:
    for layer in (expert.gate_proj, expert.up_proj):
        layer.weight64 = torch.roll(layer.weight64, 16, 1)


def test_log_probabilities_equal_the_independent_model(server: Server, checkpoints: Checkpoints) -> None:
    comparison = judge(ask(server), checkpoints.reference(checkpoints.folder(SPEC)))
    assert comparison.agrees, comparison


@pytest.mark.parametrize("mistake", [swap_gate_and_up, enlarge, turn_inputs])
def test_the_check_notices_a_mistake_in_the_experts(
    server: Server, checkpoints: Checkpoints, mistake: Callable[[nn.Module], None]
) -> None:
    """Planted in the independent model, which is compared with the same answers."""
    model = hf_reference.load(checkpoints.folder(SPEC))
    for layer in model.model.layers:
        for expert in layer.mlp.experts:
            mistake(expert)
    comparison = judge(ask(server), model)
    assert not comparison.agrees, comparison


def test_the_named_runner_is_logged_once(server: Server) -> None:
    lines = [line for line in server.log().splitlines() if f"--moe-runner-backend {RUNNER} serves" in line]
    assert len(lines) == 1, lines
    assert lines[0].endswith("serves the NVFP4 experts of 2 layers.")


def test_which_number_of_tokens_goes_where_is_logged_once(server: Server, shape: ExpertShape) -> None:
    lines = [line for line in server.log().splitlines() if shape.label in line]
    assert len(lines) == 1, lines
    assert f"{shape.label} bfloat16: M<=4 sm120, above torch_reference" in lines[0]
