"""A running server is checked: layers of the real SGLang, faults planted below the interface, steps and graphs."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import sglang.srt.layers.quantization.modelopt_quant as modelopt
import torch
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as ct

from cpu_host.kernels import build
from cpu_host.kernels.library import EmulatedLibrary
from sglang_sm120 import env, native, ops, reference
from sglang_sm120.backends import torch_reference
from sglang_sm120.errors import VerificationError
from sglang_sm120.host import watch_seams
from sglang_sm120.host.conventions import CONVENTIONS, EXPERT_CONVENTIONS
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.seams import SEAMS
from sglang_sm120.host.watch import Watcher
from sglang_sm120.tuning import backend as tuned
from sglang_sm120.verification import reproducer
from sglang_sm120.verification.coverage import Coverage
from tests.dispatch.machines import RTX, machine
from tests.host.conftest import Serving
from tests.host.linear_layers import Case, make_case
from tests.host.watching import watching
from tests.support.nvfp4 import fresh_generator, random_activation

Tensor = torch.Tensor
KINDS = ["modelopt", "compressed-tensors"]
BACKENDS = ["torch_reference", "sm120"]
IMPLEMENTATIONS = {"torch_reference": torch_reference, "sm120": native}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    return EmulatedLibrary(build.library_path())


@pytest.fixture(params=BACKENDS)
def backend(
    request: pytest.FixtureRequest, serving: Serving, library: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setattr(native, "_library", lambda device: (library, True))
    name: str = request.param
    serving.decide(name, facts=machine(RTX))
    return name


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Watcher]:
    with watching(monkeypatch) as watcher:
        yield watcher


# --- off ---------------------------------------------------------------------------------------------------------


def test_nothing_of_it_is_in_a_call_that_nobody_asked_to_check(backend: str) -> None:
    """Counted are Python's own frames, from SGLang's method down to the backend."""
    assert watch_seams.seams_in_force() is SEAMS
    case = make_case("modelopt", 64, [32], fresh_generator())
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    files: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        case.run(x)
    finally:
        sys.setprofile(None)
    assert any(name.endswith("host/patches_linear.py") for name in files)
    assert not [name for name in files if "sglang_sm120/host/watch" in name or "sglang_sm120/verification" in name]


@pytest.mark.parametrize(("name", "value"), [(env.VERIFY, "8"), (env.REPORT, "/home/ann/served.json")])
def test_the_seams_are_there_when_asked_for(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert watch_seams.seams_in_force() == (*SEAMS, *watch_seams.WATCH_SEAMS)


# --- layers of ours ------------------------------------------------------------------------------------------------


def test_layers_that_nobody_named_count_each_for_itself(backend: str, watcher: Watcher) -> None:
    """Loaders other than SGLang's default one tell no places, and a model has many layers of one size."""
    generator = fresh_generator()
    cases = [make_case("modelopt", 64, [32], generator) for _ in range(2)]
    for case in (*cases, *cases):
        case.run(random_activation(3, 64, torch.bfloat16, generator))
    assert (watcher.coverage.seen, watcher.coverage.checked, watcher.coverage.products) == (2, 2, 2)
    assert [case.layer.sm120_name for case in cases] == ["Module (N=32)", "Module (N=32) number 2"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("k", "widths", "inputs"),
    [(128, [64], None), (144, [40, 24], None), (64, [32, 16, 8], [0.002, 0.004, 0.001])],
)
def test_right_layers_pass_and_count(
    kind: str, k: int, widths: list[int], inputs: list[float] | None, backend: str, watcher: Watcher
) -> None:
    generator = fresh_generator()
    case = make_case(kind, k, widths, generator, same_scales=False, input_decode=inputs)
    case.layer.sm120_name = "model.layers.0.x"  # type: ignore[assignment]
    bias = torch.randn(sum(widths), generator=generator).to(torch.bfloat16)
    for m in (1, 5, 5, 140):
        case.run(random_activation(m, k, torch.bfloat16, generator), bias)
    assert (watcher.coverage.seen, watcher.coverage.checked) == (3, 3)
    assert watcher.coverage.products == 3  # outside of steps each M once
    assert case.run(torch.ones(0, k, dtype=torch.bfloat16)).shape == (0, sum(widths))
    assert watcher.coverage.seen == 3


def test_a_quantized_input_and_one_of_more_dimensions_are_checked(backend: str, watcher: Watcher) -> None:
    generator = fresh_generator()
    case = make_case("modelopt", 128, [64], generator)
    x = random_activation(6, 128, torch.bfloat16, generator)
    case.run(ops.nvfp4_quantize(x, case.layer.input_scale_inv.data, True, backend))
    case.run(x[:4].view(2, 2, 128))
    assert watcher.coverage.checked == 2


def _wrong_tile(m: int, out: Tensor) -> Tensor:
    out = out.clone()
    out[:, 8:16] = out[:, :8]
    return out


def _stale_rows(m: int, out: Tensor) -> Tensor:
    out = out.clone()
    out[1:] = out[:1]
    return out


#: What a backend of ours does to a right result, the M for which it shows, and what the message says.
FAULTS: dict[str, tuple[Callable[[int, Tensor], Tensor], str]] = {
    "a wrong tile": (_wrong_tile, "in rows 0 to 8"),
    "stale rows": (_stale_rows, "in rows 1 to 8"),
    "NaN": (lambda m, out: torch.full_like(out, torch.nan), "max error nan"),
    "zeros": (lambda m, out: torch.zeros_like(out), "(zeros)"),
    "a doubled scale": (lambda m, out: out * 2, "a wrong global scale"),
    "only M=9": (lambda m, out: -out if m == 9 else out, "M=9"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_below_the_operator_ends_the_server_and_is_kept(
    kind: str, fault: str, backend: str, watcher: Watcher, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, text = FAULTS[fault]
    right = IMPLEMENTATIONS[backend].linear
    generator = fresh_generator()
    case = make_case(kind, 64, [24, 16], generator)
    case.layer.sm120_name = "model.layers.7.mlp.gate_up_proj"  # type: ignore[assignment]
    x = random_activation(9, 64, torch.bfloat16, generator)
    case.run(x[:4])
    monkeypatch.setattr(IMPLEMENTATIONS[backend], "linear", lambda *a: spoil(a[0].shape[0], right(*a)))
    with pytest.raises(VerificationError) as raised:
        case.run(x)
    message = str(raised.value)
    for part in ("model.layers.7.mlp.gate_up_proj (Module, linear M=9 N=40 K=64)", f"served by {backend}", text):
        assert part in message
    folder = cache / reproducer.FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    path = Path(message.rpartition("sglang-sm120 replay ")[2])
    kept = reproducer.read(path)
    assert (kept.backend, kept.layer, kept.call.m) == (backend, "model.layers.7.mlp.gate_up_proj", 9)
    assert torch.equal(kept.call.operands["x"], x)
    assert str(cache) not in path.read_text()


def test_under_a_tuning_table_the_backend_of_this_m_is_judged_and_named(
    serving: Serving, library: EmulatedLibrary, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_library", lambda device: (library, True))
    serving.decide("sm120", facts=machine(RTX))
    generator = fresh_generator()
    case = make_case("modelopt", 64, [32], generator, same_scales=False)
    case.layer.sm120_prepared = replace(case.layer.sm120_prepared, backend="sm120_tuned")  # type: ignore[arg-type, assignment]
    tuned.add_plan((32, 64, torch.bfloat16, False), tuned.make_plan({1: "torch_reference", 8: "sm120"}, None))
    try:
        for m in (1, 9):
            case.run(random_activation(m, 64, torch.bfloat16, generator))
        assert watcher.coverage.checked == 2
        right = native.linear
        monkeypatch.setattr(native, "linear", lambda *a: right(*a) * 2)
        tuned.forget_plans()
        tuned.add_plan((32, 64, torch.bfloat16, False), tuned.make_plan({1: "torch_reference", 8: "sm120"}, None))
        watcher.coverage = Coverage()
        case.run(random_activation(1, 64, torch.bfloat16, generator))
        with pytest.raises(VerificationError, match="served by sm120, is wrong"):
            case.run(random_activation(9, 64, torch.bfloat16, generator))
    finally:
        tuned.forget_plans()


def test_a_case_that_cannot_be_kept_is_reported_all_the_same(
    backend: str, watcher: Watcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "file" / "below"))
    case = make_case("modelopt", 64, [32], fresh_generator())
    monkeypatch.setattr(IMPLEMENTATIONS[backend], "linear", lambda *a: torch.zeros(2, 32, dtype=torch.bfloat16))
    with pytest.raises(VerificationError, match="It could not be kept: SGLANG_SM120_CACHE_DIR"):
        case.run(torch.ones(2, 64, dtype=torch.bfloat16))


def test_a_weight_only_layer_is_seen_and_not_counted_as_checked(serving: Serving, watcher: Watcher) -> None:
    serving.decide("torch_reference")
    case = make_case("modelopt, weight-only", 64, [32], fresh_generator())
    case.run(torch.ones(2, 64, dtype=torch.bfloat16))
    assert (watcher.coverage.seen, watcher.coverage.checked) == (1, 0)
    assert "not checked: 1 calls (torch_reference: its input is not quantized)" in watcher.coverage.text


# --- FlashInfer's path ---------------------------------------------------------------------------------------------


class FlashInfer:
    """Stands in for the library: the oracle, and what a test does to its results."""

    def __init__(self) -> None:
        self.spoil_product: Callable[[Tensor], Tensor] = lambda out: out
        self.spoil_codes: Callable[[Tensor], Tensor] = lambda codes: codes

    def mm_fp4(
        self, a: Tensor, b: Tensor, a_sf: Tensor, b_sf: Tensor, alpha: Tensor, dtype: torch.dtype, *, backend: str
    ) -> Tensor:
        out = reference.gemm(a, b.T.contiguous(), a_sf, b_sf.T.contiguous(), alpha, dtype)
        return self.spoil_product(out)

    def fp4_quantize(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = reference.quantize(x, scale)
        return self.spoil_codes(codes), scales


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, serving: Serving) -> FlashInfer:
    """Lets SGLang's own path run on this machine. Comes before the watcher, which wraps what is in place."""
    library = FlashInfer()
    serving.decide("flashinfer_cutlass", facts=machine(RTX))
    blackwell = SimpleNamespace(is_blackwell=True, is_sm120=True, is_sm100=False)
    monkeypatch.setattr(modelopt, "flashinfer_fp4_gemm", library.mm_fp4)
    monkeypatch.setattr(modelopt, "get_platform", lambda: blackwell)
    monkeypatch.setattr(Tensor, "cuda", lambda self, *args, **kwargs: self)
    body = modelopt.fp4_gemm.__wrapped__
    for module in (modelopt, ct):
        monkeypatch.setattr(module, "fp4_quantize", library.fp4_quantize)
        monkeypatch.setattr(module, "enable_flashinfer_fp4_gemm", True)
        monkeypatch.setattr(module, "fp4_gemm", body)  # the operator has no CPU kernel; its Python body is the same
    return library


def flashinfer_case(kind: str) -> tuple[Case, Tensor]:
    generator = fresh_generator()
    case = make_case(kind, 160, [96], generator)
    case.layer.sm120_name = "model.layers.1.self_attn.o_proj"  # type: ignore[assignment]
    return case, random_activation(6, 160, torch.bfloat16, generator)


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_that_flashinfer_makes_is_checked_on_its_operands(
    kind: str, flashinfer: FlashInfer, watcher: Watcher
) -> None:
    case, x = flashinfer_case(kind)
    case.run(x)
    assert watcher.coverage.checked == 1
    flashinfer.spoil_product = lambda out: out.index_fill(1, torch.tensor([3]), 0.0)
    with pytest.raises(
        VerificationError, match=r"o_proj \(Module, gemm M=4 N=96 K=160\), served by flashinfer_cutlass"
    ):
        case.run(x[:4])


@pytest.mark.parametrize("kind", KINDS)
def test_the_quantizer_in_front_of_it_is_checked_by_itself(kind: str, flashinfer: FlashInfer, watcher: Watcher) -> None:
    case, x = flashinfer_case(kind)
    flashinfer.spoil_codes = lambda codes: codes ^ 2
    with pytest.raises(VerificationError, match=r"o_proj \(Module, quantize M=6 K=160\), served by quantizer"):
        case.run(x)


def test_shuffled_weights_are_named_as_not_checked(
    flashinfer: FlashInfer, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, x = flashinfer_case("modelopt")
    inner = modelopt.flashinfer_fp4_gemm
    monkeypatch.setattr(modelopt, "flashinfer_fp4_gemm", lambda *a, **k: inner(*a, backend="trtllm"))
    case.run(x)
    assert watcher.coverage.checked == 0
    assert "flashinfer_trtllm: its weights are shuffled" in watcher.coverage.text


def test_sglangs_own_qwen_kernel_is_checked_too(
    flashinfer: FlashInfer, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asks it before any backend; here it multiplies with half of alpha."""
    import sglang.kernels.ops.gemm as kernels

    def half(a: Tensor, b: Tensor, a_sf: Tensor, b_sf: Tensor, alpha: Tensor, dtype: torch.dtype, n: int) -> Tensor:
        return flashinfer.mm_fp4(a, b, a_sf, b_sf, alpha / 2, dtype, backend="")

    case, x = flashinfer_case("modelopt")
    monkeypatch.setattr(kernels, "try_qwen3x_nvfp4_gemm", half)
    patcher = Patcher()
    next(s for s in watch_seams.WATCH_SEAMS if s.name == "watch pre-emption").apply(kernels, patcher)
    try:
        with pytest.raises(VerificationError, match="served by try_qwen3x_nvfp4_gemm, is wrong"):
            case.run(x)
    finally:
        patcher.undo()


def test_every_convention_is_watched() -> None:
    names = {seam.name for seam in watch_seams.WATCH_SEAMS}
    assert {f"watch ({convention.label})" for convention in CONVENTIONS} <= names
    assert {f"watch experts ({convention.label})" for convention in EXPERT_CONVENTIONS} <= names
