"""``tune`` on the card that is here, and layers served by its table: eagerly, in CUDA graphs, under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_sm120 import env, ops
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.cli import tune as room
from sglang_sm120.cli.bench import Wish
from sglang_sm120.device import collect_facts
from sglang_sm120.host import tuning
from sglang_sm120.host.state import STATE
from sglang_sm120.probing import record
from sglang_sm120.probing.record import Outcome
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import backend, table
from sglang_sm120.tuning.choice import Timing
from sglang_sm120.tuning.results import Entry
from tests.host.conftest import Serving
from tests.host.linear_layers import Case, make_case
from tests.support.nvfp4 import fresh_generator, random_activation

pytestmark = pytest.mark.gpu
N, K = 512, 1024
VALUES = ("sm120", "torch_reference")
Make = Callable[[str], Case]


@pytest.fixture(autouse=True)
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostFacts]:
    """Of this machine, where both backends of ours passed their probe."""
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    here = collect_facts()
    record.save(identity_of(here), {value: Outcome("ok", "tests/gpu/test_backends_cuda.py") for value in VALUES})
    backend.forget_plans()
    yield replace(here, probed=dict.fromkeys(VALUES, "ok"))
    backend.forget_plans()


@pytest.fixture
def make(serving: Serving, facts: HostFacts) -> Make:
    """Make the same layer for a value, as a server would that was started with it."""

    def make_layer(value: str) -> Case:
        serving.decide(value, facts=facts)
        device = torch.device("cuda")
        STATE.tuning = tuning.start(facts, device, allow_unsafe=False) if value == tuning.VALUE else None
        return make_case("modelopt", K, [N], torch.Generator().manual_seed(3), device="cuda")

    return make_layer


def choose_by_rows(facts: HostFacts) -> None:
    """A table in which up to 4 rows go to the oracle and more to the kernels."""
    fast, slow = Timing(1, 1, 1), Timing(9, 9, 9)
    few = Entry(N, K, "bfloat16", 4, "torch_reference", {"torch_reference": fast, "sm120": slow})
    many = Entry(N, K, "bfloat16", 64, "sm120", {"torch_reference": slow, "sm120": fast})
    table.save(identity_of(facts), [few, many], ["test"])


def rows(m: int) -> torch.Tensor:
    return random_activation(m, K, torch.bfloat16, fresh_generator()).cuda()


def test_two_shapes_are_tuned_and_a_layer_is_served_by_the_table(make: Make) -> None:
    wish = Wish(None, (f"{N}x{K}", "256x512"), 1, "1,16,64", VALUES, "bfloat16", 600.0)
    tuned = room.tune(wish, None, again=False, quiet=True)
    assert tuned.session.ended == ""
    assert tuned.table is not None
    assert tuned.table.shapes == [(256, 512, "bfloat16"), (N, K, "bfloat16")]
    assert all(set(entry.timings) == set(VALUES) for entry in tuned.table.dense.values())
    choices = tuned.table.choices(N, K, "bfloat16", VALUES)
    case = make(tuning.VALUE)
    x = rows(16)
    assert torch.equal(case.run(x), make(choices[16]).run(x))


def test_each_captured_graph_holds_the_kernels_of_its_m(make: Make, facts: HostFacts) -> None:
    choose_by_rows(facts)
    case, explicit = make(tuning.VALUE), {value: make(value) for value in VALUES}
    graphs = {}
    for m in (2, 16):
        x = rows(m)
        case.run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.run(x)
        graphs[m] = (graph, x, out)
    for m, value in ((2, "torch_reference"), (16, "sm120"), (2, "torch_reference")):
        graph, x, out = graphs[m]
        x.copy_(rows(m))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, explicit[value].run(x))


def test_one_compiled_graph_serves_every_m(make: Make, facts: HostFacts) -> None:
    choose_by_rows(facts)
    explicit = {value: make(value) for value in VALUES}
    layer = make(tuning.VALUE).layer
    operands = [layer.weight, layer.weight_scale, layer.sm120_activation_scale[0], layer.sm120_alpha[0], None]
    compiled = torch.compile(lambda x: ops.nvfp4_linear(x, *operands, tuning.VALUE), dynamic=True, fullgraph=True)
    for m, value in ((8, "sm120"), (3, "torch_reference"), (20, "sm120")):
        x = rows(m)
        assert torch.equal(compiled(x), explicit[value].run(x))
