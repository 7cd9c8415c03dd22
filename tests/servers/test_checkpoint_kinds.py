"""Checkpoints that need more than quantised activations times quantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpu_host.checkpoints import Format, Spec, linears_per_forward
from cpu_host.hf_reference import adapt, load
from cpu_host.server import Server
from tests.support.checkpoints import Checkpoints
from tests.support.servers import ask, judge, launch

pytestmark = pytest.mark.server


@pytest.mark.parametrize("kind", ["modelopt-awq", "modelopt-w4a16", "compressed-tensors-w4a16"])
def test_served_right(kind: Format, checkpoints: Checkpoints, tmp_path: Path) -> None:
    spec = Spec(format=kind)
    folder = checkpoints.folder(spec)
    with Server(launch(spec, folder, tmp_path)) as server:
        reference = checkpoints.reference(folder)
        comparison = judge(ask(server), reference)
        assert comparison.agrees, comparison
        server.plant("alpha")
        assert not judge(ask(server), reference).agrees
        (evidence,) = server.evidence()
        assert evidence.calls == evidence.forwards * linears_per_forward(spec)


def test_lora_on_quantised_layers(checkpoints: Checkpoints, tmp_path: Path) -> None:
    spec = Spec(format="modelopt")
    folder, adapter = checkpoints.folder(spec), checkpoints.adapter(spec)
    options = ["--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8", "--lora-paths"]
    with Server(launch(spec, folder, tmp_path, arguments=[*options, f"tuned={adapter}"])) as server:
        plain, tuned = ask(server), ask(server, lora_path="tuned")
        adapted = adapt(load(folder), adapter)
        assert judge(tuned, adapted).agrees, judge(tuned, adapted)
        assert judge(plain, checkpoints.reference(folder)).agrees
        assert not judge(plain, adapted).agrees
