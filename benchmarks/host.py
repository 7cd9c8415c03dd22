"""What the hooks cost on the host: ``install()`` per process, the routing of one GEMM call, and the choice for it.

    make bench-host

Each call is timed beside its peer in the same run, in interleaved repeats; the peer is SGLang's original at the same
place. FlashInfer's function is replaced by one that returns at once, on both sides, so that the difference is the
routing alone and no GPU is needed. Medians and the spread (5th to 95th percentile) over the repeats.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

REPEATS = 41
PROCESSES = 9

INSTALL = """
import time, sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "sglang_sm120._boot"]
import sglang
begin = time.perf_counter()
from sglang_sm120 import install
install()
print((time.perf_counter() - begin) * 1e3)
"""


def main() -> None:
    rows = {"install() in a process that imports SGLang [ms]": _install_times()}
    rows |= {f"{name} [µs a call]": times for name, times in _call_times().items()}
    table = {name: _summary(times) for name, times in rows.items()}
    width = max(map(len, table))
    for name, row in table.items():
        print(f"{name:<{width}}  median {row['median']:8.3f}   5–95 % {row['low']:.3f} – {row['high']:.3f}")
    print(json.dumps(table, ensure_ascii=False))


def _install_times() -> list[float]:
    command = [sys.executable, "-c", INSTALL]
    runs = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(PROCESSES))
    return [float(run.stdout.split()[-1]) for run in runs]


def _call_times() -> dict[str, list[float]]:
    import torch

    import cpu_host.runtime

    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        cpu_host.runtime.arm()
    from sglang_sm120 import install, ops

    install()
    import sglang.srt.layers.quantization.modelopt_quant as modelopt

    from sglang_sm120 import native
    from sglang_sm120.backends import torch_reference
    from sglang_sm120.host import patches_gemm
    from sglang_sm120.host.patching import Patcher
    from sglang_sm120.tuning import backend

    result = torch.empty(1, 8, dtype=torch.bfloat16)
    byte, scale = torch.empty(1, 8, dtype=torch.uint8), torch.ones(())

    def at_once(*args: Any, **kwargs: Any) -> torch.Tensor:
        return result

    module: Any = SimpleNamespace(flashinfer_fp4_gemm=at_once)
    patches_gemm.route_gemm(module, Patcher())
    arguments = (byte, byte, byte, byte, scale, torch.bfloat16)
    torch_reference.linear = at_once
    kernels = SimpleNamespace(nvfp4_linear=at_once, nvfp4_quantizes_inside=lambda *sizes: True)
    vars(native)["_library"] = lambda device: (kernels, True)
    x = torch.empty(1, 16, dtype=torch.bfloat16)
    linear = (x, byte, byte, scale, scale, None)
    quantized, byte_scale = (byte, scale), byte.view(torch.float8_e4m3fn)

    def quantize(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return quantized

    def chosen(value: str) -> Callable[[], torch.Tensor]:
        """The body of ``sm120_tuned`` for an N of its own, in whose plan ``value`` serves M = 1."""
        weight = torch.empty(len(plans) + 1, 8, dtype=torch.uint8)
        plans.append(backend.make_plan({1: value}, None))
        backend.add_plan((len(plans), 16, x.dtype, True), plans[-1])
        return lambda: backend.linear(x, weight, byte_scale, scale, scale, None)

    plans: list[backend.Plan] = []
    flashinfer = sys.modules["flashinfer"] = ModuleType("flashinfer")
    vars(flashinfer).update(fp4_quantize=quantize, mm_fp4=at_once)
    original_apply = modelopt.ModelOptFp4LinearMethod.apply.__wrapped__
    unprepared, foreign = SimpleNamespace(), SimpleNamespace()
    return _interleave(
        {
            "FlashInfer's function called directly": lambda: at_once(*arguments, backend="cutlass"),
            "the same through seam gemm": lambda: module.flashinfer_fp4_gemm(*arguments, backend="cutlass"),
            "apply of a layer that is not ours, original": lambda: _until_error(original_apply, foreign, unprepared, x),
            "the same through seam apply": lambda: _until_error(
                modelopt.ModelOptFp4LinearMethod.apply, foreign, unprepared, x
            ),
            "backend function of ours called directly": lambda: at_once(*linear),
            "the same through torch.ops.sglang_sm120.nvfp4_linear": lambda: ops.nvfp4_linear(
                *linear, "torch_reference"
            ),
            "sm120 with kernels that return at once": lambda: native.linear(*linear),
            "the same through the operator": lambda: ops.nvfp4_linear(*linear, "sm120"),
            "sm120 with kernels that return at once, chosen by sm120_tuned": chosen("sm120"),
            "FlashInfer's quantizer and function called directly": lambda: at_once(
                *quantize(x, scale), byte.T, byte_scale.T, scale, torch.bfloat16, backend="cutlass"
            ),
            "the same chosen by sm120_tuned": chosen("flashinfer_cutlass"),
        }
    )


def _until_error(function: Callable[..., Any], *arguments: Any) -> None:
    """Run SGLang's method up to its first use of the layer: what comes before it is what differs."""
    try:
        function(*arguments)
    except AttributeError:
        return


def _interleave(calls: dict[str, Callable[[], Any]], number: int = 2000) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            times[name].append(timeit.timeit(call, number=number) / number * 1e6)
    return times


def _summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered),
        "low": ordered[len(ordered) // 20],
        "high": ordered[-1 - len(ordered) // 20],
    }


if __name__ == "__main__":
    main()
