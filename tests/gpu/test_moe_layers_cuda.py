"""MoE runners of ours through SGLang's real expert methods on a GPU: the oracle's numbers, and CUDA graphs."""

from __future__ import annotations

import pytest

from sglang_sm120.backends.moe_table import KERNEL_RUNNERS
from sglang_sm120.device import collect_facts
from sglang_sm120.host import moe_choice
from sglang_sm120.host.moe_choice import Runners
from sglang_sm120.probing import expert_bound
from tests.gpu.graphs import assert_a_graph_follows
from tests.host.conftest import Serving
from tests.host.expert_layers import KINDS, ExpertLayer, Shape, serve_with
from tests.support.nvfp4 import assert_matches_oracle

pytestmark = pytest.mark.gpu

SHAPES = {
    "gated": Shape(experts=16, hidden=2880, inner=128, top_k=4),
    "second of two ranks": Shape(experts=16, hidden=1024, inner=256, top_k=6, ranks=2, rank=1),
    "without a gate": Shape(experts=8, hidden=2688, inner=464, top_k=2, gated=False),
}
SERVED = [(kind, name) for kind in KINDS for name in SHAPES if kind == "ModelOpt" or SHAPES[name].gated]


@pytest.fixture(autouse=True)
def clean(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_choice, "RUNNERS", Runners())


def make(runner: str, kind: str, shape: str) -> ExpertLayer:
    serve_with(runner, kind, facts=collect_facts())
    layer = ExpertLayer(kind, SHAPES[shape], device="cuda")
    layer.method.sm120_experts.most_tokens = None  # every batch here, whatever else this card could run
    return layer


@pytest.mark.parametrize("runner", KERNEL_RUNNERS)
@pytest.mark.parametrize(("kind", "shape"), SERVED)
def test_layers_are_right(runner: str, kind: str, shape: str) -> None:
    layer = make(runner, kind, shape)
    for tokens in (0, 1, 9, 64, 200):
        batch = layer.batch(tokens)
        total, bound = expert_bound.expected(*layer.oracle_arguments(*batch))
        assert_matches_oracle(layer.run(*batch).cpu(), total, bound)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_layer_follows_new_tokens(kind: str) -> None:
    layer = make("sm120", kind, "gated")
    batches = [layer.batch(5) for _ in range(3)]
    expected = [layer.run(*batch) for batch in batches]
    assert_a_graph_follows(layer.run, batches, expected)
