"""What SGLang would do wrong with NVFP4 experts and does not say: refused or told, by its own classes.

Expert parallelism, names of the quantization, models whose experts are stored otherwise, and scales of gate and up.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.moe.utils as moe_utils
import sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe as ct
import sglang.srt.layers.quantization.modelopt_quant as modelopt
import sglang.srt.layers.quantization.unquant as unquant
import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.runtime_context import get_flags
from sglang.srt.server_args import prepare_server_args

from sglang_sm120.backends import expert_limits
from sglang_sm120.backends.moe_table import OUR_RUNNERS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.host import moe_choice, moe_resolution
from sglang_sm120.host.moe_choice import Runners
from sglang_sm120.host.state import STATE
from tests.dispatch.machines import HOPPER, RTX, machine
from tests.host.conftest import Serving
from tests.host.expert_layers import KINDS, ExpertLayer, Shape, serve_with
from tests.support.moe_configs import write_moe_config

ON_A_CPU = HostFacts(capability=None)
PART = Shape(ranks=3, rank=1)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(autouse=True)
def clean(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(moe_choice, "RUNNERS", Runners())
    for name in (moe_choice.CARRIER, "SGLANG_SM120_ALLOW_UNSAFE", "SGLANG_SM120_AUTO"):
        monkeypatch.delenv(name, raising=False)
    for module in (modelopt, ct):
        monkeypatch.setattr(module, "get_platform", lambda: SimpleNamespace(is_blackwell=True))
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):  # SGLang writes some of its decisions there
        del os.environ[name]
    os.environ.update(before)


def under(value: str, release: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> ExpertLayer:
    """A compressed-tensors layer under a value of SGLang's, as on a card and a release that are not here."""
    serve_with(None, "compressed-tensors", facts=machine(RTX, sglang=release))
    monkeypatch.setattr(get_flags().moe, "runner_backend", moe_utils.MoeRunnerBackend(value))
    return ExpertLayer("compressed-tensors", shape)


@pytest.mark.parametrize("release", ["0.5.17", "0.5.22"])
@pytest.mark.parametrize("value", ["auto", "triton"])
def test_experts_that_sglang_numbers_wrongly_are_refused_and_the_runner_that_is_right_is_named(
    value: str, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match="every rank but the first add nothing") as refused:
        under(value, release, PART, monkeypatch)
    text = str(refused.value)
    assert text.startswith(f"--moe-runner-backend={value!r}")
    assert "use --moe-runner-backend flashinfer_cutlass instead" in text


def test_expert_numbers_are_judged_only_where_sglang_has_them_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, release, shape in (
        ("flashinfer_cutlass", "0.5.22", PART),
        ("auto", "0.5.22", Shape()),
        ("auto", "0.5.23", PART),
        ("auto", "0.5.15", PART),
    ):
        assert under(value, release, shape, monkeypatch).layer is not None
    serve_with("sm120_tuned" if "sm120_tuned" in OUR_RUNNERS else "torch_reference", "compressed-tensors")
    assert ExpertLayer("compressed-tensors", PART).method.sm120_experts is not None
    serve_with(None, "compressed-tensors", facts=machine(HOPPER, sglang="0.5.22"))
    assert ExpertLayer("compressed-tensors", PART).layer is not None


Resolve = Callable[..., tuple[str, str | None]]


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Resolve:
    """Resolve a command line with SGLang's own classes: target and draft runner as SGLang then has them."""

    def run(kind: str, *words: str, facts: HostFacts = ON_A_CPU, **config: Any) -> tuple[str, str | None]:
        monkeypatch.setattr(moe_resolution, "facts_of_arguments", lambda view: facts)
        model = write_moe_config(tmp_path, kind, **config)
        arguments = prepare_server_args(["--model-path", str(model), "--device", "cpu", *words])
        arguments.resolve_once()
        view = resolved_view(arguments)
        return view.moe_runner_backend, view.speculative_moe_runner_backend

    return run


@pytest.mark.parametrize("kind", ["modelopt_fp4", "modelopt_mixed"])
def test_a_quantization_that_sglang_asserts_against_is_refused_by_name(
    kind: str, resolve: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ["--quantization", "modelopt"]
    for words, facts in ((["--moe-runner-backend", "sm120"], ON_A_CPU), ([], machine(RTX))):
        with pytest.raises(ConfigError, match=r"^--quantization='modelopt' .*leave the flag out"):
            resolve(kind, *named, *words, facts=facts)
    assert resolve(kind, "--quantization", kind, "--moe-runner-backend", "sm120")[0] == "flashinfer_cutlass"
    monkeypatch.setenv("SGLANG_SM120_ALLOW_UNSAFE", "1")
    assert resolve(kind, *named, facts=machine(RTX))[0] == "auto"


def test_a_part_of_the_ranks_for_experts_is_refused_by_name(resolve: Resolve) -> None:
    words = ["--moe-runner-backend", "sm120", "--tp-size", "4", "--ep-size"]
    with pytest.raises(ConfigError, match=r"^--ep-size=2 .*all 4 ranks"):
        resolve("modelopt_fp4", *words, "2")
    assert resolve("modelopt_fp4", *words, "4")[0] == "flashinfer_cutlass"
    assert resolve("compressed-tensors", *words, "2")[0] == "auto"


@pytest.mark.parametrize("runner", OUR_RUNNERS)
def test_a_model_without_nvfp4_experts_keeps_sglangs_runner(runner: str, resolve: Resolve) -> None:
    words = ["--moe-runner-backend", runner, "--speculative-algorithm", "NGRAM"]
    for kind, config in (
        ("modelopt_fp4", {"quantization_config": None}),
        ("modelopt_fp4", {"quantization_config": FP8}),
        ("mixed, experts in FP8", {}),
    ):
        assert resolve(kind, **config) == ("auto", "auto")
        assert resolve(kind, *words, **config) == ("auto", "auto")


def test_a_layer_that_the_configuration_does_not_mention_is_not_read_in_another_layout() -> None:
    serve_with("torch_reference", "compressed-tensors", draft="torch_reference")
    with pytest.raises(UnsupportedError, match="prepared for auto, because the target's configuration"):
        ExpertLayer("ModelOpt", Shape())
    with moe_utils.speculative_moe_backend_context(), pytest.raises(UnsupportedError) as refused:
        ExpertLayer("ModelOpt", Shape())
    assert str(refused.value).startswith("--speculative-moe-runner-backend='torch_reference'")


def test_unquantized_experts_beside_ours_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    serve_with("torch_reference", "ModelOpt", draft="torch_reference")
    with caplog.at_level(logging.WARNING, "sglang_sm120"), moe_utils.speculative_moe_backend_context():
        for _ in range(2):
            unquant.UnquantizedFusedMoEMethod()
    assert [record.message for record in caplog.records] == [
        "--speculative-moe-runner-backend torch_reference does not serve the experts of UnquantizedFusedMoEMethod; "
        "flashinfer_cutlass does, as SGLang has it."
    ]


class TwoScales(ExpertLayer):
    """Its up projection has another global scale than its gate, in one expert."""

    FACTOR = 1.5

    def _fill(self) -> None:
        super()._fill()
        name = "w13_weight_scale_2" if self.kind == "ModelOpt" else "w13_weight_global_scale"
        getattr(self.layer, name).data[4, 1] *= self.FACTOR if self.kind == "ModelOpt" else 1 / self.FACTOR
        self.layer.layer_id = 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("runner", "facts"), [("torch_reference", ON_A_CPU), (None, machine(RTX))])
def test_two_scales_of_gate_and_up_are_told_once_with_layer_and_ratio(
    kind: str, runner: str | None, facts: HostFacts, caplog: pytest.LogCaptureFixture
) -> None:
    serve_with(runner, kind, facts=facts)
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        ExpertLayer(kind, Shape())
        assert not caplog.records
        for _ in range(2):
            TwoScales(kind, Shape())
    assert [record.message.partition(": ")[0] for record in caplog.records] == [
        "gate and up of the experts of layer 7 have different global scales, by 1.5 in expert 4"
    ]


def test_two_scales_are_not_told_where_this_package_is_not_concerned(caplog: pytest.LogCaptureFixture) -> None:
    serve_with(None, "ModelOpt", facts=machine(HOPPER))
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        TwoScales("ModelOpt", Shape())
    assert not caplog.records


def test_all_experts_share_the_largest_activation_scale_and_compressed_tensors_have_their_own() -> None:
    """SGLang's preparation, not ours: what the oracle of ``expert_layers`` takes for granted."""
    for kind, count in (("ModelOpt", 1), ("compressed-tensors", 6)):
        serve_with("torch_reference", kind)
        layer = ExpertLayer(kind, Shape())
        for name in ("w13", "w2"):
            encode = getattr(layer.layer, f"{name}_input_scale_quant").flatten()
            assert encode.numel() == count
            assert torch.equal(encode, layer.input_decode[name].reciprocal().flatten())
    assert STATE.facts == ON_A_CPU


def test_fused_shared_experts_are_experts_like_the_others() -> None:
    serve_with("torch_reference", "ModelOpt")
    layer = ExpertLayer("ModelOpt", Shape(config={"num_fused_shared_experts": 1}))
    hidden, ids, weights = layer.batch(5)
    ids[:, -1] = 5  # SGLang appends the shared expert behind the routed ones
    assert torch.equal(layer.run(hidden, ids, weights), layer.expected(hidden, ids, weights))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(experts=1, top_k=1, hidden=12304), "the hidden size 12304 is above 12288"),
        (
            Shape(experts=24579, hidden=16, inner=64),  # thirds of it are one too many
            "the number of experts on this rank 24579 is above 8192; the nearest --ep-size that shares them out is 9",
        ),
        (Shape(experts=34, top_k=33), "the top_k 33 is above 32"),
    ],
)
def test_sizes_above_the_limits_of_the_kernels_are_refused_before_weights_load(
    kind: str, shape: Shape, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Any) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr(ExpertLayer, "_fill", never)
    runs = machine(RTX, sglang="0.5.23")
    serve_with("sm120", kind, facts=runs)
    with pytest.raises(UnsupportedError) as refused:
        ExpertLayer(kind, shape)
    assert str(refused.value) == (
        f"--moe-runner-backend='sm120' cannot be used: {words}. Or use --moe-runner-backend auto."
    )
    serve_with("torch_reference", kind)  # has no such limits
    with pytest.raises(AssertionError, match="weights were made"):
        ExpertLayer(kind, shape)


@pytest.mark.parametrize("shape", [Shape(hidden=12304, experts=1, top_k=1), Shape(experts=34, top_k=33)])
def test_under_sm120_tuned_sglang_serves_a_layer_above_the_limits(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExpertLayer, "_fill", lambda self: None)
    monkeypatch.setattr(modelopt.ModelOptNvFp4FusedMoEMethod, "process_weights_after_loading", lambda *_: None)
    serve_with("sm120_tuned", "ModelOpt", facts=machine(RTX, sglang="0.5.23"))
    assert "is above" in ExpertLayer("ModelOpt", shape).method.sm120_experts.left


def test_limits_are_those_of_the_kernels() -> None:
    header = (Path(__file__).parents[2] / "csrc/moe/config.h").read_text(encoding="utf-8")
    constants = {name: int(value) for name, value in re.findall(r"constexpr int (kMax\w+) = (\d+);", header)}
    limits = expert_limits
    ours = (limits.MAX_TOP_K, limits.MAX_PAIRS, limits.MAX_EXPERTS, limits.MAX_HIDDEN_SIZE)
    assert ours == tuple(constants[f"kMax{name}"] for name in ("TopK", "Pairs", "Experts", "HiddenSize"))
