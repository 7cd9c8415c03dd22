"""A running server is checked: which steps, which of them without a graph, and what is told about it."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from sglang_sm120 import env
from sglang_sm120.errors import VerificationError
from sglang_sm120.host import watch_patches, watch_seams
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.watch import WARM_UP_STEPS, Watcher
from tests.host.conftest import Serving
from tests.host.linear_layers import Case, make_case
from tests.host.watching import watching
from tests.support.nvfp4 import fresh_generator


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    with watching(monkeypatch) as watcher:
        yield watcher


# --- steps and graphs ------------------------------------------------------------------------------------------------


def batch(mode_name: str = "DECODE", *, idle: bool = False, data_parallel: bool = False) -> Any:
    mode = SimpleNamespace(name=mode_name, is_idle=lambda: idle)
    return SimpleNamespace(forward_mode=mode, global_num_tokens_cpu=[1] if data_parallel else None)


def test_every_nth_step_is_checked_and_each_runner_counts_for_itself(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.decide("torch_reference")
    with watching(monkeypatch, every=2) as watcher:
        case = make_case("modelopt", 64, [32], fresh_generator())
        target, draft = SimpleNamespace(), SimpleNamespace()
        checked = []
        for runner in (target, draft, target, draft, target, draft):
            before = watcher.coverage.products
            watcher.step(runner, batch(), lambda: case.run(torch.ones(3, 64, dtype=torch.bfloat16)))
            checked.append(watcher.coverage.products > before)
        assert checked == [True, True, False, False, True, True]


def test_steps_that_alternate_are_counted_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model extends its cache in every step in between, and all its steps of a round share one batch."""
    with watching(monkeypatch, every=2) as watcher:
        runner, due = SimpleNamespace(), []
        for mode in ["DECODE", "DRAFT_EXTEND"] * 4:
            made = batch(mode)
            due.append([watcher.due(runner, made) for _ in range(3)][-1])
        assert due == [True, True, False, False, True, True, False, False]


def test_runs_in_front_of_the_capture_of_a_draft_model_are_checked_and_are_no_steps(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang captures its steps through the method that runs a step (``EAGLEDraftCudaGraphRunner``)."""
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    serving.decide("torch_reference")
    with watching(monkeypatch, every=64) as watcher:
        case, patcher = make_case("modelopt", 64, [32], fresh_generator()), Patcher()

        class ModelRunner:
            def __init__(self) -> None:
                self.sm120_steps = Counter(DECODE=1)  # the next one to be checked is far away

            def forward(self, forward_batch: Any) -> None:
                case.run(torch.ones(3, 64, dtype=torch.bfloat16))

        module: Any = SimpleNamespace(ModelRunner=ModelRunner)
        watch_patches.watch_steps(module, patcher, seam="steps")
        runner = ModelRunner()
        runner.forward(batch())
        assert (watcher.steps, watcher.coverage.checked) == (1, 0)
        with model_capture_mode():
            runner.forward(batch())
        assert (watcher.steps, watcher.coverage.checked) == (1, 1)


def test_a_step_in_which_nothing_can_be_checked_ends_the_start(watcher: Watcher) -> None:
    watcher.step(SimpleNamespace(), batch(idle=True), lambda: None)
    nothing = rf"{env.VERIFY}=1 checked nothing on any rank of the server \(rank 0: 0 of 0 pairs"
    with pytest.raises(VerificationError, match=nothing):
        watcher.step(SimpleNamespace(), batch(), lambda: None)


def test_coverage_is_printed(serving: Serving, watcher: Watcher, caplog: pytest.LogCaptureFixture) -> None:
    serving.decide("torch_reference")
    case = make_case("modelopt", 64, [32], fresh_generator())
    runner = SimpleNamespace()
    # Another logger at this level, as after a test that configures SGLang's.
    with caplog.at_level(logging.INFO, "sglang"), caplog.at_level(logging.INFO, "sglang_sm120"):
        for m in (3, 3, 4, 5):
            watcher.step(runner, batch(), lambda m=m: case.run(torch.ones(m, 64, dtype=torch.bfloat16)))  # type: ignore[misc]
    lines = [record.getMessage() for record in caplog.records if record.name == "sglang_sm120"]
    assert lines[0] == f"{env.VERIFY}: 1 of 1 pairs of layer and M checked (1 layers, 1 calls)."
    assert lines[-1] == f"{env.VERIFY}: 3 of 3 pairs of layer and M checked (1 layers, 4 calls)."
    assert len(lines) == 3


def test_a_checked_step_runs_without_a_graph_and_others_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own class decides about the graph; its answer is asked for twice where it plans ahead."""
    import sglang.srt.model_executor.runner.decode_cuda_graph_runner as module

    with watching(monkeypatch, every=3) as watcher:
        patcher = Patcher()
        seam = next(s for s in watch_seams.WATCH_SEAMS if s.name == "graphs (decode)")
        seam.apply(module, patcher)
        model_runner: Any = SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: False))
        runner: Any = SimpleNamespace(
            model_runner=model_runner,
            ragged_verify_mode=False,
            require_mlp_tp_gather=False,
            require_mlp_sync=False,
            enable_pdmux=False,
            disable_padding=False,
            record_nolora_graph=False,
            is_encoder_decoder=False,
            enable_two_batch_overlap=False,
            max_bs=8,
        )
        for name in ("_make_graph_key", "_resolve_lora_variant"):
            method = vars(module.DecodeCudaGraphRunner)[name]
            setattr(runner, name, method.__get__(runner))

        def decode(size: int = 4, *, data_parallel: bool = False, runner: Any = runner) -> list[bool]:
            made = batch(data_parallel=data_parallel)
            made.replace_embeds = made.spec_info = made.lora_ids = None
            made.batch_size = size
            answers = [bool(module.DecodeCudaGraphRunner.can_run_graph(runner, made)) for _ in range(2)]
            watcher.coverage.check("layer", size)
            watcher.step(runner.model_runner, made, lambda: None)
            return answers

        try:
            assert [decode() for _ in range(4)] == [[False] * 2, [True] * 2, [True] * 2, [False] * 2]
            assert decode(9) == [False] * 2  # SGLang's own refusal stays
            assert decode() == [True] * 2
            assert decode(data_parallel=True) == [True] * 2
        finally:
            patcher.undo()


@pytest.mark.parametrize(
    ("module_name", "cls"),
    [
        ("eagle_draft_cuda_graph_runner", "EAGLEDraftCudaGraphRunner"),
        ("eagle_draft_extend_cuda_graph_runner", "EAGLEDraftExtendCudaGraphRunner"),
        ("multi_layer_eagle_draft_extend_cuda_graph_runner", "MultiLayerEagleDraftExtendCudaGraphRunner"),
        ("frozen_kv_mtp_cuda_graph_runner", "FrozenKVMTPCudaGraphRunner"),
    ],
)
def test_a_checked_step_of_a_draft_model_runs_without_its_graph(
    module_name: str, cls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runners answer by themselves; their own conditions are SGLang's affair and are taken as met."""
    place = f"sglang.srt.speculative.{module_name}"
    owner = getattr(importlib.import_module(place), cls)
    monkeypatch.setattr(owner, "can_run_graph", lambda self, forward_batch: True)
    with watching(monkeypatch, every=2):
        patcher = Patcher()
        release = Version("0.5.23")
        (seam,) = (s for s in watch_seams.WATCH_SEAMS if s.options.get("cls") == cls and s.exists_in(release))
        seam.apply(sys.modules[place], patcher)
        runner = SimpleNamespace(model_runner=SimpleNamespace())
        try:
            answers = [owner.can_run_graph(runner, batch()) for _ in range(4)]
        finally:
            patcher.undo()
    assert answers == [False, True, False, True]


# --- what served what ------------------------------------------------------------------------------------------------


def test_what_served_what_is_logged_once_and_written(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serving.decide("torch_reference")
    file = tmp_path / "served.json"
    monkeypatch.setenv(env.REPORT, str(file))
    with watching(monkeypatch, every=0, report=True) as watcher:
        generator = fresh_generator()
        layers = [make_case("modelopt", 64, [32], generator), make_case("compressed-tensors", 64, [32], generator)]
        for number, case in enumerate(layers):
            case.layer.sm120_name = f"layers.{number}"  # type: ignore[assignment]
        runner = SimpleNamespace()

        def step(m: int, layers: list[Case] = layers) -> None:
            for case in layers:
                case.run(torch.ones(m, 64, dtype=torch.bfloat16))

        ranges: list[str] = []
        monkeypatch.setattr(torch.profiler, "record_function", lambda name: nullcontext(ranges.append(name)))
        with caplog.at_level(logging.INFO, "sglang_sm120"):
            for _ in range(2 * WARM_UP_STEPS):
                for m in (1, 3):
                    watcher.step(runner, batch(), lambda m=m: step(m))  # type: ignore[misc]
        (block,) = [r.getMessage() for r in caplog.records if "Calls of FP4 layers" in r.getMessage()]
        assert "Module N=32 K=64 M=1: torch_reference, 2 layers, 8 calls, 0 captured" in block
        assert "Module N=32 K=64 M=3 to 4: torch_reference, 2 layers, 8 calls, 0 captured" in block
        report = json.loads(file.read_text())
        assert report["steps"] == 4 * WARM_UP_STEPS
        assert [(row["m"], row["calls"]) for row in report["rows"]] == [([1, 1], 32), ([3, 4], 32)]
        assert watcher.coverage.seen == 0
        assert ranges.count("sm120 Module N=32 K=64 M=3") == 32


def test_a_report_that_cannot_be_written_warns_once_and_serves_on(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serving.decide("torch_reference")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(env.REPORT, str(tmp_path / "file" / "served.json"))
    with watching(monkeypatch, every=0, report=True) as watcher, caplog.at_level(logging.WARNING, "sglang_sm120"):
        for _ in range(2 * WARM_UP_STEPS):
            watcher.step(SimpleNamespace(), batch(), lambda: None)
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [env.REPORT]


def test_layers_get_their_place_in_the_model_and_those_of_a_draft_another_name(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.decide("torch_reference")

    def model() -> torch.nn.Module:
        case = make_case("modelopt", 64, [32], fresh_generator())
        case.layer.quant_method = case.method
        inner = torch.nn.Sequential(case.layer, torch.nn.Linear(2, 2))
        return torch.nn.Sequential(inner)

    class DefaultModelLoader:
        @staticmethod
        def load_weights_and_postprocess(model: torch.nn.Module, weights: object, target_device: object) -> None:
            pass

    watcher = Watcher(1, report=False)
    monkeypatch.setattr(watch_patches, "watcher", lambda: watcher)
    module: Any = SimpleNamespace(DefaultModelLoader=DefaultModelLoader)
    watch_patches.name_layers(module, Patcher(), seam="watch names")
    target, draft = model(), model()
    for loaded in (target, draft, target):
        module.DefaultModelLoader.load_weights_and_postprocess(loaded, None, None)
    assert [m[0][0].sm120_name for m in (target, draft)] == ["0.0", "0.0 of model 2"]  # type: ignore[index]
    assert not hasattr(target[0][1], "sm120_name")  # type: ignore[index]
