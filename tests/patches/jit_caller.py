"""Run with a patched SGLang first on the path: its ``fp4_gemm`` and ``fp4_quantize`` with the kernels of patch 0007.

The kernels are emulated on the CPU; FlashInfer, which this machine lacks, is the oracle, and counts its calls. The
benchmark of the patch runs once a provider, untimed. Prints one JSON object.

    python jit_caller.py EMULATED_LIBRARY BENCHMARK_FILE
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from cpu_host.kernels.library import EmulatedLibrary
from sglang_sm120 import reference
from tests.patches import evidence
from tests.patches.flashinfer_cpu import CALLS, stand_in
from tests.support.nvfp4 import assert_matches_oracle, float32_gemm_bound, random_nvfp4_weight


class Kernels:
    """What ``load_jit`` would return: the functions of the patch's launcher."""

    def __init__(self, library: Path) -> None:
        self._library = EmulatedLibrary(library)

    def gemm(self, a: Any, b: Any, a_scale: Any, b_scale: Any, alpha: Any, out: Any, use_pdl: bool) -> None:
        CALLS["kernel gemm"] += 1
        self._library.nvfp4_gemm(a, a_scale, b, b_scale, alpha, None, out, use_pdl, 0)

    def quantize(self, x: Any, global_scale: Any, codes: Any, scales: Any, use_pdl: bool) -> None:
        CALLS["kernel quantize"] += 1
        self._library.nvfp4_quantize(x, global_scale, codes, scales, True, False, use_pdl)


def main(library: Path, benchmark: Path) -> dict[str, Any]:
    sys.modules["flashinfer"] = stand_in(("auto", "cudnn", "cutlass"))
    from sglang.kernels.ops.gemm import sm120_nvfp4_skinny as skinny
    from sglang.srt.environ import envs
    from sglang.srt.layers.quantization import fp4_utils, modelopt_quant

    kernels = Kernels(library)
    skinny._jit_module = lambda: kernels
    skinny._is_sm12x = lambda: True
    for name in ("_gemm_custom_op", "_quantize_custom_op"):  # operators of SGLang exist for CUDA, their bodies anywhere
        setattr(skinny, name, getattr(skinny, name).__wrapped__)
    multiply = modelopt_quant.fp4_gemm.__wrapped__

    def layer(tokens: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, int]:
        """A dense layer's two calls; which code they ended in."""
        CALLS.clear()
        weight, encode, alpha = random_nvfp4_weight(48, 96, torch.manual_seed(1)), torch.tensor(3.0), torch.tensor(0.01)
        x = torch.randn(tokens, 96, generator=torch.manual_seed(tokens)).to(dtype)
        codes, scales = fp4_utils._flashinfer_fp4_quantize_impl(x, encode)
        assert scales.dtype == torch.uint8
        scale_bytes = weight.scales.view(torch.float8_e4m3fn)
        out = multiply(codes, weight.packed.T, scales, scale_bytes.T, alpha.view(1), dtype, 48)
        operands = (codes, weight.packed, scales, weight.scales, alpha)
        assert_matches_oracle(out, reference.gemm(*operands, torch.float64), float32_gemm_bound(*operands, dtype))
        ours = reference.quantize(x, encode)[0]
        assert int((ours != codes).sum()) <= 0.02 * codes.numel()
        return dict(CALLS)

    found = {"off": layer(3)}
    with envs.SGLANG_ENABLE_SM120_NVFP4_SKINNY_GEMM.override(True):
        found |= {"few": layer(3), "half": layer(64, torch.float16), "many": layer(65)}
    return {"calls": found, "benchmark": run_benchmark(benchmark), "patched": evidence.found()}


def run_benchmark(file: Path) -> dict[str, Any]:
    """One small case for each provider on the CPU; the results of all of them, compared."""
    spec = importlib.util.spec_from_file_location("benchmark", file)
    assert spec is not None
    assert spec.loader is not None
    bench: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    bench.DEFAULT_DEVICE = "cpu"
    bench.create_random = lambda *shape: torch.randn(*shape, generator=torch.manual_seed(sum(shape))).bfloat16()
    bench.marker.do_bench = lambda fn, *, input_args, **options: fn(*input_args)
    torch.cuda.get_device_capability = lambda device=None: (12, 0)
    results, skipped = {}, []
    for provider in bench.benchmark_gemm._line_vals:
        try:
            results[provider] = bench.benchmark_gemm._fn(m=2, n=64, k=96, provider=provider)
        except bench.marker.BenchSkip:
            skipped.append(provider)
    right = results["cutlass"].double()
    distance = {name: float((out.double() - right).abs().max() / right.abs().max()) for name, out in results.items()}
    codes = {name: bench.benchmark_quantize._fn(m=2, k=96, provider=name)[0] for name in ("skinny", "flashinfer")}
    different = int((codes["skinny"] != codes["flashinfer"]).sum())
    return {"distance": distance, "skipped": skipped, "different codes": different}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
