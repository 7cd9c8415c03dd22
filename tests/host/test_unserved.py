"""One line after the load tells whether the dense backend that was chosen has anything to do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe import (
    CompressedTensorsW4A4Nvfp4MoE,
)
from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod
from sglang.srt.model_loader.loader import DefaultModelLoader

from sglang_sm120.host import moe_choice, moe_layers, unserved
from sglang_sm120.host.conventions import EXPERT_CONVENTIONS
from tests.host.conftest import Serving
from tests.host.linear_layers import make_case
from tests.support.nvfp4 import fresh_generator


class Model(torch.nn.Module):
    """Layers with SGLang's own methods, and nothing to load."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def load_weights(self, weights: Iterator[object]) -> None:
        assert not list(weights)


def experts(method: type) -> torch.nn.Module:
    """A block of experts as SGLang marks it. Its method is real, but has not prepared weights."""
    layer = torch.nn.Module()
    owner = "scheme" if method is CompressedTensorsW4A4Nvfp4MoE else "quant_method"
    prepared = type(method.__name__, (method,), {"process_weights_after_loading": lambda self, layer: None})
    setattr(layer, owner, object.__new__(prepared))
    return layer


def dense(kind: str) -> torch.nn.Module:
    case = make_case(kind, 64, [32], fresh_generator())
    setattr(case.layer, "quant_method" if kind.startswith("modelopt") else "scheme", case.method)
    return case.layer


def lines(caplog: pytest.LogCaptureFixture, *layers: torch.nn.Module) -> list[logging.LogRecord]:
    with caplog.at_level(logging.INFO, logger="sglang_sm120"):
        DefaultModelLoader.load_weights_and_postprocess(Model(*layers), iter(()), torch.device("cpu"))
    return [record for record in caplog.records if "no layer to serve" in record.getMessage()]


EXPERTS = [ModelOptNvFp4FusedMoEMethod, CompressedTensorsW4A4Nvfp4MoE]


@pytest.mark.parametrize("method", EXPERTS)
def test_a_value_that_was_named_and_serves_nothing_is_a_warning(
    method: type, serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.decide("torch_reference")
    (line,) = lines(caplog, experts(method), experts(method))
    assert line.levelno == logging.WARNING
    assert "--fp4-gemm-backend=torch_reference has no layer to serve in Model" in line.getMessage()
    assert "2 layers of routed experts, which --moe-runner-backend decides" in line.getMessage()


def test_under_auto_it_is_a_piece_of_information(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    serving.decide("torch_reference", explicit=False)
    (line,) = lines(caplog, experts(EXPERTS[0]))
    assert line.levelno == logging.INFO


def test_a_named_value_for_a_model_without_fp4_is_a_warning(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    serving.decide("torch_reference")
    (line,) = lines(caplog, torch.nn.Linear(2, 2))
    assert "it has no NVFP4 layer at all" in line.getMessage()


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors", "modelopt, weight-only"])
def test_a_model_with_a_dense_fp4_layer_needs_no_line(
    kind: str, serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.decide("torch_reference")
    assert lines(caplog, dense(kind), experts(EXPERTS[0])) == []


@pytest.mark.parametrize("backend", [None, "torch_reference"])
def test_a_model_without_fp4_is_left_in_peace_under_auto(
    backend: str | None, serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.decide(backend, explicit=False)
    assert lines(caplog, torch.nn.Linear(2, 2)) == []


def test_without_a_decision_there_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, experts(EXPERTS[0])) == []


def served_experts(most: int | None = None) -> torch.nn.Module:
    """A layer of experts that a runner of ours serves."""
    layer = torch.nn.Module()
    convention = EXPERT_CONVENTIONS[0]
    layer.quant_method = SimpleNamespace(sm120_experts=moe_layers.Experts("sm120", convention, most_tokens=most))
    return layer


def test_a_moe_runner_of_ours_says_what_it_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runners = moe_choice.Runners(own_target="sm120", own_draft="torch_reference")
    monkeypatch.setattr(moe_choice, "RUNNERS", runners)
    with caplog.at_level(logging.INFO, "sglang_sm120"):
        unserved.report_experts(torch.nn.Sequential(served_experts(64), served_experts(64)))
        assert "--moe-runner-backend sm120 serves the NVFP4 experts of 2 layers; batches of more than 64" in caplog.text
        caplog.clear()
        runners.making_draft = True
        unserved.report_experts(torch.nn.Sequential(torch.nn.Linear(1, 1)))
        assert "--speculative-moe-runner-backend torch_reference has no layer to serve in Sequential" in caplog.text
        caplog.clear()
        runners.own_draft = None
        unserved.report_experts(torch.nn.Sequential(served_experts()))
        assert not caplog.text
