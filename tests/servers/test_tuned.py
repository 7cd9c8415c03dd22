"""Two ranks with ``sm120_tuned``: few rows go to one backend, many to another, and the answers are right."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cpu_host.checkpoints import Spec, linears_per_forward
from cpu_host.kernels.build import library_path
from cpu_host.runtime import KERNELS_VARIABLE
from cpu_host.server import Server
from sglang_sm120 import env
from sglang_sm120.device import collect_facts
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import table
from sglang_sm120.tuning.cases import shapes_of_model
from sglang_sm120.tuning.choice import Timing
from sglang_sm120.tuning.results import Entry
from tests.support.checkpoints import Checkpoints
from tests.support.servers import NEW_TOKENS, ask, judge, launch

pytestmark = pytest.mark.server
SPEC = Spec(format="modelopt")
RANKS = 2


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its table has times that were made up so that decode and prefill go to different backends.

    The ranks talk through gloo. SGLang takes one rank per NUMA node on the CPU unless it is told which cores are whose.
    """
    folder, workdir = checkpoints.folder(SPEC), tmp_path_factory.mktemp("server")
    first, second = Timing(1, 1, 1), Timing(9, 9, 9)
    entries = []
    for shape in shapes_of_model(str(folder), RANKS):
        decode, prefill = {"sm120": first, "torch_reference": second}, {"sm120": second, "torch_reference": first}
        entries.append(Entry(shape.n, shape.k, "bfloat16", 4, "sm120", decode))
        entries.append(Entry(shape.n, shape.k, "bfloat16", 64, "torch_reference", prefill))
    cores = sorted(os.sched_getaffinity(0))
    environ = {
        env.CACHE_DIR: str(workdir / "cache"),
        KERNELS_VARIABLE: str(library_path()),
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.CACHE_DIR, environ[env.CACHE_DIR])
        table.save(identity_of(collect_facts()), entries, ["sglang-sm120", "tune"])
    arguments = ["--tp-size", str(RANKS)]
    options = launch(SPEC, folder, workdir, backend="sm120_tuned", arguments=arguments, environ=environ)
    with Server(options, timeout=420) as running:
        yield running


def test_decode_and_prefill_reach_the_backends_of_the_table_and_answers_are_right(
    server: Server, checkpoints: Checkpoints
) -> None:
    before = server.evidence()
    comparison = judge(ask(server), checkpoints.reference(checkpoints.folder(SPEC)))
    assert comparison.agrees, comparison
    after = server.evidence()
    assert len(after) == RANKS
    layers = linears_per_forward(SPEC)
    for old, new in zip(before, after, strict=True):
        assert new.backend == "sm120_tuned"
        forwards = new.forwards - old.forwards
        assert forwards >= NEW_TOKENS
        counted = {value: new.multiplied_by[value] - old.multiplied_by.get(value, 0) for value in new.multiplied_by}
        assert counted == {"torch_reference": layers, "sm120": (forwards - 1) * layers}


def test_the_choice_for_each_shape_is_logged_once(server: Server, checkpoints: Checkpoints) -> None:
    lines = server.log().splitlines()
    starts = [line for line in lines if "fp4 GEMM backend sm120_tuned (command line: tuning table of" in line]
    assert len(starts) == 1, starts
    shapes = shapes_of_model(str(checkpoints.folder(SPEC)), RANKS)
    for shape in shapes:
        chosen = [line for line in lines if f"N={shape.n} K={shape.k} bfloat16" in line]
        assert len(chosen) == 1, chosen
        assert "M<=4 sm120, above torch_reference" in chosen[0]
    assert "has no entry for" not in server.log()


def test_reloaded_weights_are_the_ones_served(server: Server, checkpoints: Checkpoints) -> None:
    other = checkpoints.folder(Spec(**{**vars(SPEC), "seed": SPEC.seed + 1}))
    assert server.post("/update_weights_from_disk", {"model_path": str(other)})["success"]
    assert judge(ask(server), checkpoints.reference(other)).agrees
