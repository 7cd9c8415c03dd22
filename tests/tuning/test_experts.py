"""Experts in ``bench`` and ``tune``: what is measured, how it is called, kept, shown, and what a table makes of it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from sglang_sm120 import device, ops
from sglang_sm120.cli import bench, bench_report
from sglang_sm120.cli import tune as room
from sglang_sm120.errors import ConfigError, RecordError
from sglang_sm120.models.source import presets
from sglang_sm120.probing import expert_operations, record
from sglang_sm120.probing.record import Outcome
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import expert_timing, results, run, table, timing
from sglang_sm120.tuning.choice import Timing
from sglang_sm120.tuning.expert_cases import ExpertShape, experts_of_model, read_experts
from sglang_sm120.tuning.expert_timing import ExpertsMeasured
from sglang_sm120.tuning.limits import expert_floor
from sglang_sm120.tuning.results import ExpertEntry
from sglang_sm120.tuning.timing import CompileBudget
from tests.dispatch.machines import RTX, machine

pytestmark = pytest.mark.usefixtures("here")

SMALL = ExpertShape(8, 8, 2, 64, 32)
BUDGET = CompileBudget(600.0)


def wish(**changes: Any) -> bench.Wish:
    asked = {"model": None, "shapes": (), "tp": 1, "rows": "1,3", "backends": (), "dtype": "bfloat16"}
    return bench.Wish(**{"compile_budget": 600.0, "experts": ("8x2x64x32",), **asked, **changes})


@pytest.mark.parametrize(
    ("tp", "ep", "expected"),
    [
        (1, 1, ExpertShape(512, 512, 10, 4096, 1024)),
        (8, 1, ExpertShape(512, 512, 10, 4096, 128)),
        (8, 8, ExpertShape(512, 64, 10, 4096, 1024)),
        (8, 2, ExpertShape(512, 256, 10, 4096, 256)),
    ],
)
def test_the_experts_of_a_model_are_divided_as_sglang_divides_them(tp: int, ep: int, expected: ExpertShape) -> None:
    (found,) = experts_of_model("nvidia/Qwen3.5-397B-A17B-NVFP4", tp, ep)
    assert found.key == expected.key
    assert found.layers == ("mlp.experts",)
    assert experts_of_model("nvidia/Qwen3-32B-NVFP4", 1, 1) == []


def test_experts_of_every_preset_are_whole_layers() -> None:
    shapes = [shape for preset in presets() for shape in experts_of_model(preset, 1, 1)]
    assert len(shapes) >= 3
    assert all(s.local == s.experts and 0 < s.top_k < s.experts and s.hidden % 16 == s.inner % 16 == 0 for s in shapes)


def test_ranks_that_cannot_share_the_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="--ep=3"):
        read_experts(["8x2x16x16"], 3)


def test_geometries_are_read_as_they_are_written_and_padded_as_sglang_pads_them() -> None:
    assert read_experts(["256x8x2048x512", "128x6x2688x1856:relu2"], 2) == [
        ExpertShape(256, 128, 8, 2048, 512),
        ExpertShape(128, 64, 6, 2688, 1920, "relu2"),
    ]


@pytest.mark.parametrize(
    "text", ["8x2x64", "8x9x64x32", "8x0x64x32", "8x2x60x32", "8x2x64x40", "8x2x64x32:gelu", "x", ""]
)
def test_a_bad_geometry_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--experts="):
        read_experts([text], 1)


def test_the_bytes_of_the_limit_are_those_of_the_active_experts() -> None:
    shape, limits = ExpertShape(512, 64, 10, 4096, 1024), {"bytes_per_second": 1e12}
    one = 10 * 64 / 512 * 3 * 4096 * 1024 * 0.5625 + 4 * 4096
    assert expert_floor(1, shape, limits) == (pytest.approx(one / 1e6), "DRAM")
    everything = 64 * 3 * 4096 * 1024 * 0.5625 + 4 * 8192 * 4096
    assert expert_floor(8192, shape, limits) == (pytest.approx(everything / 1e6), "DRAM")
    flops = 2 * 8192 * 10 / 8 * 3 * 4096 * 1024
    assert expert_floor(8192, shape, {**limits, "fp4_per_second": 1e14}) == (pytest.approx(flops / 1e8), "FP4")
    assert expert_floor(1, shape, {}) is None


def test_real_times_of_this_cpu_are_kept_shown_and_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session = bench.measure(wish(shapes=("32x32",)), again=False, quiet=True)
    dense, experts = session.results[:2], session.results[2:]
    assert [result.shape.key for result in dense] == [(32, 32)] * 2
    assert [(result.m, result.shape.key) for result in experts] == [(1, SMALL.key), (3, SMALL.key)]
    for result in experts:
        assert isinstance(result.entry, ExpertEntry)
        assert result.entry.timings["torch_reference"].low > 0
        assert result.entry.launches == {}, "kernels of a GPU are counted there only"
    assert session.left_out_runners["sm120"] == "needs a CUDA device"
    assert session.expert_compile_seconds["torch_reference"] > 0
    data = bench_report.report(session)
    assert json.loads(json.dumps(data)) == data
    assert data["cases"][3]["active_experts"] == pytest.approx(8 * (1 - 0.75**3), abs=0.01)
    console = Console(file=io.StringIO(), width=200)
    bench_report.render(data, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "8 experts, top 2, H=64 I=32 silu",
        "N=32 K=32",
        "left out for experts: sm120",
        "first calls of experts",
    ):
        assert part in text
    monkeypatch.setattr(expert_timing, "measure", lambda *_: pytest.fail("measured again"))
    again = bench.measure(wish(shapes=("32x32",)), again=False, quiet=True)
    assert [result.entry for result in again.results] == [result.entry for result in session.results]


def test_launches_are_shown_with_the_runner_that_makes_them() -> None:
    session = bench.measure(wish(rows="1"), again=False, quiet=True)
    case = bench_report.report(session)["cases"][0]
    case["launches"] = {"torch_reference": 7}
    console = Console(file=io.StringIO(), width=200)
    bench_report.render(
        {**bench_report.report(session), "cases": [case, {**case, "launches": {"torch_reference": 9}}]}, console
    )
    assert "launches of one layer: torch_reference 7 to 9" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("backends", "text"),
    [
        (("flashinfer_cudnn",), "--backend='flashinfer_cudnn'"),
        (("sm120",), "sglang-sm120 probe first"),
        (("marlin",), "'marlin'"),
    ],
)
def test_a_backend_that_serves_no_experts_is_refused_by_name(backends: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        bench.measure(wish(backends=backends), again=False, quiet=True)


def test_only_runners_that_passed_their_probe_of_experts_are_measured() -> None:
    facts = machine(RTX)
    facts.probed.update({"sm120": "ok", "flashinfer_cutlass": "ok"})
    facts.probed_experts.update({"flashinfer_cutlass": "ok", "sm120": "wrong"})
    taken, left_out = run.expert_candidates([], facts)
    assert taken == ["flashinfer_cutlass"]
    assert left_out == {
        "sm120": "probe says wrong",
        "flashinfer_b12x": "not probed on this card and these versions",
        "torch_reference": "not probed on this card and these versions",
    }


@pytest.mark.parametrize("shape", [SMALL, ExpertShape(8, 4, 2, 64, 32, "relu2")])
def test_calls_take_every_expert_in_turn(shape: ExpertShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an expert would be read from the cache, and every time would flatter."""
    seen: list[torch.Tensor] = []

    def moe(hidden: torch.Tensor, ids: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(ids)
        return hidden

    monkeypatch.setattr(ops, "moe_implementation", lambda runner: SimpleNamespace(moe=moe))
    found = expert_timing.measure(["torch_reference"], 1, shape, torch.bfloat16, torch.device("cpu"), BUDGET)
    assert found.problems == {}
    assert all(len(set(ids[0].tolist())) == shape.top_k for ids in seen), "a token has distinct experts"
    assert {int(i) for ids in seen for i in ids.flatten()} >= set(range(shape.local))
    # Of the batches in their order; how many calls a repeat has depends on the speed of the machine.
    batches = expert_timing._Data(1, shape, torch.bfloat16, torch.device("cpu")).batches
    here = [{i for i in ids.flatten().tolist() if i < shape.local} for _, ids, _ in batches]
    assert all(a.isdisjoint(b) for a, b in zip(here, here[1:], strict=False))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ExpertShape]]:
    """The cases that are measured; sm120 wins up to 16 tokens and FlashInfer beyond, in times that are made up."""
    seen: list[tuple[int, ExpertShape]] = []
    facts = machine(RTX)

    def fake(values: list[str], m: int, shape: ExpertShape, *rest: object) -> ExpertsMeasured:
        seen.append((m, shape))
        times = {"sm120": float(m), "flashinfer_cutlass": 18.0 if m < 24 else m / 2}
        return ExpertsMeasured({v: Timing(times[v], times[v], times[v]) for v in values}, {}, dict.fromkeys(values, 2))

    monkeypatch.setattr(expert_timing, "measure", fake)
    monkeypatch.setattr(device, "collect_facts", lambda: facts)
    monkeypatch.setattr(timing, "measure", lambda *_: pytest.fail("a dense layer"))
    passed = dict.fromkeys(("sm120", "flashinfer_cutlass", "torch_reference"), Outcome("ok", "test"))
    record.save(identity_of(facts), {}, passed)
    return seen


def test_tune_finds_the_crossover_and_says_which_flag_follows_it(counted: list[Any], tmp_path: Path) -> None:
    asked = wish(model="nvidia/Qwen3.5-397B-A17B-NVFP4", experts=(), tp=8, rows="1,16,24,64")
    tuned = room.tune(asked, tmp_path / "copy.json", again=False, quiet=True)
    assert tuned.table is not None
    (shape,) = tuned.session.shapes
    assert isinstance(shape, ExpertShape)
    runners = tuned.table.runners_by_rows(shape.key, "bfloat16", table.RUNNERS)
    assert runners == {1: "sm120", 16: "sm120", 24: "flashinfer_cutlass", 64: "flashinfer_cutlass"}
    assert table.read(tmp_path / "copy.json") == tuned.table
    assert tuned.table.runners == {"sm120", "flashinfer_cutlass"}, "the oracle wins nowhere and is not measured"
    console = Console(file=io.StringIO(), width=300)
    room.render(room.report(tuned), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "M<=16 sm120, above flashinfer_cutlass" in text
    assert "Start the server with --moe-runner-backend sm120_tuned\n" in text
    assert "launches of one layer: flashinfer_cutlass 2, sm120 2" in text


def test_tune_takes_over_what_bench_measured_of_more_runners(counted: list[Any]) -> None:
    """``bench`` times the oracle too and counts its launches; the table that ``tune`` makes of it can be read."""
    times = {value: Timing(1, 1, 1) for value in ("sm120", "flashinfer_cutlass", "torch_reference")}
    for m in (1, 3):
        entry = ExpertEntry(SMALL, "bfloat16", m, "flashinfer_cutlass", times, dict.fromkeys(times, 2))
        results.save(identity_of(machine(RTX)), [entry], [])
    tuned = room.tune(wish(), None, again=False, quiet=True)
    assert not counted, "nothing is measured again"
    assert table.read(tuned.written[0]) == tuned.table
    assert tuned.table is not None
    assert tuned.table.runners == {"sm120", "flashinfer_cutlass"}


def test_a_table_keeps_dense_shapes_and_experts_apart(counted: list[Any]) -> None:
    room.tune(wish(), None, again=False, quiet=True)
    facts = machine(RTX)
    dense = results.Entry(32, 32, "bfloat16", 1, "sm120", {"sm120": Timing(1, 1, 1)})
    made = table.save(identity_of(facts), [dense], [])
    assert list(made.dense) == [dense.key]
    assert sorted(made.experts) == [(SMALL.key, "bfloat16", 1), (SMALL.key, "bfloat16", 3)]
    other = ExpertEntry(SMALL, "bfloat16", 5, "sm120", {"sm120": Timing(1, 1, 1)})
    newer = table.save(identity_of(facts), [other], [])
    assert list(newer.experts) == [other.key], "experts that are measured again are replaced as a whole"
    assert list(newer.dense) == [dense.key]
    assert newer.digest != made.digest


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a case twice": (lambda v: v["experts"].append(v["experts"][0]), "repeats the case"),
    "a winner against its times": (lambda v: v["experts"][0].update(backend="flashinfer_cutlass"), "does not follow"),
    "a runner for whole servers only": (
        lambda v: v["experts"][0]["timings"].update(marlin=v["experts"][0]["timings"]["flashinfer_cutlass"]),
        "cannot be called",
    ),
    "itself": (
        lambda v: v["experts"][0]["timings"].update(sm120_tuned=v["experts"][0]["timings"]["sm120"]),
        "names 'sm120_tuned'",
    ),
    "more experts on a rank than there are": (lambda v: v["experts"][0].update(local=9), "local=9"),
    "an unknown activation": (lambda v: v["experts"][0].update(activation="gelu"), "activation='gelu'"),
    "launches of nobody": (lambda v: v["experts"][0]["launches"].update(os=1), "unknown fields: os"),
    "no launches": (lambda v: v["experts"][0]["launches"].update(sm120=0), "sm120=0"),
    "a field too many": (lambda v: v["experts"][0].update(run="x"), "unknown fields: run"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_entry_of_experts_is_refused(name: str, counted: list[Any]) -> None:
    tuned = room.tune(wish(), None, again=False, quiet=True)
    spoil, text = SPOILT[name]
    value = json.loads(tuned.written[0].read_text())
    spoil(value)
    tuned.written[0].write_text(json.dumps(value))
    with pytest.raises(RecordError, match=text):
        table.read(tuned.written[0])


def test_flashinfer_is_called_as_sglang_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where codes, scales and ranks go; the numbers are for a card."""
    given: dict[str, Any] = {}

    def cutlass_fused_moe(*, output: torch.Tensor, use_fused_finalize: bool = True, **rest: Any) -> list[torch.Tensor]:
        given.update(rest, fused=use_fused_finalize)
        return [output]

    kinds = SimpleNamespace(Swiglu="swiglu", Relu2="relu2")
    module = SimpleNamespace(cutlass_fused_moe=cutlass_fused_moe, ActivationType=kinds)
    monkeypatch.setattr(expert_operations.importlib, "import_module", lambda name: module)
    data = expert_timing._Data(3, ExpertShape(8, 4, 2, 64, 32), torch.bfloat16, torch.device("cpu"))
    layer, ids, weights = data.batches[0]
    out = expert_operations.of_runner("flashinfer_cutlass").moe(data.x, ids, weights, layer)
    assert out.shape == (3, 64)
    assert (given["fc1_expert_weights"].shape, given["fc2_expert_weights"].shape) == ((4, 64, 4), (4, 64, 2))
    assert given["fc1_expert_weights"].dtype == torch.int64
    kinds_of_scales = [(scale.dtype, scale.dim()) for scale in given["quant_scales"]]
    assert kinds_of_scales == [(torch.float32, 0), (torch.int32, 3), (torch.float32, 1)] * 2
    assert (given["ep_size"], given["ep_rank"], given["activation_type"], given["fused"]) == (2, 0, "swiglu", False)
    with pytest.raises(ConfigError, match="runner='marlin'"):
        expert_operations.of_runner("marlin")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [ExpertShape(16, 16, 4, 256, 128), ExpertShape(16, 4, 4, 256, 128, "relu2")])
def test_experts_are_timed_and_their_launches_counted_on_a_gpu(shape: ExpertShape) -> None:
    runners = ["sm120", "torch_reference"]
    found = expert_timing.measure(runners, 4, shape, torch.bfloat16, torch.device("cuda"), CompileBudget(600.0))
    assert found.problems == {}
    assert found.timings["torch_reference"].median > found.timings["sm120"].median > 1
    assert found.launches["sm120"] == 2
