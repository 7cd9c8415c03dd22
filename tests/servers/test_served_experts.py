"""A real server with NVFP4 experts and a MoE runner of ours answers like an independent model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from cpu_host import hf_reference
from cpu_host.checkpoints import Spec
from cpu_host.server import Server
from tests.support.checkpoints import Checkpoints
from tests.support.servers import ask, judge, launch

pytestmark = pytest.mark.server

SPEC = Spec(format="modelopt", experts=6)
RUNNER = "torch_reference"


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--moe-runner-backend", RUNNER]
    options = launch(SPEC, checkpoints.folder(SPEC), tmp_path_factory.mktemp("experts"), arguments=arguments)
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
