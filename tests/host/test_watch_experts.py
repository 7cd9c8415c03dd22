"""Experts of a running server are checked: layers of the real SGLang, faults planted below the interface."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe import utils as moe_utils
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization import modelopt_quant

from cpu_host.kernels import build
from cpu_host.kernels.library import EmulatedLibrary
from sglang_sm120 import env, native
from sglang_sm120.backends import torch_reference
from sglang_sm120.errors import VerificationError
from sglang_sm120.host import moe_choice, moe_layers, watch_experts, watch_patches
from sglang_sm120.host.conventions import EXPERT_CONVENTIONS
from sglang_sm120.host.moe_choice import Runners
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.watch import WARM_UP_STEPS, Watcher
from sglang_sm120.probing.expert_operations import Layer
from sglang_sm120.verification import reproducer
from sglang_sm120.verification.expert_call import ExpertCall
from tests.dispatch.machines import RTX, machine
from tests.host.conftest import Serving
from tests.host.expert_layers import KINDS, ExpertLayer, Shape, serve_with
from tests.host.watching import watching
from tests.probing.faulty_experts import as_grouped_gemms

Tensor = torch.Tensor
NAME = "model.layers.7.mlp.experts"
SHAPES = {
    "gated": Shape(),
    "more experts than tokens": Shape(experts=9, hidden=80, inner=64, top_k=2),
    "without a gate, padded by SGLang": Shape(gated=False, inner=48),
    "second of three ranks": Shape(ranks=3, rank=1),
}
SERVED = [(kind, name) for kind in KINDS for name in SHAPES if kind == "ModelOpt" or SHAPES[name].gated]


@pytest.fixture(autouse=True)
def clean(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_choice, "RUNNERS", Runners())
    monkeypatch.delenv(moe_choice.CARRIER, raising=False)
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    with watching(monkeypatch) as watcher:
        yield watcher


def named_layer(kind: str, shape: Shape, runner: str = "torch_reference") -> ExpertLayer:
    serve_with(runner, kind, facts=machine(RTX) if runner == "sm120" else None)
    layer = ExpertLayer(kind, shape)
    layer.layer.sm120_name = NAME  # type: ignore[assignment]
    return layer


def under_sglang(layer: ExpertLayer, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Let every batch go on to SGLang's own method, whose kernels ``compute`` stands for."""
    layer.method.sm120_experts.most_tokens = 0

    def run(dispatched: Any, _: object) -> StandardCombineInput:
        topk = dispatched.topk_output
        return StandardCombineInput(compute(dispatched.hidden_states, topk.topk_ids, topk.topk_weights))

    layer.method.runner = SimpleNamespace(run=run)


# --- right layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shape"), SERVED)
def test_right_experts_pass_and_count(kind: str, shape: str, watcher: Watcher) -> None:
    layer = named_layer(kind, SHAPES[shape])
    for tokens in (0, 1, 5, 5, 140):
        layer.run(*layer.batch(tokens))
    assert (watcher.coverage.seen, watcher.coverage.checked) == (3, 3)
    assert watcher.coverage.text == "3 of 3 pairs of layer and M checked (1 layers, 1 of them experts, 3 calls)"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_read_as_the_dispatcher_numbers_them(kind: str, watcher: Watcher) -> None:
    """Made local, -1 for other ranks; and a rank that gets no token of its own."""
    layer = named_layer(kind, SHAPES["second of three ranks"])
    hidden, ids, weights = layer.batch(5)
    layer.layer.dispatcher.local_expert_mapping = torch.empty(0)
    layer.run(hidden, torch.where((ids >= 2) & (ids < 4), ids - 2, -1), weights)
    layer.run(hidden[:2], torch.full_like(ids[:2], -1), weights[:2])
    assert watcher.coverage.checked == 2


def test_the_kernels_are_checked_too(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    library = EmulatedLibrary(build.library_path())
    monkeypatch.setattr(native, "_library", lambda device: (library, True))
    moe_layers.start.cache_clear()
    layer = named_layer("ModelOpt", SHAPES["gated"], "sm120")
    layer.run(*layer.batch(9))
    assert watcher.coverage.checked == 1


def test_sglangs_own_kernels_may_round_between_theirs(watcher: Watcher) -> None:
    layer = named_layer("ModelOpt", Shape(hidden=256, inner=128))

    def compute(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        call = watch_experts._call(layer.layer, layer.layer.sm120_watched, dispatched(hidden, ids, weights))  # type: ignore[arg-type]
        return as_grouped_gemms(hidden, ids, weights, Layer(call.stack("w13"), call.stack("w2"), "silu", 6))

    under_sglang(layer, compute)
    layer.run(*layer.batch(33))
    assert (watcher.coverage.seen, watcher.coverage.checked) == (1, 1)


def dispatched(hidden: Tensor, ids: Tensor, weights: Tensor) -> Any:
    return SimpleNamespace(hidden_states=hidden, topk_output=SimpleNamespace(topk_ids=ids, topk_weights=weights))


# --- wrong layers ----------------------------------------------------------------------------------------------------


def _stale(out: Tensor) -> Tensor:
    out = out.clone()
    out[3:] = out[:1]
    return out


#: What is done to the ids before a right runner, what to its result, and what the message says.
FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "a wrong expert": (lambda ids: torch.where(ids == 4, 5, ids), lambda out: out, "elements are wrong, in row"),
    "stale rows": (lambda ids: ids, _stale, "in rows 3 to 8"),
    "NaN": (lambda ids: ids, lambda out: torch.full_like(out, torch.nan), "max error nan"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_below_the_operator_ends_the_server_and_is_kept(
    kind: str, fault: str, watcher: Watcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, after, text = FAULTS[fault]
    right = torch_reference.moe
    layer = named_layer(kind, Shape(experts=8, top_k=2, ranks=2, rank=1))  # experts 4 to 7
    hidden, _, weights = layer.batch(9)
    ids = torch.tensor([[4, 1], [7, 4], [4, 0]] * 3, dtype=torch.int32)  # 5 and 6 are idle
    layer.run(hidden[:4], ids[:4], weights[:4])

    def faulty(hidden: Tensor, ids: Tensor, *rest: Any) -> Tensor:
        return after(right(hidden, before(ids), *rest))

    monkeypatch.setattr(torch_reference, "moe", faulty)
    with pytest.raises(VerificationError) as raised:
        layer.run(hidden, ids, weights)
    message = str(raised.value)
    for part in (f"{NAME} (Module, moe M=9 E=8 local=4 top_k=2 H=128 I=64), served by torch_reference", text):
        assert part in message
    path = Path(message.rpartition("sglang-sm120 replay ")[2])
    case = reproducer.read(path)
    assert isinstance(case.call, ExpertCall)
    assert (case.backend, case.layer) == ("torch_reference", NAME)
    assert case.call.operands["ids"].tolist() == [[0, -1], [1, 0], [0, -1]] * 3
    assert torch.equal(case.call.operands["w2"][1], layer.layer.w2_weight[3])  # type: ignore[index]
    assert len(case.call.operands["w13"]) == 2
    assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_what_sglangs_own_kernels_compute_is_checked_and_named(kind: str, watcher: Watcher) -> None:
    layer = named_layer(kind, Shape())
    under_sglang(layer, layer.expected)
    layer.run(*layer.batch(7))
    assert watcher.coverage.checked == 1
    under_sglang(layer, lambda *batch: layer.expected(*batch).roll(1, 0))
    with pytest.raises(VerificationError, match=r"M=4 E=6 local=6 top_k=3 .*served by flashinfer_cutlass, is wrong"):
        layer.run(*layer.batch(4))


# --- what cannot be checked ------------------------------------------------------------------------------------------


def test_what_cannot_be_checked_is_seen_and_says_why(watcher: Watcher) -> None:
    layer = named_layer("ModelOpt", Shape())
    under_sglang(layer, lambda hidden, *_: hidden.float())
    layer.run(*layer.batch(4))
    assert (watcher.coverage.seen, watcher.coverage.checked) == (1, 0)
    assert "(flashinfer_cutlass: its result is torch.float32 for an input of torch.bfloat16)" in watcher.coverage.text


@pytest.mark.parametrize(
    ("value", "own_path", "config", "why"),
    [
        ("flashinfer_trtllm", False, {}, "laid out for it alone"),
        ("flashinfer_cutlass", True, {}, "in its own way"),
        ("flashinfer_cutlass", False, {"gemm1_clamp_limit": 7.0}, "gemm1_clamp_limit clamps"),
    ],
)
def test_layers_that_the_oracle_cannot_read_are_left_out(
    value: str, own_path: bool, config: dict[str, Any], why: str, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = named_layer("ModelOpt", Shape())
    for name, number in config.items():
        setattr(layer.layer.moe_runner_config, name, number)
    member = moe_utils.MoeRunnerBackend(value)
    monkeypatch.setattr(moe_utils, "get_moe_runner_backend", lambda: member)
    found = watch_experts.look_at(layer.method, layer.layer, EXPERT_CONVENTIONS[0], own_path=own_path)
    assert why in found.obstacle


def test_a_subclass_that_makes_its_runner_alone_is_seen(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(modelopt_quant.ModelOptNvFp4FusedMoEMethod):
        def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
            self.runner = layer.made

    layer = named_layer("ModelOpt", Shape())
    under_sglang(layer, layer.expected)
    del layer.layer.sm120_watched
    layer.method.__class__ = Other
    layer.run(*layer.batch(4))
    assert "(flashinfer_cutlass: Other computes in its own way)" in watcher.coverage.text


# --- a server --------------------------------------------------------------------------------------------------------


def batch() -> Any:
    mode = SimpleNamespace(name="DECODE", is_idle=lambda: False)
    return SimpleNamespace(forward_mode=mode, global_num_tokens_cpu=None)


def test_a_model_whose_only_fp4_is_its_experts_starts(watcher: Watcher) -> None:
    layer = named_layer("ModelOpt", Shape())
    watcher.step(SimpleNamespace(), batch(), lambda: layer.run(*layer.batch(3)))
    assert watcher.coverage.checked == 1


def test_experts_are_in_the_report_and_in_profiler_ranges(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "served.json"
    monkeypatch.setenv(env.REPORT, str(file))
    ranges: list[str] = []
    with watching(monkeypatch, every=0, report=True) as watcher, caplog.at_level(logging.INFO, "sglang_sm120"):
        layer = named_layer("ModelOpt", Shape(ranks=3, rank=1))
        monkeypatch.setattr(torch.profiler, "record_function", lambda name: nullcontext(ranges.append(name)))
        for _ in range(WARM_UP_STEPS):
            watcher.step(SimpleNamespace(), batch(), lambda: layer.run(*layer.batch(3)))
    (block,) = [r.getMessage() for r in caplog.records if "Calls of FP4 layers" in r.getMessage()]
    sizes = "E=6 local=2 top_k=3 H=128 I=64"
    assert f"Module {sizes} M=3 to 4: torch_reference, 1 layers, 8 calls, 0 captured" in block
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["e"], row["local"], row["top_k"], row["h"], row["i"], row["calls"]) == (6, 2, 3, 128, 64, 8)
    assert ranges == [f"sm120 Module {sizes} M=3"] * 8


def test_experts_get_their_place_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = named_layer("ModelOpt", Shape())
    layer.layer.quant_method = layer.method
    del layer.layer.sm120_name

    class DefaultModelLoader:
        @staticmethod
        def load_weights_and_postprocess(model: torch.nn.Module) -> None:
            pass

    monkeypatch.setattr(watch_patches, "watcher", lambda: Watcher(1, report=False))
    module: Any = SimpleNamespace(DefaultModelLoader=DefaultModelLoader)
    watch_patches.name_layers(module, Patcher(), seam="watch names")
    module.DefaultModelLoader.load_weights_and_postprocess(torch.nn.Sequential(layer.layer))
    assert layer.layer.sm120_name == "0"
