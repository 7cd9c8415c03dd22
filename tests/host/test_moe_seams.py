"""What SGLang 0.5.23 makes of ``--moe-runner-backend`` on cards that are not here, with its own classes.

The arguments are resolved by the real ``ServerArgs``, the expert layers are the real methods; capability and versions
are passed in. ``tests/matrix`` asks the other releases the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.moe.utils as moe_utils
import sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe as ct
import sglang.srt.layers.quantization.modelopt_quant as modelopt
import sglang.srt.layers.quantization.unquant as unquant
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.runtime_context import get_flags
from sglang.srt.server_args import prepare_server_args

from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.host import moe_choice, moe_resolution
from sglang_sm120.host.moe_choice import Runners
from sglang_sm120.host.state import STATE
from tests.dispatch.machines import AMPERE, B200, B300, HOPPER, RTX, SPARK, machine
from tests.support.moe_configs import QUANTIZATION_CONFIGS, write_moe_config

SM10X_ONLY = [
    "flashinfer_trtllm",
    "flashinfer_trtllm_routed",
    "experimental_sgl_trtllm",
    "flashinfer_cutedsl",
    "flashinfer_megamoe",
]
OTHER_CARDS = [AMPERE, HOPPER, B200, B300, None]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SGLANG_SM120_AUTO", "SGLANG_SM120_ALLOW_UNSAFE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):  # SGLang writes some of its decisions there
        del os.environ[name]
    os.environ.update(before)


class Arguments:
    """Resolves a command line as on a card that is not here; returns (target runner, draft runner)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch, self._folder = monkeypatch, folder

    def __call__(
        self, kind: str, *words: str, facts: HostFacts, config: dict[str, Any] | None = None
    ) -> tuple[str, str | None]:
        self._patch.setattr(moe_resolution, "facts_of_arguments", lambda view: facts)
        model = write_moe_config(self._folder, kind, **(config or {}))
        arguments = prepare_server_args(["--model-path", str(model), "--device", "cpu", *words])
        arguments.resolve_once()
        view = resolved_view(arguments)
        return view.moe_runner_backend, view.speculative_moe_runner_backend


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Arguments:
    return Arguments(monkeypatch, tmp_path)


@pytest.mark.parametrize("card", [RTX, SPARK])
@pytest.mark.parametrize(
    ("kind", "runner"),
    [
        ("modelopt_fp4", "flashinfer_cutlass"),
        ("modelopt_mixed", "flashinfer_cutlass"),
        ("nvfp4_weight_only", "marlin"),
        ("mixed, experts in FP8", "auto"),
        ("compressed-tensors", "auto"),
    ],
)
def test_auto_ends_in_a_runner_that_works(resolve: Arguments, kind: str, runner: str, card: tuple[int, int]) -> None:
    """SGLang's own rule needs ``--quantization`` on the command line, which nobody writes for these checkpoints."""
    assert resolve(kind, facts=machine(card)) == (runner, runner)


@pytest.mark.parametrize("card", OTHER_CARDS)
@pytest.mark.parametrize("kind", QUANTIZATION_CONFIGS)
def test_on_other_cards_auto_is_not_touched(resolve: Arguments, kind: str, card: tuple[int, int] | None) -> None:
    assert resolve(kind, facts=machine(card))[0] == "auto"


@pytest.mark.parametrize("card", OTHER_CARDS)
@pytest.mark.parametrize("rule", [moe_resolution.choose_runner, moe_resolution.choose_draft_runner])
def test_on_other_cards_the_model_is_not_even_looked_at(
    rule: Any, card: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that we do not understand must not end a start that is none of our business."""
    monkeypatch.setattr(moe_resolution, "facts_of_arguments", lambda view: machine(card))
    monkeypatch.setattr(moe_resolution, "model_config_of", lambda view: pytest.fail("the model is looked at"))
    view = SimpleNamespace(
        moe_runner_backend="auto", speculative_moe_runner_backend=None, speculative_algorithm="EAGLE"
    )
    declared = {"speculative_moe_runner_backend": "flashinfer_trtllm"}
    assert rule(view, declared) == declared


@pytest.mark.parametrize("value", ["flashinfer_trtllm", "triton", "marlin", "flashinfer_cutlass"])
def test_a_named_runner_is_never_changed(resolve: Arguments, value: str) -> None:
    assert resolve("modelopt_fp4", "--moe-runner-backend", value, facts=machine(RTX))[0] == value


def test_auto_is_left_alone_where_the_user_says_so(resolve: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_AUTO", "0")
    assert resolve("modelopt_fp4", facts=machine(RTX)) == ("auto", "auto")


def test_a_model_without_experts_is_none_of_our_business(resolve: Arguments) -> None:
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_experts_per_tok": None}
    assert resolve("modelopt_fp4", facts=machine(RTX), config=dense)[0] == "auto"


def test_auto_stays_when_nothing_runs_and_the_layer_says_why(resolve: Arguments) -> None:
    assert resolve("modelopt_fp4", facts=machine(RTX, flashinfer="0.6.7"))[0] == "auto"


def test_a_draft_does_not_inherit_what_cannot_run(resolve: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []  # SGLang replaces the handlers of the root logger, pytest's included
    monkeypatch.setattr(moe_resolution.logger, "warning", lambda text, *words: said.append(text % words))
    words = ["--speculative-algorithm", "NGRAM", "--moe-runner-backend"]
    taken = resolve("modelopt_fp4", *words, "flashinfer_trtllm", facts=machine(RTX))
    assert taken == ("flashinfer_trtllm", "flashinfer_cutlass")
    assert said == [
        "The draft model does not inherit --moe-runner-backend flashinfer_trtllm, which does not run here; it gets "
        "flashinfer_cutlass."
    ]
    assert resolve("modelopt_fp4", *words, "marlin", facts=machine(RTX)) == ("marlin", "marlin")
    assert resolve("modelopt_fp4", *words, "flashinfer_trtllm", facts=machine(B200))[1] == "flashinfer_trtllm"


def test_a_draft_runner_that_was_named_is_never_changed(resolve: Arguments) -> None:
    words = ["--speculative-algorithm", "NGRAM", "--speculative-moe-runner-backend", "flashinfer_trtllm"]
    assert resolve("modelopt_fp4", *words, facts=machine(RTX)) == ("flashinfer_cutlass", "flashinfer_trtllm")


class Layers:
    """Makes SGLang's expert methods under a runner, as on a card that is not here."""

    MAKERS = {
        "ModelOpt": lambda: modelopt.ModelOptNvFp4FusedMoEMethod(SimpleNamespace()),
        "compressed-tensors": ct.CompressedTensorsW4A4Nvfp4MoE,
        "unquantized": unquant.UnquantizedFusedMoEMethod,
    }

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        blackwell = SimpleNamespace(is_blackwell=True)
        for module in (modelopt, ct):
            monkeypatch.setattr(module, "get_platform", lambda: blackwell)
        self._patch = monkeypatch

    def __call__(self, kind: str, value: str, facts: HostFacts) -> Any:
        STATE.facts = facts
        self._patch.setattr(get_flags().moe, "runner_backend", moe_utils.MoeRunnerBackend(value))
        return self.MAKERS[kind]()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, serving: Any) -> Layers:
    monkeypatch.setattr(moe_choice, "RUNNERS", Runners())
    return Layers(monkeypatch)


@pytest.mark.parametrize("card", [RTX, SPARK])
@pytest.mark.parametrize("value", SM10X_ONLY)
def test_runners_of_other_cards_are_refused_before_weights_load(
    make: Layers, value: str, card: tuple[int, int]
) -> None:
    with pytest.raises(UnsupportedError) as refused:
        make("ModelOpt", value, machine(card))
    text = str(refused.value)
    assert text.startswith(f"--moe-runner-backend={value!r}")
    assert "use --moe-runner-backend flashinfer_cutlass instead" in text
    assert "SGLANG_SM120_ALLOW_UNSAFE=1" in text


@pytest.mark.parametrize("kind", ["compressed-tensors", "unquantized"])
def test_tensorrt_llm_is_refused_for_every_kind_of_experts(make: Layers, kind: str) -> None:
    with pytest.raises(UnsupportedError, match=r"10\.x"):
        make(kind, "flashinfer_trtllm", machine(RTX))


@pytest.mark.parametrize("value", ["flashinfer_cutlass", "marlin"])
def test_runners_that_work_are_let_through(make: Layers, value: str) -> None:
    assert make("ModelOpt", value, machine(RTX)) is not None
    assert make("compressed-tensors", value, machine(RTX)) is not None
    assert make("unquantized", value, machine(RTX)) is not None


def test_compressed_tensors_runs_under_auto_and_modelopt_does_not(make: Layers) -> None:
    assert make("compressed-tensors", "auto", machine(RTX)) is not None
    with pytest.raises(UnsupportedError, match="serves these experts with flashinfer_trtllm"):
        make("ModelOpt", "auto", machine(RTX))


def test_a_drafts_experts_are_judged_by_their_own_kind(make: Layers) -> None:
    """A ModelOpt draft of a compressed-tensors target: what runs for the target says nothing about it."""
    moe_choice.RUNNERS.quantization = "compressed-tensors"
    with pytest.raises(UnsupportedError, match="modelopt_fp4 experts.*flashinfer_trtllm"):
        make("ModelOpt", "auto", machine(RTX))
    moe_choice.RUNNERS.quantization = "nvfp4_weight_only"
    with pytest.raises(UnsupportedError, match="nvfp4_weight_only experts"):
        make("ModelOpt", "flashinfer_cutlass", machine(RTX))


def test_auto_left_to_sglang_is_not_refused_either(make: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_AUTO", "0")
    assert make("ModelOpt", "auto", machine(RTX)) is not None


@pytest.mark.parametrize("card", OTHER_CARDS)
@pytest.mark.parametrize("kind", Layers.MAKERS)
def test_on_other_cards_every_layer_is_made(make: Layers, kind: str, card: tuple[int, int] | None) -> None:
    for value in ("auto", "flashinfer_trtllm", "flashinfer_cutlass"):
        assert make(kind, value, machine(card)) is not None


def test_a_flashinfer_with_the_race_is_refused_and_names_the_fix(make: Layers) -> None:
    for kind, value in (("ModelOpt", "flashinfer_cutlass"), ("compressed-tensors", "auto")):
        with pytest.raises(UnsupportedError, match=r"flashinfer#2913\).*install flashinfer-python >= 0\.6\.8\.post1"):
            make(kind, value, machine(RTX, flashinfer="0.6.7"))


def test_allow_unsafe_turns_each_refusal_into_one_warning(
    make: Layers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_SM120_ALLOW_UNSAFE", "1")
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        for _ in range(3):
            assert make("ModelOpt", "flashinfer_trtllm", machine(RTX)) is not None
    assert caplog.text.count("--moe-runner-backend='flashinfer_trtllm'") == 1


def test_before_the_scheduler_decided_anything_no_layer_is_judged(make: Layers) -> None:
    assert make("ModelOpt", "flashinfer_trtllm", machine(RTX).__class__(None)) is not None
    STATE.facts = None
    assert Layers.MAKERS["ModelOpt"]() is not None


def test_the_draft_model_is_refused_under_its_own_flag(make: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    published = SimpleNamespace(
        moe=SimpleNamespace(
            moe_a2a_backend="none",
            moe_runner_backend="flashinfer_cutlass",
            deepep_mode="auto",
            deepep_config=None,
            disable_flashinfer_cutlass_moe_fp4_allgather=False,
        ),
        overlap=SimpleNamespace(
            enable_two_batch_overlap=False, enable_single_batch_overlap=False, tbo_token_distribution_threshold=0.48
        ),
    )
    draft = SimpleNamespace(speculative_moe_runner_backend="flashinfer_trtllm", speculative_moe_a2a_backend="none")
    monkeypatch.setattr(moe_utils, "get_exec", lambda: published)
    monkeypatch.setattr(moe_utils, "get_spec", lambda: draft)
    monkeypatch.setattr(moe_utils, "get_model", lambda: SimpleNamespace(quantization=None))
    moe_utils.initialize_moe_config()
    assert Runners("flashinfer_cutlass", "flashinfer_trtllm", None) == moe_choice.RUNNERS
    STATE.facts = machine(RTX)
    assert Layers.MAKERS["ModelOpt"]() is not None
    with moe_utils.speculative_moe_backend_context(), pytest.raises(UnsupportedError) as refused:
        Layers.MAKERS["unquantized"]()
    assert str(refused.value).startswith("--speculative-moe-runner-backend='flashinfer_trtllm'")
    assert "use --speculative-moe-runner-backend triton instead" in str(refused.value)


def test_subclasses_of_the_methods_keep_their_own_rules(make: Layers) -> None:
    class Special(modelopt.ModelOptNvFp4FusedMoEMethod):  # type: ignore[misc]
        pass

    with pytest.raises(UnsupportedError):
        make("ModelOpt", "flashinfer_trtllm", machine(RTX))
    assert Special(SimpleNamespace()) is not None


@pytest.mark.parametrize(
    ("cards", "device", "capability"),
    [
        ([(12, 0)], "cuda", RTX),
        ([(12, 1), (12, 1)], None, SPARK),
        ([(12, 0), (9, 0)], "cuda", None),  # which of them is CUDA's first is not known
        ([(12, 0)], "cpu", None),
        ([], "cuda", None),
    ],
)
def test_the_card_of_the_arguments_is_read_without_a_context(
    cards: list[tuple[int, int]],
    device: str | None,
    capability: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moe_resolution, "compute_capabilities", lambda: cards)
    facts = moe_resolution.facts_of_arguments(SimpleNamespace(device=device))
    assert facts.capability == capability
    assert facts.versions["sglang"] == "0.5.23"
