"""Experts under ``--moe-runner-backend flashinfer_b12x`` with the real FlashInfer, without a GPU.

Run by test_b12x_layers.py in a process that has one FlashInfer release. Everything from SGLang's layers to the launch
of the kernels is real; the kernels are a float64 computation from the operands that FlashInfer's own code prepared for
them, by the meaning that its test of the scales gives them (flashinfer 0.7.4
tests/moe/test_b12x_direct_micro_scale_contract.py).
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.multiprocessing.reductions import StorageWeakRef

from sglang_sm120 import env, ops, reference, self_test
from sglang_sm120.backends import flashinfer_b12x_experts as b12x
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.host import moe_choice, moe_layers, moe_tuning
from sglang_sm120.host.moe_choice import Runners
from sglang_sm120.layout import ScaleLayout, padded_scale_shape
from sglang_sm120.probing import expert_bound
from sglang_sm120.reference import ExpertWeights
from tests.dispatch.machines import RTX, machine
from tests.host.conftest import Serving
from tests.host.expert_layers import KINDS, ExpertLayer, Shape, serve_with
from tests.host.watching import watching
from tests.support.moe_problem import random_moe
from tests.support.nvfp4 import assert_matches_oracle

RUNNER = b12x.RUNNER
#: Without a gate SGLang pads I, here to 384.
SHAPES = {"gated": Shape(hidden=256, inner=256), "relu2": Shape(hidden=128, inner=336, gated=False)}
LAUNCHES: Counter[str] = Counter()
#: What passes from one kernel to the next.
BETWEEN = torch.float64


def kernels(name: str, given: dict[str, Any]) -> torch.Tensor:
    """What FlashInfer's kernels compute from what its dispatch hands to them."""
    LAUNCHES[name] += 1
    assert (given["quant_mode"], given["input_scales_are_reciprocal"]) == ("nvfp4", False)
    weights, x, out = given["weights"], given["a"], given["scatter_output"]
    ids, router = given["topk_ids"], given["topk_weights"].double()
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    assert given["topk_weights"].is_contiguous()
    assert given["top_k"] == ids.shape[1]
    total = torch.zeros(x.shape, dtype=torch.float64)
    for expert in ids[ids >= 0].unique().tolist():
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        first = _product(x[token], weights.w1_storage, weights.w1_scale_storage, given["input_gs"], expert)
        first *= weights.w1_alpha[expert].double()
        up, gate = first.chunk(2, 1)
        hidden = up * gate * gate.sigmoid() if given["activation"] == "silu" else first.relu() ** 2
        hidden = hidden.to(BETWEEN)
        second = _product(
            hidden.float(), weights.w2_storage, weights.w2_scale_storage, given["down_input_scale"], expert
        )
        second = (second * weights.w2_alpha[expert].double()).to(BETWEEN).double()
        total.index_add_(0, token, second * router[token, slot][:, None])
    return out.copy_(total)  # type: ignore[no-any-return]


def _product(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, divisors: torch.Tensor, expert: int) -> Any:
    """``x`` divided by the expert's input scale and quantized, times the expert's decoded weight."""
    experts, rows, half_k = packed.shape
    codes, blocks = reference.quantize(x, divisors[expert].reciprocal())
    swizzled = scales.view(torch.uint8).reshape(experts, *padded_scale_shape(rows, half_k // 8))[expert]
    rest = torch.ones(()), ScaleLayout.SWIZZLE_128X4
    decoded = reference.dequantize(codes, blocks, *rest, len(x), 2 * half_k)
    return decoded @ reference.dequantize(packed[expert], swizzled, *rest, rows, 2 * half_k).T


@pytest.fixture(autouse=True)
def flashinfer_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FlashInfer asks of CUDA, and its kernels."""
    import flashinfer.jit.cpp_ext as cpp_ext
    from flashinfer.fused_moe.cute_dsl.blackwell_sm12x import moe_dispatch

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cpp_ext, "get_cuda_version", lambda: Version("13.0"))
    for name in ("static", "dynamic"):
        monkeypatch.setattr(moe_dispatch, f"launch_sm120_{name}_moe", lambda name=name, **given: kernels(name, given))
    LAUNCHES.clear()
    b12x._PREPARED.clear()
    gc.collect()


@pytest.fixture(autouse=True)
def clean(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_choice, "RUNNERS", Runners())


def make(kind: str, shape: Shape) -> ExpertLayer:
    serve_with(RUNNER, kind, facts=machine(RTX, sglang="0.5.23"))
    return ExpertLayer(kind, shape)


@pytest.mark.parametrize(("kind", "shape"), [*((kind, "gated") for kind in KINDS), ("ModelOpt", "relu2")])
def test_layers_are_right(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(b12x, "CAPACITY", 400)
    layer = make(kind, SHAPES[shape])
    for tokens in (0, 1, 9, 430):
        batch = layer.batch(tokens)
        if tokens == 9:
            batch[1][::3, 1] = -1
        with torch.inference_mode():
            out = layer.run(*batch)
        total, bound = expert_bound.expected(*layer.oracle_arguments(*batch), between=torch.bfloat16)
        assert_matches_oracle(out, total, bound)
    assert set(LAUNCHES) == {"static", "dynamic"}


def test_layers_of_one_size_share_workspaces_and_nothing_else() -> None:
    first, second, other = (make("ModelOpt", shape) for shape in (SHAPES["gated"], SHAPES["gated"], SHAPES["relu2"]))
    batch = first.batch(3)
    alone, again = first.run(*batch), second.run(*batch)
    kept = alone.clone()
    second.run(*second.batch(3))
    assert torch.equal(alone, kept)
    assert torch.equal(alone, again)  # the same seed
    found = [b12x._PREPARED[layer.layer.w13_weight] for layer in (first, second, other)]
    assert found[0].workspaces is found[1].workspaces is not found[2].workspaces
    assert found[0].wrapper._dynamic_workspace is found[1].wrapper._dynamic_workspace is not None


def test_the_memory_of_a_result_is_the_callers() -> None:
    layer = make("ModelOpt", SHAPES["gated"])
    kept = StorageWeakRef(layer.run(*layer.batch(3)).untyped_storage())
    gc.collect()
    assert kept.expired()


def test_workspaces_made_in_inference_mode_serve_outside_of_it() -> None:
    problem = random_moe(3, 4, 2, 256, 256)
    with torch.inference_mode():
        b12x.moe(problem.hidden, problem.ids, problem.weights, problem.w13, problem.w2, "silu", False, 0)
    made = vars(b12x._PREPARED[problem.w13.packed].workspaces.shared_static_workspace)
    assert not any(value.is_inference() for value in made.values() if isinstance(value, torch.Tensor))


def test_one_set_of_weights_serves_any_number_of_experts_of_a_token() -> None:
    problem = random_moe(3, 4, 2, 256, 256)
    for top_k in (2, 1, 2):
        ids, router = problem.ids[:, :top_k], problem.weights[:, :top_k]
        out = b12x.moe(problem.hidden, ids, router, problem.w13, problem.w2, "silu", False, 0)
        ids, router = ids.contiguous(), router.contiguous()
        expected = reference.moe(problem.hidden, ids, router, problem.w13, problem.w2, "silu", False)
        assert_matches_oracle(out, expected.double(), 0.02 * expected.double().abs().max())


def test_right_results_of_kernels_that_round_between_them_pass_the_check_of_a_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
    monkeypatch.setattr(sys.modules[__name__], "BETWEEN", torch.bfloat16)
    with watching(monkeypatch) as watcher:
        layer = make("ModelOpt", SHAPES["gated"])
        layer.layer.sm120_name = "experts"  # type: ignore[assignment]
        layer.run(*layer.batch(33))
    assert watcher.coverage.checked == 1


def test_what_was_prepared_goes_with_the_weights() -> None:
    before = len(b12x._PREPARED), len(b12x._WORKSPACES)
    layer = make("ModelOpt", Shape(hidden=384, inner=512))
    layer.run(*layer.batch(2))
    assert (len(b12x._PREPARED), len(b12x._WORKSPACES)) == (before[0] + 1, before[1] + 1)
    del layer
    gc.collect()
    assert (len(b12x._PREPARED), len(b12x._WORKSPACES)) == before


def test_what_is_copied_into_a_prepared_layer_counts() -> None:
    """As the loaders do that read what another server had prepared."""
    layer = make("ModelOpt", SHAPES["gated"])
    for name, factor in (("g1_alphas", 3.0), ("w13_input_scale_quant", 0.5), ("w2_input_scale_quant", 2.0)):
        getattr(layer.layer, name).data.mul_(factor)
    hidden, ids, router = layer.batch(3)
    w13, w2 = moe_layers._operands(layer.layer, layer.method.sm120_experts)
    right = ops.nvfp4_moe(hidden, ids, router, *w13, *w2, "silu", False, 0, "torch_reference")
    assert_matches_oracle(layer.run(hidden, ids, router), right.double(), 0.02 * right.double().abs().max())


def test_weights_cannot_be_loaded_again() -> None:
    layer = make("ModelOpt", SHAPES["gated"]).layer
    for name in ("w13_weight", "w2_weight"):
        with pytest.raises(ConfigError, match="cannot be loaded again.*Restart the server"):
            getattr(layer, name).weight_loader(getattr(layer, name), None)


def test_a_tensor_of_new_scales_is_not_mistaken_for_the_old_one() -> None:
    problem = random_moe(9, 4, 2, 256, 256)
    ids, router = problem.ids, problem.weights
    for factor in (1.0, 2.0):
        w13 = ExpertWeights(
            problem.w13.packed, problem.w13.scales, problem.w13.alpha * factor, problem.w13.input_global_scale
        )
        out = b12x.moe(problem.hidden, ids, router, w13, problem.w2, "silu", False, 0)
        expected = reference.moe(problem.hidden, ids, router, w13, problem.w2, "silu", False)
        assert_matches_oracle(out, expected.double(), 0.02 * expected.double().abs().max())


def test_the_check_at_the_start_passes_and_notices_wrong_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    ops.start_moe(RUNNER, torch.device("cpu"))
    for between in (torch.float64, torch.bfloat16):
        monkeypatch.setattr(sys.modules[__name__], "BETWEEN", between)
        self_test.run_moe(RUNNER, "cpu")
    monkeypatch.setattr(b12x, "_for_each", lambda scale, experts: scale.reciprocal().expand(experts).contiguous())
    with pytest.raises(self_test.SelfTestError, match=RUNNER):
        self_test.run_moe(RUNNER, "cpu")


def test_what_flashinfer_refuses_is_refused_as_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sm120_tuned`` then serves without it."""
    monkeypatch.setattr("flashinfer.jit.cpp_ext.get_cuda_version", lambda: Version("12.9"))
    retired: dict[str, str] = {}
    moe_tuning._load(RUNNER, torch.device("cpu"), retired)
    assert "requires CUDA 13" in retired[RUNNER]


@pytest.mark.parametrize("error", [ImportError("no tabulate"), RuntimeError("the version of flashinfer-cubin")])
def test_a_flashinfer_that_does_not_import_is_told_as_the_runner(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise error

    monkeypatch.setattr(b12x, "import_module", broken)
    b12x._wrapper_class.cache_clear()
    with pytest.raises(UnsupportedError, match=f"{RUNNER}.*{error}"):
        ops.start_moe(RUNNER, torch.device("cpu"))


def test_two_streams_at_a_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_with(RUNNER, "ModelOpt", facts=machine(RTX, sglang="0.5.23"))
    monkeypatch.setattr(moe_choice.RUNNERS, "two_streams", True)
    with pytest.raises(UnsupportedError, match="enable-pdmux.*--moe-runner-backend auto"):
        ExpertLayer("ModelOpt", SHAPES["gated"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 192}, "hidden size 192 is no multiple of 128"),
        ({"inner": 128}, "128 intermediate columns .* second, padded copy"),
        ({"inner": 320}, "320 intermediate columns .* second, padded copy"),
        ({"ranks": 3}, "share out no experts over ranks"),
    ],
)
def test_layers_that_it_does_not_take_are_refused_before_memory_is_taken(
    change: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExpertLayer, "_fill", lambda self: pytest.fail("the weights were made"))
    with pytest.raises(UnsupportedError, match=f"^--moe-runner-backend='{RUNNER}' .*{message}"):
        make("ModelOpt", Shape(**{"hidden": 256, "inner": 256, **change}))


def test_operands_that_it_does_not_take_are_refused() -> None:
    problem = random_moe(3, 4, 2, 256, 256)
    for hidden, gate_first, first_expert, message in (
        (problem.hidden.half(), False, 0, "bfloat16 activations alone"),
        (problem.hidden, True, 0, "up before gate"),
        (problem.hidden, False, 4, "share out no experts"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            b12x.moe(hidden, problem.ids, problem.weights, problem.w13, problem.w2, "silu", gate_first, first_expert)
