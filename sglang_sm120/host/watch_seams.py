"""Seams that exist only while somebody asked to check or to count (``SGLANG_SM120_VERIFY``, ``SGLANG_SM120_REPORT``).

A server that nobody asked pays nothing: the functions in place are then those of the other seams.
"""

from __future__ import annotations

from packaging.version import Version

from sglang_sm120 import env
from sglang_sm120.host.conventions import CONVENTIONS, EXPERT_CONVENTIONS
from sglang_sm120.host.seams import SEAMS, Check, Seam
from sglang_sm120.host.source_probe import ModuleSource, argument_names

_EXECUTOR, _SPECULATIVE = "sglang.srt.model_executor", "sglang.srt.speculative"
#: This release split the runner of CUDA graphs into one for decode and one for prefill, in modules of their own.
_SPLIT = Version("0.5.14")
#: This one brought a second runner for prefill.
_BREAKABLE = Version("0.5.11")
#: And this one a draft model without a cache of its own.
_FROZEN = Version("0.5.12")


def _method(cls: str, name: str) -> Check:
    """``cls.name(self, forward_batch, ...)`` is there."""

    def check(source: ModuleSource) -> str | None:
        function = source.function(name, cls)
        if function is None or argument_names(function)[:2] != ["self", "forward_batch"]:
            return f"no function {cls}.{name}(self, forward_batch, ...)"
        return None

    return check


def _over(name: str, watched: str, function: str, **options: object) -> Seam:
    """A seam that wraps another one of the table, under the same conditions."""
    row = next(seam for seam in SEAMS if seam.name == watched)
    return Seam(name, row.module, row.check, f"watch_patches:{function}", {**options, "seam": name}, since=row.since)


def _graphs(kind: str, module: str, cls: str, method: str, since: Version | None, until: Version | None) -> Seam:
    name = f"graphs ({kind})"
    options = {"cls": cls, "method": method, "seam": name}
    check = _method(cls, method)
    patch = "watch_patches:keep_from_graphs"
    return Seam(name, module, check, patch, options, since=since, until=until, on_demand=True)


def _draft_graphs(kind: str, module: str, cls: str, since: Version | None = None) -> tuple[Seam, Seam]:
    """A runner of graphs of a draft model, which answers by itself, under the name before the split and after it."""
    place = f"{_SPECULATIVE}.{module}"
    return (
        _graphs(f"draft, {kind}", place, cls, "can_run_graph", _SPLIT, None),
        _graphs(f"draft, {kind}, old", place, cls, "can_run", since, _SPLIT),
    )


#: They come after all others and so wrap what those have put in place.
WATCH_SEAMS: tuple[Seam, ...] = (
    *(_over(f"watch ({c.label})", f"apply ({c.label})", "watch_apply", convention=c) for c in CONVENTIONS),
    *(
        _over(f"watch experts ({c.label})", f"moe layer ({c.label})", "watch_moe", convention=c)
        for c in EXPERT_CONVENTIONS
    ),
    _over("watch gemm", "gemm", "watch_gemm"),
    _over("watch quantizer (ModelOpt)", "quantizer (ModelOpt)", "watch_quantizer"),
    _over("watch quantizer (compressed-tensors)", "quantizer (compressed-tensors)", "watch_quantizer"),
    _over("watch pre-emption", "pre-emption", "watch_preemption"),
    _over("watch names", "loaded", "name_layers"),
    Seam(
        "steps",
        f"{_EXECUTOR}.model_runner",
        _method("ModelRunner", "forward"),
        "watch_patches:watch_steps",
        {"seam": "steps"},
    ),
    _graphs(
        "decode", f"{_EXECUTOR}.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner", "can_run_graph", _SPLIT, None
    ),
    _graphs(
        "prefill",
        f"{_EXECUTOR}.runner.prefill_cuda_graph_runner",
        "PrefillCudaGraphRunner",
        "can_run_graph",
        _SPLIT,
        None,
    ),
    _graphs("all", f"{_EXECUTOR}.cuda_graph_runner", "CudaGraphRunner", "can_run", None, _SPLIT),
    _graphs(
        "piecewise", f"{_EXECUTOR}.piecewise_cuda_graph_runner", "PiecewiseCudaGraphRunner", "can_run", None, _SPLIT
    ),
    _graphs(
        "breakable",
        f"{_EXECUTOR}.breakable_cuda_graph_runner",
        "BreakableCudaGraphRunner",
        "can_run",
        _BREAKABLE,
        _SPLIT,
    ),
    _graphs("CPU", f"{_EXECUTOR}.cpu_graph_runner", "CPUGraphRunner", "can_run_graph", _SPLIT, None),
    _graphs("CPU, old", f"{_EXECUTOR}.cpu_graph_runner", "CPUGraphRunner", "can_run", None, _SPLIT),
    *_draft_graphs("decode", "eagle_draft_cuda_graph_runner", "EAGLEDraftCudaGraphRunner"),
    *_draft_graphs("extend", "eagle_draft_extend_cuda_graph_runner", "EAGLEDraftExtendCudaGraphRunner"),
    *_draft_graphs(
        "layers", "multi_layer_eagle_draft_extend_cuda_graph_runner", "MultiLayerEagleDraftExtendCudaGraphRunner"
    ),
    *_draft_graphs("frozen", "frozen_kv_mtp_cuda_graph_runner", "FrozenKVMTPCudaGraphRunner", since=_FROZEN),
)


def seams_in_force() -> tuple[Seam, ...]:
    """Every seam of this process: the table, and on top what was asked for.

    Raises:
        ConfigError: one of the two variables cannot be understood.
    """
    asked = env.verify_every() > 0 or env.report_path() is not None
    return (*SEAMS, *WATCH_SEAMS) if asked else SEAMS
