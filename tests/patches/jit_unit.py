"""Run with a patched SGLang first on the path: the unit that its ``load_jit`` would compile for our kernels.

Imports the patch's Python wrapper, whose own arguments are taken. Prints one JSON object.
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch


def main() -> dict[str, Any]:
    from sglang.kernels.jit.utils.arch import get_default_target_flags, make_jit_cuda_arch
    from sglang.kernels.jit.utils.compile.paths import DEFAULT_INCLUDE
    from sglang.kernels.jit.utils.compile.spec import BuildSpec, resolve_sources
    from sglang.kernels.ops.gemm import sm120_nvfp4_skinny as wrapper
    from tvm_ffi.libinfo import include_paths

    from tests.patches import evidence

    with patch.object(wrapper, "load_jit") as load_jit:
        wrapper._jit_module()
    asked = load_jit.call_args.kwargs
    spec = BuildSpec(
        module_args=load_jit.call_args.args,
        cpp_files=(),
        cuda_files=resolve_sources(asked["cuda_files"]),
        cpp_wrappers=(),
        cuda_wrappers=tuple(asked["cuda_wrappers"]),
        cflags=(),
        cuda_cflags=(),
        ldflags=(),
        include_paths=tuple(DEFAULT_INCLUDE),
        header_only=True,
    )
    (unit,) = spec.translation_units()
    flags = get_default_target_flags(make_jit_cuda_arch(12, 0))
    return {
        "patched": evidence.found(),
        "unit": unit.source,
        "flags": [*flags, *(f"-I{path}" for path in (*DEFAULT_INCLUDE, *include_paths()))],
    }


if __name__ == "__main__":
    print(json.dumps(main()))
