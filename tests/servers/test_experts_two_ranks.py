"""Two ranks that talk through gloo share NVFP4 experts, by their columns or by their number, and answer right."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cpu_host.checkpoints import Spec
from cpu_host.kernels.build import library_path
from cpu_host.runtime import KERNELS_VARIABLE
from cpu_host.server import Server
from tests.support.checkpoints import Checkpoints
from tests.support.servers import ask, judge, launch

pytestmark = pytest.mark.server

#: Checkpoint, runner, further arguments. ModelOpt's experts cannot be cut to 32 columns; the kernels run emulated.
WAYS = {
    "tensor parallel": (Spec(format="compressed-tensors", experts=6), "torch_reference", ()),
    "expert parallel": (Spec(format="modelopt", experts=6), "sm120", ("--ep-size", "2")),
}


@pytest.fixture(scope="module", params=list(WAYS))
def way(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Spec, str]]:
    """SGLang takes one rank per NUMA node on the CPU unless it is told which cores are whose."""
    spec, runner, extra = WAYS[request.param]
    cores = sorted(os.sched_getaffinity(0))
    environ = {
        KERNELS_VARIABLE: str(library_path()),
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
    }
    arguments = ["--tp-size", "2", "--moe-runner-backend", runner, *extra]
    workdir = tmp_path_factory.mktemp("ranks")
    options = launch(spec, checkpoints.folder(spec), workdir, arguments=arguments, environ=environ)
    with Server(options, timeout=420) as running:
        yield running, spec, runner


def test_log_probabilities_equal_the_independent_model(way: tuple[Server, Spec, str], checkpoints: Checkpoints) -> None:
    server, spec, runner = way
    comparison = judge(ask(server), checkpoints.reference(checkpoints.folder(spec)))
    assert comparison.agrees, comparison
    assert len(server.evidence()) == 2
    lines = [line for line in server.log().splitlines() if f"--moe-runner-backend {runner} serves" in line]
    assert len(lines) == 1, lines
