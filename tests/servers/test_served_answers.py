"""What users see: a server of the newest release answers rightly with our backend, and would not if it were wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cpu_host.checkpoints import Spec, linears_per_forward
from cpu_host.kernels.build import library_path
from cpu_host.runtime import KERNELS_VARIABLE
from cpu_host.runtime.mutations import MUTATIONS
from cpu_host.server import Server
from tests.support.checkpoints import Checkpoints
from tests.support.servers import PROMPT, ask, judge, launch

pytestmark = pytest.mark.server

#: N and K of every kind: fused shards of their own scales, multiples of 16 only, bias.
ODD = Spec(format="modelopt", odd=True, different_scales=True, bias=True)
#: Checkpoint and backend. The kernels of sm120 run emulated, from the same sources as on a GPU.
SERVED = (
    (Spec(format="modelopt"), "torch_reference"),
    (ODD, "torch_reference"),
    (replace(ODD, format="compressed-tensors"), "torch_reference"),
    (ODD, "sm120"),
)


@pytest.fixture(scope="module", params=SERVED, ids=lambda p: f"{p[0].format}{'-odd' if p[0].odd else ''}-{p[1]}")
def served(request: pytest.FixtureRequest) -> tuple[Spec, str]:
    chosen: tuple[Spec, str] = request.param
    return chosen


@pytest.fixture(scope="module")
def spec(served: tuple[Spec, str]) -> Spec:
    return served[0]


@pytest.fixture(scope="module")
def backend(served: tuple[Spec, str]) -> str:
    return served[1]


@pytest.fixture(scope="module")
def server(
    spec: Spec, backend: str, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    environ = {KERNELS_VARIABLE: str(library_path())} if backend == "sm120" else {}
    workdir = tmp_path_factory.mktemp("server")
    with Server(launch(spec, checkpoints.folder(spec), workdir, backend=backend, environ=environ)) as running:
        yield running


def test_log_probabilities_equal_the_independent_model(server: Server, spec: Spec, checkpoints: Checkpoints) -> None:
    comparison = judge(ask(server), checkpoints.reference(checkpoints.folder(spec)))
    assert comparison.agrees, comparison


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_planted_mistake_fails_the_same_check(
    server: Server, spec: Spec, checkpoints: Checkpoints, mutation: str
) -> None:
    server.plant(mutation)
    try:
        comparison = judge(ask(server), checkpoints.reference(checkpoints.folder(spec)))
    finally:
        server.plant("")
    assert not comparison.agrees, comparison
    # Not by a hair either: twice the bound, or the check would pass the next mistake.
    assert comparison.mean > 2 * comparison.MEAN_BOUND, comparison


def test_every_linear_of_every_forward_reached_the_backend(server: Server, spec: Spec, backend: str) -> None:
    (before,) = server.evidence()
    ask(server)
    (after,) = server.evidence()
    assert after.backend == backend
    assert after.forwards > before.forwards
    assert after.calls == after.forwards * linears_per_forward(spec)


def test_openai_completions_are_served(server: Server) -> None:
    body = {"model": "default", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 1}
    answer = server.post("/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 4
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 4


def test_reloaded_weights_are_the_ones_served(server: Server, spec: Spec, checkpoints: Checkpoints) -> None:
    first = checkpoints.folder(spec)
    second = checkpoints.folder(Spec(**{**vars(spec), "seed": spec.seed + 1}))
    for folder, other in ((second, first), (first, second)):
        assert server.post("/update_weights_from_disk", {"model_path": str(folder)})["success"]
        answer = ask(server)
        assert judge(answer, checkpoints.reference(folder)).agrees
        assert not judge(answer, checkpoints.reference(other)).agrees


def test_the_choice_is_logged_once(server: Server, backend: str) -> None:
    lines = [line for line in server.log().splitlines() if f"fp4 GEMM backend {backend} " in line]
    assert len(lines) == 1, lines
