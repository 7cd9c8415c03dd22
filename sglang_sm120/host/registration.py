"""SGLang's own way to add an FP4 GEMM backend, where it has one: ``patches/sglang/*/0006-*`` brings it.

A plugin registers a function under a name, and SGLang selects it when it resolves its arguments; its enum has one
member, ``external``, for all of them. Where this exists our values are registered and the enum is left alone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from sglang_sm120.backends.record import Backend
from sglang_sm120.host.conventions import MODELOPT
from sglang_sm120.host.source_probe import ModuleSource, argument_names, package_root

MODULE = "sglang.srt.plugins.fp4_gemm"
_SIGNATURES = {"register_fp4_gemm_backend": ["name", "gemm"], "select_external_fp4_gemm": ["name"]}


@cache
def registry() -> ModuleType | None:
    """Return SGLang's module for registration; ``None`` where it has none, or another one than ours is written for."""
    root = package_root()
    source = ModuleSource.load(root, MODULE) if root is not None else None
    if source is None:
        return None
    for name, arguments in _SIGNATURES.items():
        function = source.function(name)
        if function is None or argument_names(function) != arguments:
            return None
    return importlib.import_module(MODULE)


def gemm_of(record: Backend) -> Callable[..., Any]:
    """Return the function to register: the operands of ``mm_fp4`` in the layout of ``flashinfer_cutlass`` come in."""

    def gemm(input: Any, weight: Any, input_sf: Any, weight_sf: Any, alpha: Any, out_dtype: Any) -> Any:
        if record.implementation is None:
            mm_fp4 = sys.modules[MODELOPT].flashinfer_fp4_gemm
            return mm_fp4(input, weight, input_sf, weight_sf, alpha, out_dtype, backend=record.flashinfer_name)
        from sglang_sm120 import ops

        # Weight and scales come as transposed views of the row-major tensors.
        return ops.nvfp4_gemm(input, weight.T, input_sf, weight_sf.T, alpha, None, out_dtype, record.value)

    return gemm


def member_for(enum: Any, value: str) -> Any:
    """Return the member of SGLang's enum for a value, and let SGLang select a registered one."""
    module = registry()
    if module is not None and module.select_external_fp4_gemm(value):
        return enum("external")
    return enum(value)
