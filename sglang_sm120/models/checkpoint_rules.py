"""What must hold between the tensors of one module, of a fused projection, and the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sglang_sm120.backends import BACKENDS
from sglang_sm120.models.findings import Findings, Severity
from sglang_sm120.models.quantization import FP4_FORMATS, Quantization
from sglang_sm120.models.scale_values import Spread

#: Weights that share a block scale (:mod:`sglang_sm120.formats` has the same figure, and needs torch).
BLOCK = 16
#: Below this multiple of N and K, FlashInfer's kernels are padded for (ModelOpt) or refused (compressed-tensors).
ALIGNMENT = 32

Kind = Literal["nvfp4", "fp8", "16 or 32 bit", "other"]

_SIXTEEN_BIT = ("BF16", "F16", "F32")
#: Projections that hosts multiply as one: their last names, in order.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
_ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "w2")
#: Key and value heads are copied where there are more ranks than heads; the others every rank holds whole.
_NOT_DIVIDED = ("k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
_LINEAR = re.compile(r"(\w+_proj(_\w+)?|in_proj_\w+|w[123]|lm_head)$")


@dataclass
class Module:
    """The tensors of one module, as far as their headers tell, and the values of its global scales.

    ``globals`` maps a tensor's last name to its spread; ``None`` if it had no good value.
    """

    weight_name: str = ""
    weight_dtype: str = ""
    weight_shape: tuple[int, ...] = ()
    scale_dtype: str = ""
    scale_shape: tuple[int, ...] = ()
    globals: dict[str, Spread | None] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        if self.weight_dtype == "U8":
            return "nvfp4"
        if self.weight_dtype == "F8_E4M3":
            return "fp8"
        return "16 or 32 bit" if self.weight_dtype in _SIXTEEN_BIT else "other"

    @property
    def n(self) -> int:
        return self.weight_shape[-2]

    @property
    def k(self) -> int:
        """Input features; two e2m1 codes share a byte."""
        return self.weight_shape[-1] * (2 if self.kind == "nvfp4" else 1)


def check_modules(
    modules: Mapping[str, Module], quantization: Quantization | None, tp: int | None, findings: Findings
) -> None:
    """Check every module, then the ones that belong together."""
    for name, module in modules.items():
        if module.kind == "nvfp4" and len(module.weight_shape) >= 2:
            _check_nvfp4(name, module, quantization, findings)
        if quantization is not None and len(module.weight_shape) == 2:
            _check_configured(name, module, quantization, findings)
    _check_fused(modules, findings)
    _report_unquantized(modules, findings)
    if tp is not None:
        _check_sharding(modules, tp, findings)


def _check_nvfp4(name: str, module: Module, quantization: Quantization | None, findings: Findings) -> None:
    modelopt = module.weight_name == "weight"
    weight_global, input_global = (
        ("weight_scale_2", "input_scale") if modelopt else ("weight_global_scale", "input_global_scale")
    )
    again = "export the checkpoint again"
    if not module.scale_shape:
        what = "a packed FP4 weight without block scales"
        findings.add("block-scales-missing", "error", f"{name}.weight_scale", "missing", what, again)
    elif module.scale_dtype != "F8_E4M3":
        what = "block scales of NVFP4 are F8_E4M3"
        findings.add("block-scale-dtype", "error", f"{name}.weight_scale", module.scale_dtype, what, again)
    elif module.scale_shape[-2:] != (module.n, module.k // BLOCK):
        what = f"a weight of N={module.n}, K={module.k} has block scales of shape [{module.n}, {module.k // BLOCK}]"
        shape = list(module.scale_shape)
        findings.add("block-scale-shape", "error", f"{name}.weight_scale", shape, what, again)
    if weight_global not in module.globals:
        what = "no global scale of the weight; SGLang would use whatever is in memory"
        findings.add("global-scale-missing", "error", f"{name}.{weight_global}", "missing", what, again)
    wanted = quantization is None or quantization.format_of(name) == "nvfp4"
    if wanted and input_global not in module.globals:
        severity: Severity = "warning" if quantization is None else "error"
        what = "no scale for the activations of a W4A4 layer"
        fix = "calibrate and export again, or declare the layer weight-only (W4A16)"
        findings.add("input-scale-missing", severity, f"{name}.{input_global}", "missing", what, fix)


def _check_configured(name: str, module: Module, quantization: Quantization, findings: Findings) -> None:
    if not _LINEAR.search(name) or not module.weight_dtype:
        return
    said_fp4 = quantization.format_of(name) in FP4_FORMATS
    stored_fp4 = module.kind == "nvfp4"
    if said_fp4 == stored_fp4:
        return
    tensor = f"{name}.{module.weight_name}"
    if stored_fp4:
        what = "it is packed FP4, and the quantization configuration excludes it"
        fix = "take it out of exclude_modules (ignore), or SGLang loads packed bytes as a weight"
    else:
        what = "it is not quantized, and the quantization configuration says NVFP4"
        fix = "add it to exclude_modules (ignore) in the quantization configuration"
    findings.add("configuration-disagrees", "error", tensor, module.weight_dtype, what, fix)


def _check_fused(modules: Mapping[str, Module], findings: Findings) -> None:
    exact = " or ".join(backend.value for backend in BACKENDS.values() if backend.exact_fused_scales)
    for first in modules:
        parent, _, leaf = first.rpartition(".")
        for names in _FUSED:
            if leaf != names[0]:
                continue
            members = [f"{parent}.{name}" for name in names]
            if not all(member in modules for member in members):
                continue
            in_experts = ".experts." in first
            for scale in ("weight_scale_2", "weight_global_scale"):
                fix = (
                    "export with one scale for the pair: SGLang takes the first one's for both"
                    if in_experts
                    else f"serve with --fp4-gemm-backend {exact}, or export with one scale for them"
                )
                what = "they are multiplied as one, and their global scales differ by a factor of {factor}"
                _compare(modules, members, scale, ("fused-scales-differ", "error", what, fix), findings)
            for scale in ("input_scale", "input_global_scale"):
                what = (
                    "they share one input, and its scales differ by a factor of {factor}: SGLang takes the largest, "
                    "which costs accuracy"
                )
                fix = f"export with one scale for them, or serve with --fp4-gemm-backend {exact}"
                if in_experts:
                    fix = "export with one scale for the pair"
                _compare(modules, members, scale, ("fused-inputs-differ", "warning", what, fix), findings)


def _compare(
    modules: Mapping[str, Module],
    members: list[str],
    scale: str,
    verdict: tuple[str, Severity, str, str],
    findings: Findings,
) -> None:
    spreads = [modules[member].globals.get(scale) for member in members if scale in modules[member].globals]
    known = [spread for spread in spreads if spread is not None]
    # A tensor with one value per expert cannot be compared by its spread alone.
    if len(known) < 2 or any(spread.count > 1 for spread in known) or len({spread.smallest for spread in known}) == 1:
        return
    code, severity, what, fix = verdict
    factor = max(spread.smallest for spread in known) / min(spread.smallest for spread in known)
    short = "/".join(member.rpartition(".")[2] for member in members)
    values = ", ".join(f"{spread.smallest:.6g}" for spread in known)
    findings.add(
        code,
        severity,
        f"{members[0].rpartition('.')[0]}.{{{short}}}.{scale}",
        values,
        what.format(factor=f"{factor:.3g}"),
        fix,
    )


def _report_unquantized(modules: Mapping[str, Module], findings: Findings) -> None:
    """Sum up the linear layers that stayed in 16 bit, by name without layer numbers."""
    if not any(module.kind == "nvfp4" for module in modules.values()):
        return
    sums: dict[str, tuple[int, int]] = {}
    for name, module in modules.items():
        if module.kind == "16 or 32 bit" and len(module.weight_shape) == 2 and _LINEAR.search(name):
            count, size = sums.get(_family(name), (0, 0))
            sums[_family(name)] = (count + 1, size + module.n * module.k * (4 if module.weight_dtype == "F32" else 2))
    for name, (count, size) in sums.items():
        fix = "nothing, if it is meant; no FP4 backend serves them"
        findings.add("not-quantized", "info", name, f"{size / 1e9:.3f} GB", f"{count} layers stayed in 16 bit", fix)


def _check_sharding(modules: Mapping[str, Module], tp: int, findings: Findings) -> None:
    seen: set[tuple[str, int, int]] = set()
    for name, module in modules.items():
        divided = name.rpartition(".")[2] not in _NOT_DIVIDED
        if module.kind != "nvfp4" or len(module.weight_shape) < 2 or not divided:
            continue
        key = (_family(name), module.n, module.k)
        if key not in seen:
            seen.add(key)
            for severity, value, what in _shard_problems(name, module, tp):
                fix = "take another --tp; in experts, --ep keeps them whole"
                findings.add("shards-badly", severity, key[0], value, what, fix)


def _shard_problems(name: str, module: Module, tp: int) -> Iterator[tuple[Severity, str, str]]:
    row = name.rpartition(".")[2] in _ROW_PARALLEL
    size, axis = (module.k, "K") if row else (module.n, "N")
    if size % tp:
        yield "error", f"{axis}={size}", f"{tp} ranks cannot share it equally"
        return
    part = size // tp
    if row and part % BLOCK:
        yield "error", f"{axis}={part}", f"a rank's K is no whole number of blocks of {BLOCK}"
    elif part % ALIGNMENT:
        what = f"a rank's {axis} is no multiple of {ALIGNMENT}: SGLang pads it for ModelOpt, other kernels refuse it"
        yield "warning", f"{axis}={part}", what


def _family(name: str) -> str:
    """A module's name with every number replaced by a star."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
