"""FlashInfer, which a machine without a GPU lacks: the two functions that SGLang's dense NVFP4 layers call.

Both answer by the oracle of this package, which refuses operands of another dtype, shape or order of strides than
FlashInfer's ``mm_fp4`` takes for 128x4-swizzled block scales and a transposed weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: How often each function was called.
CALLS: Counter[str] = Counter()


def stand_in(backends: Collection[str]) -> ModuleType:
    """The module ``flashinfer``.

    Args:
        backends: what ``mm_fp4`` takes as ``backend``; it raises for every other name.
    """
    from sglang_sm120 import reference

    def fp4_quantize(input: Any, global_scale: Any, **options: Any) -> Any:
        CALLS["flashinfer quantize"] += 1
        return reference.quantize(input, global_scale.reshape(()))

    def mm_fp4(a: Any, b: Any, a_scale: Any, b_scale: Any, alpha: Any, out_dtype: Any, **options: Any) -> Any:
        if options["backend"] not in backends:
            raise ValueError(f"mm_fp4 got backend={options['backend']!r} where {sorted(backends)} was asked for")
        CALLS["flashinfer gemm"] += 1
        return reference.gemm(a, b.T, a_scale, b_scale.T, alpha.reshape(()), out_dtype)

    module: Any = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    mm_fp4.is_backend_supported = lambda backend, capability: backend in backends  # type: ignore[attr-defined]
    module.fp4_quantize, module.mm_fp4 = fp4_quantize, mm_fp4
    module.reorder_rows_for_gated_act_gemm = module.shuffle_matrix_sf_a = None
    return module  # type: ignore[no-any-return]
