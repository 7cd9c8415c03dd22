"""Run with a patched SGLang first on the path and this package installed: what both together make of the values.

Prints one JSON object. The boot hook of the package has installed itself when SGLang is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def main(release: str) -> dict[str, Any]:
    import sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4
    import sglang.srt.layers.quantization.modelopt_quant  # noqa: F401
    from packaging.version import Version
    from sglang.srt.layers.quantization.fp4_utils import Fp4GemmRunnerBackend
    from sglang.srt.server_args import ServerArgs

    from sglang_sm120.host.installer import probe, verify
    from sglang_sm120.host.source_probe import ModuleSource, enum_values, package_root
    from tests.patches import evidence

    root = package_root()
    assert root is not None
    source = ModuleSource.load(root, "sglang.srt.layers.quantization.fp4_utils")
    assert source is not None
    cls = source.klass("Fp4GemmRunnerBackend")
    assert cls is not None
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {
        "root": str(root),
        "evidence": evidence.found(),
        "problems": probe(root, Version(release)),
        "states": {s.name: s.state for s in verify()},
        "native": list(enum_values(cls).values()),
        "members": {m.value: m.get_flashinfer_backend() for m in Fp4GemmRunnerBackend},
        "tuned": [m.value for m in Fp4GemmRunnerBackend if m.is_flashinfer_cutlass()],
        "registered": registered(),
        "choices": list(parser._option_string_actions["--fp4-gemm-backend"].choices or ()),
    }


def registered() -> dict[str, Any]:
    """Values of the package that SGLang has by registration, and what one of them makes of a GEMM."""
    try:
        from sglang.srt.plugins import fp4_gemm as registry
    except ImportError:
        return {}
    import torch
    from sglang.srt.layers.quantization import fp4_utils, modelopt_quant

    from sglang_sm120 import reference
    from sglang_sm120.host.registration import member_for
    from tests.support.nvfp4 import random_nvfp4_weight

    x, weight = torch.randn(3, 64).to(torch.bfloat16), random_nvfp4_weight(32, 64, torch.manual_seed(0))
    encode, alpha = torch.tensor(2.0), torch.tensor(0.1)
    codes, scales = reference.quantize(x, encode)
    right = reference.gemm(codes, weight.packed, scales, weight.scales, alpha, torch.bfloat16)
    fp4_utils.FP4_GEMM_RUNNER_BACKEND = member_for(fp4_utils.Fp4GemmRunnerBackend, "torch_reference")
    body = modelopt_quant.fp4_gemm.__wrapped__  # the operator exists for CUDA; its body is plain Python
    out = body(codes, weight.packed.T, scales, weight.scales.T, alpha, torch.bfloat16, 32)
    return {
        "values": list(registry._registered),
        "member": fp4_utils.get_fp4_gemm_runner_backend().value,
        "right": torch.equal(out, right),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
