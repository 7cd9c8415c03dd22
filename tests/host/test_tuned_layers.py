"""SGLang's own linear methods under ``sm120_tuned``: each M reaches the backend that the tuning table names for it.

The kernels of ``sm120`` run emulated. FlashInfer is a stand-in that checks what it is given and lets the oracle
multiply: which backend is called, with which operands, is what is tested here.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sglang.srt.layers.quantization.compressed_tensors.schemes
import sglang.srt.layers.quantization.modelopt_quant  # noqa: F401 - both before the stand-in is there
import torch

from cpu_host.kernels import build
from cpu_host.kernels.library import EmulatedLibrary
from sglang_sm120 import env, native, ops, reference
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.dispatch import untuned
from sglang_sm120.errors import BackendError, ConfigError, UnsupportedError
from sglang_sm120.host import ranks, tuning
from sglang_sm120.host.state import STATE
from sglang_sm120.host.tuning import Tuning
from sglang_sm120.layout import ScaleLayout
from sglang_sm120.probing.operations import of_subject
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import backend, first_calls
from sglang_sm120.tuning.choice import Timing, choose
from sglang_sm120.tuning.results import Entry
from sglang_sm120.tuning.table import TuningTable
from sglang_sm120.verification import failed_file, failed_replay, replay
from sglang_sm120.verification.failed_file import DenseFacts
from tests.dispatch.machines import RTX, machine
from tests.host.conftest import Serving
from tests.host.linear_layers import Case, make_case
from tests.support.nvfp4 import fresh_generator, random_activation, random_nvfp4_weight

KINDS = ["modelopt", "compressed-tensors"]
N, K = 64, 128
FACTS = replace(machine(RTX), probed={"sm120": "ok"})
#: Microseconds by measured M: ours for few rows, the oracle for some, FlashInfer's for many.
TIMES: dict[int, dict[str, float]] = {
    1: {"sm120": 1, "torch_reference": 9, "flashinfer_cutlass": 4},
    8: {"sm120": 1, "torch_reference": 9, "flashinfer_cutlass": 4},
    16: {"sm120": 5, "torch_reference": 1, "flashinfer_cutlass": 4},
    32: {"sm120": 9, "torch_reference": 5, "flashinfer_cutlass": 2, "flashinfer_b12x": 1},
}


def seeded() -> torch.Generator:
    """For two layers with the same weights."""
    return torch.Generator().manual_seed(5)


def entries(n: int, k: int, times: dict[int, dict[str, float]], dtype: str = "bfloat16") -> list[Entry]:
    found = []
    for m, by_value in times.items():
        timings = {value: Timing(t, t, t) for value, t in by_value.items()}
        found.append(Entry(n, k, dtype, m, choose(timings), timings))
    return found


def table_of(*found: Entry, facts: HostFacts = FACTS) -> TuningTable:
    return TuningTable(identity_of(facts), {entry.key: entry for entry in found}, {}, "now", "sglang-sm120 tune x")


def tune(serving: Serving, *found: Entry, facts: HostFacts = FACTS) -> Tuning:
    """Put this process into the state of a server with ``sm120_tuned`` and this table."""
    serving.decide("sm120_tuned", facts=facts)
    STATE.tuning = Tuning(facts, table_of(*found, facts=facts), "", untuned(facts, allow_unsafe=False))
    return STATE.tuning


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    return EmulatedLibrary(build.library_path())


@pytest.fixture(autouse=True)
def fresh(library: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "_library", lambda device: (library, True))
    backend.forget_plans()
    yield
    backend.forget_plans()


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for FlashInfer; the list of backends that it was asked for, once for each product."""
    asked: list[str] = []

    def fp4_quantize(x: torch.Tensor, scale: torch.Tensor, *, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        assert scale.numel() == 1
        return reference.quantize(x, scale, ScaleLayout.SWIZZLE_128X4)

    def mm_fp4(a: Any, b: Any, a_sf: Any, b_sf: Any, alpha: Any, out_dtype: Any, *, backend: str) -> torch.Tensor:
        asked.append(backend)
        assert b.T.is_contiguous()
        assert b_sf.dtype == torch.float8_e4m3fn
        assert alpha.shape == ()
        assert b.shape[0] % 16 == 0
        assert b.shape[1] % 32 == 0
        return reference.gemm(a, b.T, a_sf, b_sf.T.view(torch.uint8), alpha, out_dtype)

    module, tuner = ModuleType("flashinfer"), ModuleType("flashinfer.autotuner")
    vars(module).update(fp4_quantize=fp4_quantize, mm_fp4=mm_fp4)
    vars(tuner).update(autotune=lambda on: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.autotuner", tuner)
    return asked


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of our two backends multiplied, in order."""
    from sglang_sm120.backends import torch_reference

    seen: list[str] = []
    for name, module in (("sm120", native), ("torch_reference", torch_reference)):
        for function in ("linear", "gemm"):
            original = getattr(module, function)

            def noted(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> torch.Tensor:
                if not (_name == "sm120" and seen[-1:] == ["sm120 linear"]):  # its linear calls its gemm
                    seen.append(f"{_name} linear" if len(args) == 6 else _name)
                out: torch.Tensor = _original(*args, **kwargs)
                return out

            monkeypatch.setattr(module, function, noted)
    return seen


def named(serving: Serving, value: str, kind: str, **options: Any) -> Case:
    """The same layer as :func:`layer` makes, served by one value for every M."""
    serving.decide(value, facts=FACTS)
    STATE.tuning = None
    return make_case(kind, K, [N], seeded(), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_m_reaches_its_backend_bit_for_bit(
    serving: Serving, kind: str, dtype: torch.dtype, calls: list[str]
) -> None:
    """As if that backend had been named: what the choice adds changes no bit."""
    explicit = {value: named(serving, value, kind, dtype=dtype) for value in ("sm120", "torch_reference")}
    ours = {m: {v: t for v, t in times.items() if "flashinfer" not in v} for m, times in TIMES.items()}
    tune(serving, *entries(N, K, ours, str(dtype).removeprefix("torch.")))
    case = make_case(kind, K, [N], seeded(), dtype=dtype)
    generator = fresh_generator()
    bias = torch.randn(N, generator=generator).to(dtype)
    reached = {1: "sm120", 5: "sm120", 8: "sm120", 9: "torch_reference", 32: "torch_reference", 33: "torch_reference"}
    for m, value in reached.items():
        x = random_activation(m, K, dtype, generator)
        calls.clear()
        out = case.run(x, bias)
        assert calls == [f"{value} linear"]
        assert torch.equal(out, explicit[value].run(x, bias)), m


@pytest.mark.parametrize("kind", KINDS)
def test_flashinfers_kernels_get_what_they_need(serving: Serving, kind: str, flashinfer: list[str]) -> None:
    exact = named(serving, "torch_reference", kind)
    tune(serving, *entries(N, K, TIMES))
    case = make_case(kind, K, [N], seeded())
    flashinfer.clear()
    generator = fresh_generator()
    x = random_activation(20, K, torch.bfloat16, generator)
    bias = torch.randn(N, generator=generator).to(torch.bfloat16)
    assert torch.equal(case.run(x), exact.run(x))
    # Added after rounding, as SGLang does for these kernels.
    assert torch.equal(case.run(x, bias), exact.run(x) + bias)
    case.run(x[:1])
    assert flashinfer == ["b12x", "b12x"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_is_called_once_while_weights_load(serving: Serving, kind: str, flashinfer: list[str]) -> None:
    """What compiles or tunes itself does so then; a second layer of the shape adds nothing."""
    tune(serving, *entries(N, K, {32: {"flashinfer_b12x": 1}, 64: {"flashinfer_cutlass": 1}}))
    for _ in range(2):
        make_case(kind, K, [N], fresh_generator())
    assert flashinfer == ["cutlass", "b12x"]


def test_a_rejected_quantizer_of_flashinfer_is_replaced(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(serving, *entries(N, K, {1: {"flashinfer_b12x": 1}}))
    STATE.quantizer_rejected, STATE.quantizer = True, "sm120"
    broken = sys.modules["flashinfer"]
    monkeypatch.setattr(broken, "fp4_quantize", lambda *_, backend: pytest.fail("the rejected quantizer was called"))
    case = make_case("modelopt", K, [N], fresh_generator())
    case.run(torch.ones(1, K, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", [None, [0.002, 0.004]])
def test_fused_shards_of_different_scales_go_to_exact_backends(
    serving: Serving, kind: str, inputs: list[float] | None, flashinfer: list[str], calls: list[str]
) -> None:
    """One alpha for all columns would be wrong. Shards that are multiplied one by one have one each."""
    times = {1: {"flashinfer_cutlass": 1.0, "torch_reference": 5.0, "sm120": 9.0}}
    tune(serving, *entries(2 * N, K, times), *entries(N, K, times))
    case = make_case(kind, K, [N, N], fresh_generator(), same_scales=False, input_decode=inputs)
    flashinfer.clear()
    calls.clear()
    x = random_activation(3, K, torch.bfloat16, fresh_generator())
    out, expected = case.run(x), case.expected(x)
    assert float((out - expected).abs().max()) <= 2.0**-8 * float(expected.abs().max())
    assert flashinfer == (["cutlass", "cutlass"] if inputs else [])
    assert calls == ([] if inputs else ["torch_reference linear"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_that_was_not_measured_is_served_and_named_once(
    serving: Serving, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    facts = HostFacts(None, {"torch": "2.13.0"})
    tuned = tune(serving, *entries(N, K, {1: {"torch_reference": 1}}), facts=facts)
    assert tuned.untuned.backend == "torch_reference"
    with caplog.at_level(logging.INFO, "sglang_sm120"):
        for _ in range(2):
            case = make_case(kind, 2 * K, [N], fresh_generator())
    assert case.layer.sm120_prepared.backend == "torch_reference"
    assert caplog.text.count(f"no entry for N={N} K={2 * K}") == 1


def test_unmeasured_and_ragged_shapes_on_a_card_go_sglangs_own_way(serving: Serving) -> None:
    """On SM12x auto takes FlashInfer, for which SGLang pads; the table's FlashInfer entries are for padded shapes."""
    tuned = tune(serving, *entries(64, 96, {1: {"flashinfer_b12x": 1}}))
    assert tuned.untuned.backend == "flashinfer_cutlass"
    assert tuned.flashinfer_name == "cutlass"
    plan = {"one_alpha": True, "quantizer": None, "device": torch.device("cpu")}
    assert not tuned.plan_layer("a", [64], 128, torch.bfloat16, **plan)
    assert not tuned.plan_layer("b", [64], 80, torch.bfloat16, **plan)
    assert not tuned.plan_layer("c", [40], 96, torch.bfloat16, **plan)
    assert tuned.plan_layer("d", [64], 96, torch.bfloat16, **plan)


def test_a_ragged_shape_is_served_by_a_kernel_that_takes_it(serving: Serving, flashinfer: list[str]) -> None:
    tune(serving, *entries(64, 96, {1: {"flashinfer_b12x": 1, "sm120": 5}}))
    case = make_case("modelopt", 80, [40], fresh_generator())
    x = random_activation(2, 80, torch.bfloat16, fresh_generator())
    expected = case.expected(x)
    assert float((case.run(x) - expected).abs().max()) <= 2.0**-7 * float(expected.abs().max())
    assert flashinfer == []


@pytest.mark.parametrize("m", [0, 1, 9, 40])
def test_quantized_inputs_are_multiplied_by_the_same_choice(serving: Serving, m: int) -> None:
    tune(serving, *entries(N, K, TIMES))
    case = make_case("modelopt", K, [N], fresh_generator())
    x = random_activation(m, K, torch.bfloat16, fresh_generator())
    scale = case.layer.input_scale_inv.data
    quantize = native.quantize if m <= 8 else lambda *a: reference.quantize(x, scale, ScaleLayout.SWIZZLE_128X4)
    packed, scales = quantize(x, scale, True)
    assert torch.equal(case.run((packed, scales)), case.run(x))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_reload_into_the_same_memory(serving: Serving, kind: str) -> None:
    tune(serving, *entries(N, K, TIMES))
    generator = fresh_generator()
    case = make_case(kind, K, [N], generator)
    addresses = {name: p.data_ptr() for name, p in case.layer.named_parameters()}
    case.load([random_nvfp4_weight(N, K, generator)])
    case.prepare()
    assert {name: p.data_ptr() for name, p in case.layer.named_parameters()} == addresses
    explicit = named(serving, "sm120", kind)
    explicit.load(case.shards)
    explicit.prepare()
    x = random_activation(4, K, torch.bfloat16, generator)
    assert torch.equal(case.run(x), explicit.run(x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reload_that_needs_other_kernels_is_refused(serving: Serving, kind: str) -> None:
    tune(serving, *entries(2 * N, K, {1: {"torch_reference": 1}}))
    generator = fresh_generator()
    case = make_case(kind, K, [N, N], generator)
    case.load([random_nvfp4_weight(N, K, generator) for _ in range(2)])
    with pytest.raises(ConfigError, match="Restart the server"):
        case.prepare()


def test_a_backend_that_refuses_its_first_call_is_replaced_before_it_serves(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flashinfer: list[str]
) -> None:
    def mm_fp4(*args: Any, backend: str) -> torch.Tensor:
        raise ValueError("no kernel for this shape")

    monkeypatch.setattr(sys.modules["flashinfer"], "mm_fp4", mm_fp4)
    tune(serving, *entries(N, K, TIMES))
    with caplog.at_level(logging.INFO, "sglang_sm120"):
        make_case("modelopt", K, [N], fresh_generator())
    assert (
        "flashinfer_b12x does not serve N=64 K=128 bfloat16: ValueError: no kernel for this shape (M=32)" in caplog.text
    )
    assert "M<=8 sm120, above torch_reference (results of a token depend on M: not batch-invariant)" in caplog.text


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(RuntimeError("CUDA error: misaligned address"), BackendError), (UnsupportedError("no kernel"), UnsupportedError)],
)
def test_an_error_while_serving_names_backend_layer_and_shape_and_is_kept_once(
    raised: Exception, kind: type[Exception], serving: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The backend is the one that was chosen, also where the error is of a type that others would wrap."""
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    tune(serving, *entries(N, K, TIMES))
    case = make_case("modelopt", K, [N], fresh_generator())
    library = native._library

    def fails(device: object) -> None:
        raise raised

    monkeypatch.setattr(native, "_library", fails)
    with pytest.raises(kind) as seen:
        case.run(torch.ones(2, K, dtype=torch.bfloat16))
    named = r"sm120, which sm120_tuned chose for M=2, failed in Module \(N=64\), M=2 N=64 K=128: \w+: .* replay (\S+)"
    told = re.fullmatch(named, str(seen.value))
    assert told, str(seen.value)
    (path,) = (tmp_path / "cache" / failed_file.FOLDER).iterdir()
    assert told[1] == str(path)
    kept = replay.read(path)
    assert (kept.backend, kept.layer, kept.identity) == ("sm120", "Module (N=64)", identity_of(FACTS))
    assert kept.call == DenseFacts("linear", 2, (N,), K, "bfloat16", one_alpha=True, bias=False)
    monkeypatch.setattr(native, "_library", library)
    for _, step in failed_replay.steps(of_subject("sm120"), {"path": str(path)}, torch.device("cpu")):
        step()  # would raise


def test_a_cuda_error_of_a_first_call_ends_the_process_and_is_kept(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It shows when the device is waited for, not in the call."""
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    wait = first_calls._wait
    monkeypatch.setattr(first_calls, "_wait", lambda _: wait(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    tune(serving, *entries(N, K, {8: {"sm120": 1}}))
    failed = r"sm120, called while weights load, failed in Module \(N=64\), M=8 N=64 K=128: .*illegal memory"
    with pytest.raises(BackendError, match=failed) as seen:
        make_case("modelopt", K, [N], fresh_generator())
    kept = replay.read(Path(str(seen.value).rpartition(" ")[2]))
    assert (kept.backend, kept.call) == ("sm120", DenseFacts("linear", 8, (N,), K, "bfloat16", True, bias=False))


def broken(device: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_one_graph_of_torch_compile_serves_every_m(serving: Serving, calls: list[str]) -> None:
    """M is a symbol while it is traced; the choice is made inside the operator, for each call anew."""
    tune(serving, *entries(N, K, {8: {"sm120": 1}, 16: {"torch_reference": 1}}))
    case = make_case("modelopt", K, [N], fresh_generator())
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    layer = case.layer
    operands = [layer.weight, layer.sm120_weight_scale_0, layer.sm120_activation_scale[0], layer.sm120_alpha[0], None]
    compiled = torch.compile(
        lambda x: ops.nvfp4_linear(x, *operands, "sm120_tuned"), backend=count, dynamic=True, fullgraph=True
    )
    calls.clear()
    for m in (4, 12, 7):
        compiled(torch.ones(m, K, dtype=torch.bfloat16))
    assert calls == ["sm120 linear", "torch_reference linear", "sm120 linear"]
    assert len(graphs) == 1


def test_ranks_retire_together_what_one_cannot_use(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    others = iter([{"sm120": "no nvcc"}, {"flashinfer_b12x": "ValueError"}])  # at its start, and in its first calls
    monkeypatch.setattr(ranks, "gather", lambda ours: [ours, next(others, ours)])
    tuned = tune(serving, *entries(N, K, TIMES))
    with caplog.at_level(logging.INFO, "sglang_sm120"):
        make_case("modelopt", K, [N], fresh_generator())
    assert tuned.retired == {"sm120": "no nvcc"}
    plan = backend.plan_of((N, K, torch.bfloat16, True))
    assert plan is not None
    assert plan.choices == {
        1: "flashinfer_cutlass",
        8: "flashinfer_cutlass",
        16: "torch_reference",
        32: "flashinfer_cutlass",
    }


def test_what_the_start_cannot_load_or_the_probe_rejects_is_retired(
    monkeypatch: pytest.MonkeyPatch, serving: Serving
) -> None:
    def start(device: torch.device) -> None:
        raise UnsupportedError("no CUDA compiler")

    facts = replace(FACTS, probed={"flashinfer_b12x": "wrong"})
    monkeypatch.setattr(native, "start", start)
    monkeypatch.setattr(tuning.table, "find", lambda _: (table_of(*entries(N, K, TIMES), facts=facts), ""))
    tuned = tuning.start(facts, torch.device("cpu"), allow_unsafe=False)
    assert tuned.retired == {"sm120": "no CUDA compiler", "flashinfer_b12x": "probe says wrong"}
    assert "4 shapes" not in tuned.reason
    assert "1 shapes, else flashinfer_cutlass" in tuned.reason
