"""Counts, in the process that runs the model, what the backend was really asked to do.

Forwards are counted at ``ModelRunner.forward``, linear layers at the function of the backend that multiplies (for
FlashInfer's backends the name that SGLang calls it by), and only those inside a forward: the self-test before the
weights load would falsify the count. After each forward the file ``<folder>/<pid>.json`` is replaced as a whole, so
that a reader never sees half of one.

Mutations are planted here too, between SGLang and the backend, so that the shipped code stays free of them. They
too act inside forwards only (the package's own self-test would refuse to start with one), and their name is
read anew before each forward: one server serves a right answer and every wrong one.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cpu_host.runtime import EVIDENCE_VARIABLE, MUTATION_VARIABLE, after_import, mutations

_BACKENDS = {"sglang_sm120.backends.torch_reference": "torch_reference", "sglang_sm120.native": "sm120"}
_RUNNER = "sglang.srt.model_executor.model_runner"
_MODELOPT = "sglang.srt.layers.quantization.modelopt_quant"
_FP4_UTILS = "sglang.srt.layers.quantization.fp4_utils"


class _Counter:
    """The state of one process."""

    def __init__(self) -> None:
        self.depth = 0
        self.mutate = mutations.find("")
        self.forwards = 0
        self.linears: dict[str, dict[str, int]] = {}
        self.multiplied_by: dict[str, int] = {}

    def saw_linear(self, rows: int, n: int, k: int, by: str) -> None:
        if self.depth:
            self.multiplied_by[by] = self.multiplied_by.get(by, 0) + 1
            entry = self.linears.setdefault(f"{n}x{k}", {"calls": 0, "rows": 0})
            entry["calls"] += 1
            entry["rows"] += rows

    def write(self, folder: Path) -> None:
        record = {
            "pid": os.getpid(),
            "process": multiprocessing.current_process().name,
            "backend": _chosen_backend(),
            "forwards": self.forwards,
            "linears": self.linears,
            "multiplied_by": self.multiplied_by,
        }
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".{os.getpid()}.tmp"
        scratch.write_text(json.dumps(record, indent=1), encoding="utf-8")
        scratch.replace(folder / f"{os.getpid()}.json")


_COUNTER = _Counter()


def arm() -> None:
    for backend in _BACKENDS:
        after_import.after(backend, _watch_backend)
    after_import.after(_MODELOPT, _watch_flashinfer)
    after_import.after(_RUNNER, _watch_runner)


def _chosen_backend() -> str | None:
    """What SGLang itself says is in force."""
    module: Any = sys.modules.get(_FP4_UTILS)
    return None if module is None else str(module.get_fp4_gemm_runner_backend().value)


def _watch_backend(module: ModuleType) -> None:
    linear: Callable[..., Any] = vars(module)["linear"]

    def counted(x: Any, weight: Any, weight_scale: Any, input_scale: Any, alpha: Any, bias: Any = None) -> Any:
        _COUNTER.saw_linear(x.shape[0], weight.shape[0], 2 * weight.shape[1], _BACKENDS[module.__name__])
        if _COUNTER.depth:
            weight, weight_scale, alpha = _COUNTER.mutate(weight, weight_scale, alpha)
        return linear(x, weight, weight_scale, input_scale, alpha, bias)

    vars(module)["linear"] = counted


def _watch_flashinfer(module: ModuleType) -> None:
    gemm: Callable[..., Any] | None = vars(module).get("flashinfer_fp4_gemm")
    if gemm is None:
        return  # no FlashInfer here

    @functools.wraps(gemm)  # with its attributes: by them the package knows its own hook
    def counted(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        _COUNTER.saw_linear(a.shape[0], b.shape[1], 2 * b.shape[0], "flashinfer")
        return gemm(a, b, *args, **kwargs)

    vars(module)["flashinfer_fp4_gemm"] = counted


def _watch_runner(module: ModuleType) -> None:
    cls: Any = vars(module)["ModelRunner"]
    forward = cls.forward
    folder, mutation = os.environ.get(EVIDENCE_VARIABLE), os.environ.get(MUTATION_VARIABLE)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if mutation and os.path.exists(mutation):
            _COUNTER.mutate = mutations.find(Path(mutation).read_text(encoding="ascii"))
        _COUNTER.depth += 1
        try:
            result = forward(self, *args, **kwargs)
        finally:
            _COUNTER.depth -= 1
        _COUNTER.forwards += 1
        if folder:
            _COUNTER.write(Path(folder))
        return result

    cls.forward = counted
