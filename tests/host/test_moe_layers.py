"""SGLang's own NVFP4 expert layers under a MoE runner of ours: the values, the layers, and what is refused.

Sizes are small; the layers are the real classes of the installed SGLang. ``tests/matrix`` asks the other releases.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.moe.utils as moe_utils
import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.environ import Envs
from sglang.srt.server_args import prepare_server_args

from cpu_host.kernels import build
from cpu_host.kernels.library import EmulatedLibrary
from sglang_sm120 import native, native_moe, ops, self_test
from sglang_sm120.backends.moe_table import KERNEL_RUNNERS, OUR_RUNNERS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, SelfTestError, UnsupportedError
from sglang_sm120.host import moe_choice, moe_layers, moe_resolution
from sglang_sm120.host.moe_choice import Runners
from sglang_sm120.host.state import STATE
from sglang_sm120.probing import expert_bound
from tests.dispatch.machines import RTX, machine
from tests.host.conftest import Serving
from tests.host.expert_layers import KINDS, ExpertLayer, Shape, serve_with
from tests.support.moe_configs import write_moe_config
from tests.support.nvfp4 import assert_matches_oracle

ON_A_CPU = HostFacts(capability=None)
SHAPES = {
    "gated": Shape(),
    "odd hidden size, more experts than rows": Shape(experts=9, hidden=80, inner=64, top_k=2),
    "without a gate, padded by SGLang": Shape(gated=False, inner=48),
    "second of three ranks": Shape(ranks=3, rank=1),
}
SERVED = [(kind, name) for kind in KINDS for name in SHAPES if kind == "ModelOpt" or SHAPES[name].gated]


@pytest.fixture(autouse=True)
def clean(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(moe_choice, "RUNNERS", Runners())
    monkeypatch.delenv(moe_choice.CARRIER, raising=False)
    monkeypatch.delenv("SGLANG_SM120_ALLOW_UNSAFE", raising=False)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):  # SGLang writes some of its decisions there
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    return EmulatedLibrary(build.library_path())


@pytest.fixture
def emulated(library: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", lambda device: (library, True))
    moe_layers.start.cache_clear()


@pytest.mark.parametrize(("kind", "shape"), SERVED)
def test_a_layer_of_sglang_is_the_oracle(kind: str, shape: str) -> None:
    serve_with("torch_reference", kind)
    layer = ExpertLayer(kind, SHAPES[shape])
    for tokens in (0, 1, 7):
        batch = layer.batch(tokens)
        assert torch.equal(layer.run(*batch), layer.expected(*batch))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("kind", "shape"), SERVED)
def test_the_kernels_serve_the_same_layers(kind: str, shape: str) -> None:
    serve_with("sm120", kind, facts=machine(RTX))
    layer = ExpertLayer(kind, SHAPES[shape])
    for tokens in (1, 9):
        batch = layer.batch(tokens)
        total, bound = expert_bound.expected(*layer.oracle_arguments(*batch))
        assert_matches_oracle(layer.run(*batch), total, bound)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_ids_as_the_dispatcher_numbers_them(kind: str) -> None:
    """Global for some of SGLang's runners; for others the dispatcher has made them local, -1 for other ranks."""
    shape = SHAPES["second of three ranks"]
    serve_with("torch_reference", kind)
    layer = ExpertLayer(kind, shape)
    hidden, ids, weights = layer.batch(5)
    expected = layer.expected(hidden, ids, weights)
    assert torch.equal(layer.run(hidden, ids, weights), expected)
    layer.layer.dispatcher.local_expert_mapping = torch.empty(0)
    local = torch.where((ids >= 2) & (ids < 4), ids - 2, -1)
    assert torch.equal(layer.run(hidden, local, weights), expected)


@pytest.mark.parametrize("name", ["w13_weight_scale", "w2_weight_scale_2", "w2_input_scale"])
def test_experts_written_without_their_preparation_are_not_multiplied(name: str) -> None:
    serve_with("torch_reference", "ModelOpt")
    layer = ExpertLayer("ModelOpt", Shape())
    batch = layer.batch(3)
    served = layer.run(*batch)
    parameter = getattr(layer.layer, name)
    parameter.weight_loader(parameter, torch.empty(0), name, "w2", 0)
    with pytest.raises(ConfigError, match="Module were written without .* Use update_weights_from_disk"):
        layer.run(*batch)
    moe_layers.make_ready(layer.layer, layer.method.sm120_experts)  # what SGLang's preparation ends with
    assert torch.equal(layer.run(*batch), served)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_beyond_the_crossover_goes_on_to_sglangs_kernels_where_they_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_layers, "start", lambda runner, device: None)
    ours: list[int] = []
    theirs: list[int] = []
    fake = SimpleNamespace(moe=lambda hidden, *_: ours.append(len(hidden)) or hidden, MOST_TOKENS=4)
    monkeypatch.setattr(ops, "moe_implementation", lambda runner: fake)
    for facts, at_most in ((machine(RTX), 4), (ON_A_CPU, 9)):
        monkeypatch.setattr(moe_resolution, "check_layer", lambda value, quantization: None)
        serve_with("sm120", kind, facts=facts)
        layer = ExpertLayer(kind, Shape())
        layer.method.runner = SimpleNamespace(run=lambda given, _: theirs.append(len(given.hidden_states)) or given)
        for tokens in (4, 9):
            layer.run(*layer.batch(tokens))
            assert (ours.pop() if tokens <= at_most else theirs.pop()) == tokens
        layer.layer.dispatcher.local_expert_mapping = torch.empty(0)  # ids that the other kernels would misread
        layer.run(*layer.batch(9))
        assert ours.pop() == 9
        assert not ours + theirs


def test_a_draft_is_made_with_its_own_runner() -> None:
    serve_with("torch_reference", "ModelOpt", draft=None)
    with moe_utils.speculative_moe_backend_context():
        moe_choice.RUNNERS.target = None  # nothing else tells the two apart
        with pytest.raises(ValueError, match="Current platform does not support NVFP4"):
            ExpertLayer("ModelOpt", Shape())
    assert ExpertLayer("ModelOpt", Shape()).method.sm120_experts.runner == "torch_reference"
    serve_with(None, "ModelOpt", draft="torch_reference")
    with moe_utils.speculative_moe_backend_context():
        layer = ExpertLayer("ModelOpt", Shape())
    batch = layer.batch(3)
    assert torch.equal(layer.run(*batch), layer.expected(*batch))


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("ModelOpt", Shape(inner=88, tensor_parallel=8), r"over 8 leaves 88 of 704 .* nearest size that works is 11"),
        ("ModelOpt", Shape(inner=232, tensor_parallel=8, gated=False), r"leaves 232 of 1856.* works is 4"),
        ("compressed-tensors", Shape(inner=88, tensor_parallel=8), r"no multiple of 16; the nearest size.* is 11"),
        ("compressed-tensors", Shape(inner=8), r"leaves 8 of 8 .*no size works"),
        ("ModelOpt", Shape(hidden=72), r"hidden size 72 is no multiple of 16"),
        ("ModelOpt", Shape(config={"activation": "gelu"}), r"not 'gelu' \(with a gate\)"),
        ("ModelOpt", Shape(config={"activation": "silu", "is_gated": False}), r"not 'silu' \(without a gate\)"),
        ("ModelOpt", Shape(config={"gemm1_clamp_limit": 7.0}), r"gemm1_clamp_limit clamps"),
        ("ModelOpt", Shape(config={"apply_router_weight_on_input": True}), r"router weights to the input"),
        ("ModelOpt", Shape(config={"no_combine": True}), r"results apart"),
        ("ModelOpt", Shape(ranks=3, config={"num_fused_shared_experts": 1}), r"--disable-shared-experts-fusion"),
        ("compressed-tensors", Shape(gated=False), r"experts a gate, and this model's have none"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused_before_weights_load(kind: str, shape: Shape, words: str) -> None:
    serve_with("torch_reference", kind)
    with pytest.raises(UnsupportedError, match=words) as refused:
        ExpertLayer(kind, shape)
    assert str(refused.value).startswith("--moe-runner-backend='torch_reference' cannot be used: ")
    assert "Or use --moe-runner-backend auto" in str(refused.value)


@pytest.mark.parametrize("switch", ["NVFP4_PER_TOKEN_ACTIVATION", "SM120_NVFP4_PHASE_LAYOUT"])
def test_switches_of_sglang_that_change_scales_or_weights_are_refused(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one leaves the static scales at one; the other moves w2 of a layer to where the next layer has its own."""
    name = next(name for name in vars(Envs) if name.endswith(switch))
    serve_with("torch_reference", "ModelOpt")
    monkeypatch.setenv(name, "1")
    with pytest.raises(UnsupportedError, match=f"{name}=1"):
        ExpertLayer("ModelOpt", Shape())


def test_a_draft_is_refused_under_its_own_flag() -> None:
    serve_with("torch_reference", "ModelOpt", draft="torch_reference")
    with moe_utils.speculative_moe_backend_context(), pytest.raises(UnsupportedError) as refused:
        ExpertLayer("ModelOpt", Shape(hidden=72))
    assert str(refused.value).startswith("--speculative-moe-runner-backend='torch_reference'")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("_standard_dispatch", False, "--moe-a2a-backend"), ("_quantized_allgather", True, "fp4-allgather")],
)
def test_other_ways_of_exchanging_tokens_are_refused(
    name: str, value: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_layers, name, lambda: value)
    serve_with("torch_reference", "ModelOpt")
    with pytest.raises(UnsupportedError, match=words):
        ExpertLayer("ModelOpt", Shape())


def test_the_table_judges_ours_on_every_card() -> None:
    serve_with("sm120", "ModelOpt", facts=ON_A_CPU)
    with pytest.raises(UnsupportedError, match="'sm120'.*needs a CUDA device"):
        ExpertLayer("ModelOpt", Shape())
    serve_with("sm120", "ModelOpt", facts=machine(RTX))
    moe_choice.RUNNERS.quantization = "fp8"
    with pytest.raises(UnsupportedError, match="'sm120'.*fp8 experts"):
        ExpertLayer("ModelOpt", Shape())


def test_a_subclass_is_served_by_the_stand_in_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    import sglang.srt.layers.quantization.modelopt_quant as modelopt

    class Special(modelopt.ModelOptNvFp4FusedMoEMethod):  # type: ignore[misc]
        pass

    serve_with("torch_reference", "ModelOpt")
    with caplog.at_level(logging.WARNING, "sglang_sm120"), pytest.raises(ValueError, match="Current platform"):
        Special(SimpleNamespace())
    assert "does not serve the experts of Special; flashinfer_cutlass does" in caplog.text


@pytest.mark.parametrize("runner", OUR_RUNNERS)
@pytest.mark.parametrize(
    ("kind", "stand_in"),
    [("modelopt_fp4", "flashinfer_cutlass"), ("modelopt_mixed", "flashinfer_cutlass"), ("compressed-tensors", "auto")],
)
def test_a_runner_of_ours_is_replaced_in_the_arguments_and_found_again_in_the_scheduler(
    runner: str, kind: str, stand_in: str, tmp_path: Any
) -> None:
    for words, own, values in (
        ([], (runner, runner), (stand_in, stand_in)),
        (["--speculative-moe-runner-backend", "marlin"], (runner, None), (stand_in, "marlin")),
    ):
        found = resolve(kind, tmp_path, ["--moe-runner-backend", runner, "--speculative-algorithm", "NGRAM", *words])
        assert found == values
        moe_choice.note(*found, None)
        assert (moe_choice.RUNNERS.own_target, moe_choice.RUNNERS.own_draft) == own
    only_draft = ["--moe-runner-backend", "marlin", "--speculative-moe-runner-backend", runner]
    found = resolve(kind, tmp_path, ["--speculative-algorithm", "NGRAM", *only_draft])
    assert found == ("marlin", stand_in)
    moe_choice.note(*found, None)
    assert (moe_choice.RUNNERS.own_target, moe_choice.RUNNERS.own_draft) == (None, runner)


def test_a_runner_that_sglang_has_itself_is_left_to_it() -> None:
    moe_choice.leave_to_sglang({"flashinfer_b12x"})
    try:
        assert moe_choice.replace("flashinfer_b12x", None, "modelopt_fp4") == {}
        assert moe_choice.named() == ("", "")
        assert moe_choice.replace("sm120", "flashinfer_b12x", "modelopt_fp4") == {
            moe_choice.RUNNER: "flashinfer_cutlass"
        }
        assert moe_choice.named() == ("sm120", "")
        STATE.facts = machine(RTX)
        moe_resolution.check_layer("flashinfer_b12x", "fp8")
    finally:
        moe_choice.leave_to_sglang(())
    with pytest.raises(UnsupportedError, match="for fp8 experts"):
        moe_resolution.check_layer("flashinfer_b12x", "fp8")


@pytest.mark.parametrize("parent", [None, "a trainer"])
def test_a_later_engine_of_the_process_does_not_inherit_a_runner(
    parent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    moe_choice.replace("torch_reference", None, "modelopt_fp4")
    assert moe_choice.named() == ("torch_reference", "torch_reference")
    moe_choice.replace("flashinfer_cutlass", None, "modelopt_fp4")
    assert moe_choice.named() == ("", "")
    monkeypatch.setenv(moe_choice.CARRIER, "sm120,")
    monkeypatch.setattr(moe_choice, "_WRITER", {})  # of a scheduler, which inherited it and reads the stand-in
    moe_choice.replace("flashinfer_cutlass", None, "modelopt_fp4")
    assert moe_choice.named() == (("", "") if parent is None else ("sm120", ""))


def test_what_sglang_overrides_is_not_ours_any_more_and_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_resolution.installer, "require_live", lambda: None)
    monkeypatch.setenv(moe_choice.CARRIER, "torch_reference,torch_reference")
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        moe_resolution.note_runners("flashinfer_cutlass", "flashinfer_cutlass", None)
        assert not caplog.records
        moe_resolution.note_runners("flashinfer_trtllm", "auto", None)
    assert moe_choice.RUNNERS.own_target is None
    told = "--moe-runner-backend torch_reference serves no layer: SGLang replaced it by flashinfer_trtllm"
    assert [record.message.startswith(told) for record in caplog.records] == [True]


@pytest.mark.parametrize("flag", ["--moe-runner-backend", "--speculative-moe-runner-backend"])
def test_a_runner_that_ray_actors_would_not_hear_of_is_refused(
    flag: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}='torch_reference' .*Ray actors do not inherit"):
        resolve("modelopt_fp4", tmp_path, ["--use-ray", flag, "torch_reference"])
    assert moe_choice.named() == ("", "")
    monkeypatch.setitem(sys.modules, "sglang.srt.ray.engine", sys)  # RayEngine, which needs no flag
    with pytest.raises(ConfigError, match="Ray actors"):
        resolve("modelopt_fp4", tmp_path, [flag, "torch_reference"])
    assert resolve("modelopt_fp4", tmp_path, ["--moe-runner-backend", "marlin"])[0] == "marlin"


def test_a_runner_that_does_not_exist_is_still_refused_by_the_parser(tmp_path: Any) -> None:
    with pytest.raises(SystemExit):
        resolve("modelopt_fp4", tmp_path, ["--moe-runner-backend", "sm121"])


def test_more_experts_of_a_token_than_the_kernels_take_is_an_error() -> None:
    with pytest.raises(ConfigError):
        ops.moe_implementation("marlin")
    hidden, ids = torch.zeros(1, 16, dtype=torch.bfloat16), torch.zeros(1, 33, dtype=torch.int32)
    stack: Any = None
    with pytest.raises(ValueError, match="top_k=33"):
        native_moe.moe(hidden, ids, ids.float(), stack, stack, "silu", True, 0)


def resolve(kind: str, folder: Any, words: list[str]) -> tuple[str, str | None]:
    """Resolve a command line with SGLang's own classes: target and draft runner as SGLang then has them."""
    model = write_moe_config(folder, kind)
    arguments = prepare_server_args(["--model-path", str(model), "--device", "cpu", *words])
    arguments.resolve_once()
    view = resolved_view(arguments)
    return view.moe_runner_backend, view.speculative_moe_runner_backend


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("runner", KERNEL_RUNNERS)
def test_a_wrong_kernel_stops_the_start(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    self_test.run_moe(runner, "cpu")
    right = ops.nvfp4_moe
    for wrong in (
        lambda x, ids, *rest: right(x, (ids + 1) % 5, *rest),
        lambda *given: right(*given[:-3], not given[-3], *given[-2:]),
        lambda *given: torch.full_like(right(*given), float("nan")),
    ):
        monkeypatch.setattr(ops, "nvfp4_moe", wrong)
        with pytest.raises(SelfTestError, match=f"--moe-runner-backend {runner} gave .* no model is served"):
            self_test.run_moe(runner, "cpu")


def test_the_seams_are_asked_before_a_layer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(moe_resolution.installer, "require_live", lambda: asked.append(True))
    moe_resolution.note_runners("flashinfer_cutlass", "auto", None)
    assert not asked
    monkeypatch.setenv(moe_choice.CARRIER, "sm120,")
    moe_resolution.note_runners("flashinfer_cutlass", "auto", None)
    assert asked
    assert replace(moe_choice.RUNNERS).own == "sm120"
    assert STATE.facts is None
