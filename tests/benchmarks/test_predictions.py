"""The prediction for SM12x is the sum it claims to be."""

from __future__ import annotations

import pytest

from sglang_sm120.cards import find_card
from sglang_sm120.models import explain
from sglang_sm120.models.architecture import read_model
from sglang_sm120.models.budget import Setup
from sglang_sm120.models.quantization import read_quantization
from sglang_sm120.models.source import load_source
from tools import prediction_model as model
from tools import prediction_tables as tables
from tools.prediction_model import Case, Ends


@pytest.mark.parametrize(
    ("checkpoint", "tp"),
    [("nvidia/Qwen3.5-397B-A17B-NVFP4", 8), ("nvidia/Qwen3.6-35B-A3B-NVFP4", 1), ("nvidia/Qwen3.8-27B-NVFP4", 1)],
)
def test_bytes_launches_and_all_reduces_are_those_of_explain(checkpoint: str, tp: int) -> None:
    source = load_source(checkpoint)
    quantization = read_quantization(source.quantization)
    setup = Setup(tp, kv_bytes=1 if quantization.kv_cache_fp8 else 2)
    card = find_card("rtx-pro-6000")
    told = explain.explain(source, read_model(source), quantization, card, setup)
    plain = {term.name: term for term in model.terms(Case(checkpoint, "rtx-pro-6000", tp))}
    drafted = {term.name: term for term in model.terms(Case(checkpoint, "rtx-pro-6000", tp, speculative=True))}

    assert plain["bytes"].ms.fast == pytest.approx(told["floor_ms"] / model.BANDWIDTH_SHARE, rel=1e-6)
    verified = told["speculative"]["verify_bytes"] / card.bandwidth_gb_s / 1e6 / model.BANDWIDTH_SHARE
    assert drafted["bytes"].ms.slow == pytest.approx(verified, rel=1e-6)
    assert drafted["3 drafts"].ms.fast * card.bandwidth_gb_s * 1e6 > told["speculative"]["draft_bytes"]

    dense, layers = int(plain["dense GEMMs"].arithmetic.split()[0]), told["model"]["layers"]
    others = int(plain["other kernels"].arithmetic.split()[0]) - model.UNCOUNTED_FAST * layers
    experts = sum(
        gemm["layers"] * (2 if gemm["format"] == "nvfp4" else 1)
        for gemm in told["gemms"]
        if gemm["part"] == "routed experts"
    )
    assert dense + others + experts == told["launches"]
    reduces = int(plain["all-reduces"].arithmetic.split()[0]) if "all-reduces" in plain else 0
    assert reduces == told["all_reduces"]["count"]


def test_a_step_is_the_sum_of_its_terms_and_the_rate_its_inverse() -> None:
    case = Case("nvidia/Qwen3.6-35B-A3B-NVFP4", "rtx-pro-6000", batch=4, speculative=True)
    found = model.terms(case)
    total = model.step_ms(found)
    assert total.slow == pytest.approx(sum(term.ms.slow for term in found))
    assert total.fast < total.slow
    assert model.tokens_per_s(case).slow == pytest.approx(4 * model.ACCEPTED / total.slow * 1e3)


def test_an_all_reduce_takes_the_published_time_and_grows_with_its_size() -> None:
    assert model.all_reduce_us(8192, 8).fast == 9.2
    assert model.all_reduce_us(65536, 8).fast == 24.1, "NCCL wins there"
    times = [model.all_reduce_us(size, 8) for size in (100, 8192, 20000, 262144, 1 << 20, 1 << 24)]
    for smaller, larger in zip(times, times[1:], strict=False):
        assert smaller.fast <= larger.fast
        assert smaller.slow < larger.slow
    assert all(time.fast < time.slow for time in times)


def test_the_fixed_cost_is_where_the_line_meets_no_bytes() -> None:
    assert model.intercept([(1, 1.5), (2, 2.0), (4, 3.0)]) == pytest.approx(1.0)
    assert 0 < model.gemm_us().fast < model.gemm_us().slow
    assert model.experts_us().slow == pytest.approx(27.7 - 14.155776 / (1597 * 1628 / 1792) * 1e3)


def test_a_report_outside_the_prediction_is_called_so() -> None:
    predicted = Ends(fast=200.0, slow=100.0)
    assert tables.verdict(90, predicted) == "10% below the slow end"
    assert tables.verdict(150, predicted) == "inside"
    assert tables.verdict(250, predicted) == "25% above the fast end"


def test_the_server_that_was_measured_is_predicted_from_its_own_sizes() -> None:
    found = {term.name: term for term in model.terms(Case(model.SERVING, "h200", context=256))}
    layer = 6144 * 4096 + 4096 * 4096 + 24576 * 4096 + 4096 * 12288
    size = 36 * layer * 0.5625 + 151936 * 4096 * 2 + 36 * 2 * 8 * 128 * 2 * 256
    assert found["bytes"].ms.fast == pytest.approx(size / (4800 * model.BANDWIDTH_SHARE) / 1e6, rel=2e-3)
    assert found["dense GEMMs"].arithmetic.startswith(f"{36 * 4 + 1} x ")
    assert tables.verdict(1 / 20.0, Ends(fast=10.0, slow=16.0).inverse()) == "20% below the slow end"
