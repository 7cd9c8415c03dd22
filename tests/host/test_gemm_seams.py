"""The FlashInfer handle, the quantizers and SGLang's own Qwen kernel do what the choice says."""

from __future__ import annotations

from typing import Any

import pytest
import sglang.srt.layers.quantization.modelopt_quant as modelopt
import torch
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as ct
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmRunnerBackend

from sglang_sm120 import reference
from sglang_sm120.backends import BACKENDS, offered_values
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.host import patches_gemm
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.state import STATE
from sglang_sm120.layout import ScaleLayout
from tests.host.conftest import Serving
from tests.support.nvfp4 import fresh_generator, random_activation, random_nvfp4_weight

RTX, HOPPER, B200 = (12, 0), (9, 0), (10, 0)


class Recorder:
    """Stands where FlashInfer's function would: this machine has no GPU to run the real one on."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs))
        return "from FlashInfer"


def routed(original: Any, name: str = "flashinfer_fp4_gemm") -> Any:
    """The seam applied to a module of its own, so that FlashInfer's place can be taken."""
    module: Any = type("module", (), {})
    if original is not None or name == "fp4_quantize":
        setattr(module, name, staticmethod(original) if original is not None else None)
    patch = patches_gemm.route_gemm if name == "flashinfer_fp4_gemm" else patches_gemm.route_quantizer
    patch(module, Patcher())
    return vars(module)[name]


def test_sglangs_handle_is_ours_and_flashinfers_function_is_not_touched() -> None:
    assert modelopt.flashinfer_fp4_gemm.__sm120_seam__ == "gemm"
    assert ct.fp4_gemm is modelopt.fp4_gemm  # compressed-tensors reaches the same handle through this


@pytest.mark.parametrize("backend", ["cutlass", "cudnn", "b12x", "cute-dsl", "auto", "trtllm"])
def test_flashinfers_backends_pass_through_unchanged(backend: str) -> None:
    recorder = Recorder()
    arguments = (object(), object(), object(), object(), object(), torch.bfloat16)
    assert routed(recorder)(*arguments, backend=backend) == "from FlashInfer"
    assert recorder.calls == [(arguments, {"backend": backend})]


def test_without_flashinfer_the_message_says_what_to_install() -> None:
    empty = torch.empty(0)
    with pytest.raises(UnsupportedError, match="flashinfer-python"):
        routed(None)(empty, empty, empty, empty, empty, torch.bfloat16, backend="cutlass")


@pytest.mark.parametrize("m", [0, 1, 130])
def test_a_backend_of_ours_is_right_through_flashinfers_calling_convention(m: int) -> None:
    generator = fresh_generator()
    weight = random_nvfp4_weight(72, 176, generator)
    x = random_activation(m, 176, torch.bfloat16, generator)
    packed, scales = reference.quantize(x, torch.tensor(200.0), ScaleLayout.SWIZZLE_128X4)
    alpha = torch.tensor(0.5) * weight.global_decode_scale
    # Weight and scales arrive as transposed views, scales as e4m3: the form in which SGLang calls mm_fp4.
    out = modelopt.flashinfer_fp4_gemm(
        packed,
        weight.packed.T,
        scales,
        weight.scales.view(torch.float8_e4m3fn).T,
        alpha,
        torch.bfloat16,
        backend="torch_reference",
    )
    expected = reference.gemm(packed, weight.packed, scales, weight.scales, alpha, torch.bfloat16)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("value", offered_values(set()))
def test_flashinfer_is_called_by_its_own_name_for_the_backend(value: str) -> None:
    record = BACKENDS[value]
    assert Fp4GemmRunnerBackend(value).get_flashinfer_backend() == (record.flashinfer_name or value)


def test_sglangs_own_members_keep_their_meaning() -> None:
    names = {"flashinfer_cutlass": "cutlass", "flashinfer_cudnn": "cudnn", "flashinfer_trtllm": "trtllm"}
    assert {v: Fp4GemmRunnerBackend(v).get_flashinfer_backend() for v in names} == names
    assert Fp4GemmRunnerBackend.FLASHINFER_CUTLASS.is_flashinfer_cutlass()
    assert not Fp4GemmRunnerBackend.MARLIN.is_flashinfer_cutlass()
    assert Fp4GemmRunnerBackend.FLASHINFER_CUTLASS.supports_swiglu_fusion()


def test_flashinfers_autotuner_is_reached_for_its_new_values() -> None:
    assert Fp4GemmRunnerBackend("flashinfer_b12x").is_flashinfer_cutlass()
    assert Fp4GemmRunnerBackend("flashinfer_auto").is_flashinfer_cutlass()
    assert not Fp4GemmRunnerBackend("torch_reference").is_flashinfer_cutlass()
    assert not Fp4GemmRunnerBackend("torch_reference").supports_swiglu_fusion()


@pytest.mark.parametrize(
    ("backend", "card", "rejected", "ours"),
    [
        ("torch_reference", RTX, False, True),
        ("flashinfer_cutlass", RTX, False, False),
        ("flashinfer_cutlass", RTX, True, True),
        ("flashinfer_b12x", RTX, False, False),
        (None, B200, False, False),
        (None, HOPPER, False, True),
    ],
)
def test_the_quantizer_is_ours_when_it_must_be(
    serving: Serving, backend: str | None, card: tuple[int, int], rejected: bool, ours: bool
) -> None:
    serving.decide(backend, facts=HostFacts(card))
    STATE.quantizer_rejected = rejected
    recorder = Recorder()
    x = random_activation(3, 48, torch.bfloat16, fresh_generator())
    result = routed(recorder, "fp4_quantize")(x, torch.tensor(100.0))
    assert (result == "from FlashInfer") is not ours
    if ours:
        packed, scales = reference.quantize(x, torch.tensor(100.0), ScaleLayout.SWIZZLE_128X4)
        assert torch.equal(result[0], packed)
        assert torch.equal(result[1], scales)


@pytest.mark.parametrize("module", [modelopt, ct])
def test_without_flashinfer_both_modules_quantize_with_ours(serving: Serving, module: Any) -> None:
    serving.decide("torch_reference")
    x = random_activation(5, 64, torch.float16, fresh_generator())
    packed, scales = module.fp4_quantize(x, torch.tensor(100.0))
    expected = reference.quantize(x, torch.tensor(100.0), ScaleLayout.SWIZZLE_128X4)
    assert torch.equal(packed, expected[0])
    assert torch.equal(scales, expected[1])


@pytest.mark.parametrize(
    ("backend", "explicit", "may_run"),
    [("flashinfer_b12x", True, False), ("flashinfer_cutlass", True, False), ("flashinfer_cutlass", False, True)],
)
def test_sglangs_qwen_kernel_serves_only_under_auto(
    serving: Serving, backend: str, explicit: bool, may_run: bool
) -> None:
    import sglang.kernels.ops.gemm as gemm_ops

    assert gemm_ops.try_qwen3x_nvfp4_gemm.__sm120_seam__ == "pre-emption"
    serving.decide(backend, explicit=explicit, facts=HostFacts(RTX))
    module: Any = type("module", (), {"try_qwen3x_nvfp4_gemm": staticmethod(lambda *a: "from SGLang's kernel")})
    patches_gemm.guard_preemption(module, Patcher())
    result = vars(module)["try_qwen3x_nvfp4_gemm"](*range(7))
    assert result == ("from SGLang's kernel" if may_run else None)
