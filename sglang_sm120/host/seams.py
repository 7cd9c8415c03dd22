"""The table of seams: every place where the package touches SGLang.

A seam has three parts: the module whose import makes it possible, a static check that reads that module's
source before anything is patched, and the patch. ``since`` is the first release that has the code; a seam
that a release lacks is absent there, which is no fault. Names follow the installed SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from packaging.version import Version

from sglang_sm120.host.conventions import (
    CONVENTIONS,
    CT_W4A4,
    CUTLASS_MOE,
    EXPERT_CONVENTIONS,
    FP4_UTILS,
    JIT_OPERATORS,
    MODELOPT,
    MOE_UTILS,
    OVERRIDES,
    UNQUANTIZED,
    Convention,
    ExpertConvention,
)
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.source_probe import ModuleSource, argument_names, calls, enum_values

#: First and last release this table was read and tested against.
FIRST_SUPPORTED, LAST_TESTED = Version("0.5.9"), Version("0.5.23")

Check = Callable[[ModuleSource], str | None]


@dataclass(frozen=True)
class Seam:
    """One hook into SGLang.

    Attributes:
        name: what logs, ``doctor`` and tests call it.
        module: the module that holds the code; the patch is applied right after its import.
        check: reads the parsed module, returns ``None`` if the code is as expected, else what differs.
        patch: lazy ``"module:function"`` below ``sglang_sm120.host`` that patches the imported module. Lazy
            because these modules need torch, which a process that only parses arguments does not.
        options: keyword arguments of the patch.
        since: first release with this code (``None``: every supported one).
        until: first release without it (``None``: every supported one has it).
        on_demand: SGLang imports the module when it first needs it, if ever. A server starts before that; the patch
            is armed and runs with the import.
    """

    name: str
    module: str
    check: Check
    patch: str
    options: Mapping[str, Any] = field(default_factory=dict)
    since: Version | None = None
    until: Version | None = None
    on_demand: bool = False

    def exists_in(self, sglang: Version) -> bool:
        """Whether release ``sglang`` has this code."""
        release = Version(sglang.base_version)
        return (self.since is None or release >= self.since) and (self.until is None or release < self.until)

    def apply(self, module: ModuleType, patcher: Patcher) -> None:
        """Patch ``module``, recording every change in ``patcher``."""
        place, function = self.patch.split(":")
        getattr(import_module(f"sglang_sm120.host.{place}"), function)(module, patcher, **self.options)


def _has_list(name: str) -> Check:
    return lambda source: None if source.binds(name) else f"no list {name}"


def _has_function(name: str, *signatures: list[str], cls: str | None = None) -> Check:
    label = f"{cls}.{name}" if cls else name

    def check(source: ModuleSource) -> str | None:
        function = source.function(name, cls)
        if function is None:
            return f"no function {label}"
        found = argument_names(function)
        if found not in signatures:
            return f"{label} takes ({', '.join(found)})"
        return None

    return check


def _takes(name: str, first: list[str], also: list[str], *, cls: str) -> Check:
    def check(source: ModuleSource) -> str | None:
        function = source.function(name, cls)
        names = argument_names(function) if function is not None else []
        if names[: len(first)] != first or not set(also) <= set(names):
            return f"no function {cls}.{name}({', '.join([*first, *also])}, ...)"
        return None

    return check


def _all(*checks: Check) -> Check:
    return lambda source: next((p for p in (check(source) for check in checks) if p is not None), None)


def _check_enum(source: ModuleSource) -> str | None:
    cls = source.klass("Fp4GemmRunnerBackend")
    if cls is None:
        return "no class Fp4GemmRunnerBackend"
    if enum_values(cls).get("AUTO") != "auto":
        return "Fp4GemmRunnerBackend has no member AUTO = 'auto'"
    for method in ("get_flashinfer_backend", "is_flashinfer_cutlass"):
        if source.function(method, "Fp4GemmRunnerBackend") is None:
            return f"no method Fp4GemmRunnerBackend.{method}"
    return None


def _check_resolution(source: ModuleSource) -> str | None:
    problem = _has_function("initialize_fp4_gemm_config", ["server_args"], [])(source)
    if problem is None and not source.binds("FP4_GEMM_RUNNER_BACKEND"):
        problem = "no variable FP4_GEMM_RUNNER_BACKEND"
    return problem


def _check_gemm(source: ModuleSource) -> str | None:
    function = source.function("fp4_gemm")
    if function is None:
        return "no function fp4_gemm"
    inner = calls(function, "flashinfer_fp4_gemm")
    if not inner:
        return "fp4_gemm does not call flashinfer_fp4_gemm"
    if any(len(c.args) != 6 or [k.arg for k in c.keywords] != ["backend"] for c in inner):
        return "fp4_gemm calls flashinfer_fp4_gemm with other arguments"
    if not source.binds("enable_flashinfer_fp4_gemm"):
        return "no variable enable_flashinfer_fp4_gemm"
    return None


def _passes(function: str, name: str, *counts: int) -> Check:
    """``function`` calls ``name``, every time with that many positional arguments."""

    def check(source: ModuleSource) -> str | None:
        body = source.function(function)
        found = {len(call.args) for call in calls(body, name)} if body is not None else set()
        return None if found and found <= set(counts) else f"{function} does not call {name} as it used to"

    return check


def _check_quantizer(cls: str, method: str) -> Check:
    def check(source: ModuleSource) -> str | None:
        function = source.function(method, cls)
        if function is None:
            return f"no function {cls}.{method}"
        inner = calls(function, "fp4_quantize")
        if not inner or any(len(c.args) != 2 or c.keywords for c in inner):
            return f"{cls}.{method} does not call fp4_quantize(x, scale)"
        return None if source.binds("fp4_quantize") else "no name fp4_quantize"

    return check


def _linear_seams(convention: Convention) -> tuple[Seam, ...]:
    """Weights (W) and apply (A) of one linear method or scheme."""
    return (
        Seam(
            f"weights ({convention.label})",
            convention.module,
            _all(
                _has_function("process_weights_after_loading", ["self", "layer"], cls=convention.cls),
                _takes("create_weights", ["self", "layer"], ["params_dtype"], cls=convention.cls),
            ),
            "patches_linear:wrap_weights",
            {"convention": convention},
            since=convention.since,
        ),
        Seam(
            f"apply ({convention.label})",
            convention.module,
            _has_function(convention.apply, ["self", "layer", "x", "bias"], cls=convention.cls),
            "patches_linear:wrap_apply",
            {"convention": convention},
            since=convention.since,
        ),
    )


def _admission_seam(label: str, module: str, cls: str) -> Seam:
    return Seam(
        f"admission ({label})",
        module,
        _has_function("get_min_capability", ["cls"], cls=cls),
        "patches_linear:admit",
        {"cls": cls},
    )


def _calls_one_of(name: str, called: tuple[str, ...], *, cls: str) -> Check:
    def check(source: ModuleSource) -> str | None:
        function = source.function(name, cls)
        if function is not None and any(calls(function, other) for other in called):
            return None
        return f"{cls}.{name} calls none of {', '.join(called)}"

    return check


def _expert_seam(convention: ExpertConvention) -> Seam:
    name, cls = f"moe layer ({convention.label})", convention.cls
    return Seam(
        name,
        convention.module,
        _all(
            _has_function("__init__", list(convention.signature), cls=cls),
            _calls_one_of("__init__", ("is_blackwell_supported", "get_platform"), cls=cls),
            _takes(
                "create_weights",
                ["self", "layer"],
                ["hidden_size", "intermediate_size_per_partition"],
                cls=cls,
            ),
            _has_function("create_moe_runner", ["self", "layer", "moe_runner_config"], cls=cls),
            _has_function("process_weights_after_loading", ["self", "layer"], cls=cls),
            _has_function(convention.apply, ["self", "layer", "dispatch_output"], cls=cls),
        ),
        "moe_patches:serve_layers",
        {"convention": convention, "seam": name},
    )


#: First release without operators of SGLang's own: FlashInfer does everything there.
_OPERATORS_UNTIL = Version("0.5.16")
_MASKED = ["input_tensor", "input_global_scale", "mask"]


def _operator_seams() -> tuple[Seam, ...]:
    """SGLang's own NVFP4 operators, at each name that its code calls."""
    quantize, offsets = "scaled_fp4_experts_quant", ["expert_offsets", "blockscale_offsets", "topk", "expert_map"]
    operands = ["a", "b", "block_scale_a", "block_scale_b", "alpha", "out_dtype"]
    grouped = ["a_fp4", "b_fp4", "a_blockscale", "b_blockscale", "alphas", "out_dtype", "params"]
    weights = [name for w in ("w1", "w2") for name in (f"a{w[1]}_gscale", f"{w}_fp4", f"{w}_blockscale", f"{w}_alphas")]
    runner = ["a", *weights, "topk_weights", "topk_ids", "params", "apply_router_weight_on_input"]
    return (
        Seam(
            "operators (experts)",
            CUTLASS_MOE,
            _all(
                _has_function("cutlass_moe_fp4", runner, [*runner, "no_combine"]),
                _passes("cutlass_moe_fp4", "cutlass_fp4_group_mm", 7, 8),  # 0.5.9 passes the device too
                _passes("cutlass_moe_fp4", quantize, 5),
            ),
            "operators:route_experts",
            until=_OPERATORS_UNTIL,
            on_demand=True,
        ),
        Seam(
            "operators (dense)",
            MODELOPT,
            _passes("fp4_gemm", "cutlass_fp4_gemm", 6),
            "operators:route_dense",
            until=_OPERATORS_UNTIL,
        ),
        Seam(
            "operators (module)",
            JIT_OPERATORS,
            _all(
                _has_function("scaled_fp4_quant", ["input", "input_global_scale"]),
                _has_function(quantize, ["input_tensor", "input_global_scale", *offsets]),
                _has_function("scaled_fp4_grouped_quant", _MASKED),
                _has_function("silu_and_mul_scaled_fp4_grouped_quant", _MASKED),
                _has_function("cutlass_scaled_fp4_mm", operands),
                _has_function("cutlass_fp4_group_mm", grouped),
            ),
            "operators:route_module",
            since=Version("0.5.10"),
            until=_OPERATORS_UNTIL,
            on_demand=True,
        ),
    )


SEAMS: tuple[Seam, ...] = (
    Seam(
        "choices",
        "sglang.srt.server_args",
        _has_list("FP4_GEMM_RUNNER_BACKEND_CHOICES"),
        "patches_arguments:extend_choices",
    ),
    Seam(
        "moe choices",
        "sglang.srt.server_args",
        _has_list("MOE_RUNNER_BACKEND_CHOICES"),
        "patches_arguments:extend_moe_choices",
    ),
    Seam("enum", FP4_UTILS, _check_enum, "patches_arguments:extend_enum"),
    Seam("resolution", FP4_UTILS, _check_resolution, "patches_arguments:wrap_resolution"),
    Seam("gemm", MODELOPT, _check_gemm, "patches_gemm:route_gemm"),
    Seam(
        "pre-emption",
        "sglang.kernels.ops.gemm",
        _has_function(
            "try_qwen3x_nvfp4_gemm",
            ["input", "weight", "input_sf", "weight_sf", "alpha", "out_dtype", "out_features"],
        ),
        "patches_gemm:guard_preemption",
        since=Version("0.5.20"),
    ),
    Seam(
        "quantizer (ModelOpt)",
        MODELOPT,
        _check_quantizer("ModelOptFp4LinearMethod", "apply"),
        "patches_gemm:route_quantizer",
    ),
    Seam(
        "quantizer (compressed-tensors)",
        CT_W4A4,
        _check_quantizer("CompressedTensorsW4A4Fp4", "apply_weights"),
        "patches_gemm:route_quantizer",
    ),
    Seam(
        "lm_head",
        "sglang.srt.layers.logits_processor",
        _has_function("should_apply_lm_head_quant_method", ["lm_head", "quant_method"]),
        "patches_linear:route_lm_head",
        since=Version("0.5.15"),
    ),
    Seam(
        "ranks",
        "sglang.srt.model_executor.model_runner",
        _has_function("load_model", ["self"], cls="ModelRunner"),
        "agreement:wrap_load_model",
    ),
    Seam(
        "loaded",
        "sglang.srt.model_loader.loader",
        _has_function("load_weights_and_postprocess", ["model", "weights", "target_device"], cls="DefaultModelLoader"),
        "unserved:wrap_load",
    ),
    _admission_seam("ModelOpt", MODELOPT, "ModelOptFp4Config"),
    _admission_seam("compressed-tensors", CT_W4A4, "CompressedTensorsW4A4Fp4"),
    *(seam for convention in CONVENTIONS for seam in _linear_seams(convention)),
    *_operator_seams(),
    Seam(
        "moe value",
        "sglang.srt.server_args",
        _has_function("_handle_moe_kernel_config", ["self"], cls="ServerArgs"),
        "moe_patches:take_values",
        until=Version("0.5.15"),
    ),
    # Up to 0.5.14 what SGLang makes of auto runs on SM12x, and these two rules do not exist before 0.5.15.
    Seam(
        "moe runner",
        OVERRIDES,
        _has_function("_moe_runner_backend_quant_constraints", ["view"]),
        "moe_patches:choose_runner",
        since=Version("0.5.15"),
    ),
    Seam(
        "moe draft runner",
        OVERRIDES,
        _has_function("_speculative_moe_runner_default", ["view"]),
        "moe_patches:choose_draft_runner",
        since=Version("0.5.16"),
    ),
    Seam(
        "moe start",
        MOE_UTILS,
        _all(
            _has_function("initialize_moe_config", ["server_args"], []),
            _has_function("get_moe_runner_backend", []),
            _has_function("get_speculative_moe_runner_backend", []),
        ),
        "moe_patches:note_runners",
    ),
    Seam(
        "moe draft",
        MOE_UTILS,
        _has_function("speculative_moe_backend_context", []),
        "moe_patches:follow_draft",
    ),
    *(_expert_seam(convention) for convention in EXPERT_CONVENTIONS),
    Seam(
        "moe layer (unquantized)",
        UNQUANTIZED,
        _has_function(
            "__init__",
            ["self", "use_triton_kernels", "use_flashinfer_trtllm_moe"],
            ["self", "use_triton_kernels", "use_flashinfer_trtllm_moe", "use_deep_gemm"],
            cls="UnquantizedFusedMoEMethod",
        ),
        "moe_patches:guard_layers",
        {"cls": "UnquantizedFusedMoEMethod", "quantization": "unquantized", "seam": "moe layer (unquantized)"},
    ),
)
