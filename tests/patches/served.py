"""What the processes of a patched SGLang need to serve on the CPU with a FlashInfer backend and without this package.

Standing in: FlashInfer (``flashinfer_cpu``), the answers of an SM12x card to the questions that the code on the way to
its call asks, a place to run for the operators that SGLang registers for CUDA alone, and ``Tensor.cuda``. Everything
else is SGLang's own: arguments, choice of the backend, weights and their preparation, ``apply``, ``fp4_gemm``.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from cpu_host.runtime import after_import
from tests.patches.flashinfer_cpu import stand_in

_FP4_UTILS = "sglang.srt.layers.quantization.fp4_utils"
_MODELOPT = "sglang.srt.layers.quantization.modelopt_quant"
_OPERATORS = ("fp4_gemm", "flashinfer_fp4_quantize")
_kept: list[object] = []  # a torch Library takes its implementations back when it is collected


def arm(backend: str) -> None:
    """Put everything in place for ``mm_fp4(..., backend=backend)`` and no other, when SGLang imports what it is for."""

    def install() -> None:
        if "flashinfer" not in sys.modules:
            sys.modules["flashinfer"] = stand_in((backend,))

    after_import.after("sglang.srt.utils.common", _operators_run_on_the_cpu)
    after_import.before(_FP4_UTILS, install)
    after_import.after(_FP4_UTILS, _ask_like_on_a_card)
    after_import.after(_MODELOPT, _prepare_like_on_a_card)


def _operators_run_on_the_cpu(module: ModuleType) -> None:
    import torch

    common: Any = module
    register = common.direct_register_custom_op

    def direct_register_custom_op(op_name: str, op_func: Any, *args: Any, **kwargs: Any) -> None:
        register(op_name, op_func, *args, **kwargs)
        if op_name in _OPERATORS:
            library = torch.library.Library("sglang", "FRAGMENT")
            library.impl(op_name, op_func, "CPU")
            _kept.append(library)

    common.direct_register_custom_op = direct_register_custom_op


def _ask_like_on_a_card(module: ModuleType) -> None:
    """Where the patches refuse backends at start they ask for the card, and then FlashInfer."""
    fp4_utils: Any = module
    if hasattr(fp4_utils, "require_supported_fp4_gemm_backend"):
        fp4_utils.is_cuda, fp4_utils.get_device_capability = (lambda: True), (lambda: (12, 0))


def _prepare_like_on_a_card(module: ModuleType) -> None:
    """Since 0.5.13 SGLang prepares weights for FlashInfer on Blackwell cards alone, and an SM12x card is one.

    ``modelopt_quant`` asks by a function and since 0.5.19 through the platform. Only this module gets the answer of a
    card, and only to this question: the platform that it sees has no other attribute. Up to 0.5.11 it has also chosen
    its quantizer by the card, when it was imported; there it gets FlashInfer's, as on SM12x.
    """
    import flashinfer
    import torch

    modelopt: Any = module
    if hasattr(modelopt, "get_platform"):
        modelopt.get_platform = lambda: SimpleNamespace(is_blackwell=True)
    else:
        modelopt.is_blackwell_supported = lambda: True
    if not hasattr(sys.modules[_FP4_UTILS], "fp4_quantize"):
        modelopt.fp4_quantize = flashinfer.fp4_quantize
    torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign, assignment]
