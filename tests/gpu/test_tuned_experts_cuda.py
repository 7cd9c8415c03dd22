"""Experts tuned on the card that is here, and layers of SGLang served by that table: eagerly and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_sm120 import env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.cli import tune as room
from sglang_sm120.cli.bench import Wish
from sglang_sm120.device import collect_facts
from sglang_sm120.host import moe_choice, moe_tuning
from sglang_sm120.host.moe_choice import Runners
from sglang_sm120.probing import expert_bound, record
from sglang_sm120.probing.record import Outcome
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import table
from sglang_sm120.tuning.choice import Timing
from sglang_sm120.tuning.expert_cases import ExpertShape
from sglang_sm120.tuning.results import ExpertEntry
from tests.gpu.graphs import assert_a_graph_follows
from tests.host.conftest import Serving
from tests.host.expert_layers import KINDS, ExpertLayer, Shape, serve_with
from tests.support.nvfp4 import assert_matches_oracle

pytestmark = pytest.mark.gpu
SHAPE = Shape(experts=16, hidden=1024, inner=256, top_k=4)
GEOMETRY = ExpertShape(16, 16, 4, 1024, 256)
VALUES = ("sm120", "torch_reference")


@pytest.fixture(autouse=True)
def facts(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostFacts]:
    """Of this machine, where both runners of ours passed their probe of experts."""
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(moe_choice, "RUNNERS", Runners())
    here = collect_facts()
    record.save(identity_of(here), {}, {value: Outcome("ok", "tests/gpu/test_moe_layers_cuda.py") for value in VALUES})
    moe_tuning.forget()
    yield replace(here, probed_experts=dict.fromkeys(VALUES, "ok"))
    moe_tuning.forget()


def make(kind: str, facts: HostFacts) -> ExpertLayer:
    serve_with("sm120_tuned", kind, facts=facts)
    return ExpertLayer(kind, SHAPE, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_tuned_and_a_layer_is_served_by_the_table(kind: str, facts: HostFacts) -> None:
    wish = Wish(None, (), 1, "1,16,64", VALUES, "bfloat16", 600.0, False, ("16x4x1024x256",))
    tuned = room.tune(wish, None, again=False, quiet=True)
    assert tuned.session.ended == ""
    assert tuned.table is not None
    assert all(set(entry.timings) == set(VALUES) for entry in tuned.table.experts.values())
    choices = tuned.table.runners_by_rows(GEOMETRY.key, "bfloat16", VALUES)
    assert set(choices.values()) == {"sm120"}, "the oracle wins nowhere"
    layer = make(kind, facts)
    for tokens in (1, 9, 64):
        assert layer.method.sm120_experts.runner_for(tokens) == "sm120"
        batch = layer.batch(tokens)
        total, bound = expert_bound.expected(*layer.oracle_arguments(*batch))
        assert_matches_oracle(layer.run(*batch).cpu(), total, bound)


def test_each_captured_graph_holds_the_kernels_of_its_number_of_tokens(facts: HostFacts) -> None:
    """The oracle waits for the GPU and cannot be captured; where the table names the kernels, they can."""
    fast, slow = Timing(1, 1, 1), Timing(9, 9, 9)
    few = ExpertEntry(GEOMETRY, "bfloat16", 8, "sm120", {"sm120": fast, "torch_reference": slow})
    many = ExpertEntry(GEOMETRY, "bfloat16", 32, "torch_reference", {"sm120": slow, "torch_reference": fast})
    table.save(identity_of(facts), [few, many], ["test"])
    layer = make("ModelOpt", facts)
    batches = [layer.batch(5) for _ in range(2)]
    expected = [layer.run(*batch) for batch in batches]
    assert_a_graph_follows(layer.run, batches, expected)
    eager = layer.batch(32)
    assert torch.equal(layer.run(*eager).cpu(), layer.expected(*eager))
