"""SGLang's own NVFP4 operators, 0.5.9 to 0.5.15: what they are called, whose code they are, where that code runs.

From 0.5.16 on SGLang has none; FlashInfer does all of it. The record types and the verdict are those of ``table.py``.
Schemas are those of the sgl-kernel 0.3.21 wheel that 0.5.9 pins; the Python functions of ``sglang.jit_kernel.nvfp4``
take the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_sm120.backends.record import (
    Absence,
    Backend,
    CapabilityRow,
    HostFacts,
    Requirement,
    Source,
)
from sglang_sm120.backends.table import BACKENDS
from sglang_sm120.backends.verdict import holds, judge

_WHEEL_CODE = Source("code", "sgl_kernel 0.3.21 sm100/common_ops.abi3.so (targets and symbols)")
_CALLERS = Source("code", "sglang 0.5.9 srt/layers/moe/cutlass_moe.py")
_JIT_CODE = Source("code", "sglang 0.5.14 jit_kernel/nvfp4.py")


@dataclass(frozen=True)
class Operator:
    """One Python function of the old surface.

    Attributes:
        name: what callers import, from ``sgl_kernel`` (0.5.9) or ``sglang.jit_kernel.nvfp4``.
        torch_name: the operator of ``torch.ops.sgl_kernel`` that it calls in the wheel; two functions share one.
        schema: arguments and results of that operator; empty where the wheel has none.
        since: first SGLang release that has the function.
    """

    name: str
    torch_name: str
    schema: str
    since: str = "0.5.9"


_MASKED = (
    "silu_and_mul_scaled_fp4_experts_quant",
    "(Tensor! output, Tensor! output_scale, Tensor input, Tensor input_global_scale, Tensor mask, "
    "bool use_silu_and_mul) -> ()",
)

#: Every operator, quantizers first.
OPERATORS: tuple[Operator, ...] = (
    Operator(
        "scaled_fp4_quant",
        "scaled_fp4_quant",
        "(Tensor! output, Tensor! input, Tensor! output_scale, Tensor! input_scale) -> ()",
    ),
    Operator(
        "scaled_fp4_experts_quant",
        "scaled_fp4_experts_quant",
        "(Tensor! output, Tensor! output_scale, Tensor input, Tensor input_global_scale, "
        "Tensor input_offset_by_experts, Tensor output_scale_offset_by_experts) -> ()",
    ),
    Operator("silu_and_mul_scaled_fp4_experts_quant_packed", "", "", since="0.5.15"),
    Operator("scaled_fp4_grouped_quant", *_MASKED),
    Operator("silu_and_mul_scaled_fp4_grouped_quant", *_MASKED),
    Operator(
        "cutlass_scaled_fp4_mm",
        "cutlass_scaled_fp4_mm",
        "(Tensor! out, Tensor a, Tensor b, Tensor block_scale_a, Tensor block_scale_b, Tensor alpha) -> ()",
    ),
    Operator(
        "cutlass_fp4_group_mm",
        "cutlass_fp4_group_mm",
        "(Tensor! output, Tensor a, Tensor b, Tensor a_blockscale, Tensor b_blockscale, Tensor alphas, "
        "Tensor ab_strides, Tensor c_strides, Tensor problem_sizes, Tensor expert_offsets, Tensor sf_offsets) -> ()",
    ),
)

_CUTLASS = BACKENDS["cutlass"]

#: The wheel of 0.5.9: compiled ahead, machine code for exactly these capabilities and no PTX. Somebody may have built
#: another one: ``HostFacts.wheel_code`` is what the installed library says of itself. It can take a row back and cannot
#: add one, because the sources send these capabilities and no other to a grouped GEMM.
_WHEEL = Backend(
    value="sgl_kernel",
    enum_name="SGL_KERNEL",
    provider="sglang",
    summary="the sgl-kernel wheel that SGLang 0.5.9 pins",
    rows=tuple(CapabilityRow(capability, _WHEEL_CODE) for capability in ((10, 0), (12, 0))),
    absent=(
        *_CUTLASS.absent,
        Absence(
            ((10, 3), (12, 1)),
            "its grouped GEMM is for 10.0 and 12.0 alone, and the wheel on PyPI has code for no other such card",
            _WHEEL_CODE,
        ),
    ),
)

#: Compiled on the machine, for the card that is there. Unlike the dense value it needs nothing of FlashInfer.
_JIT = Backend(
    value="sglang.jit_kernel.nvfp4",
    enum_name="JIT_KERNEL",
    provider="sglang",
    summary="kernels that SGLang 0.5.10 to 0.5.15 compiles at start",
    rows=tuple(
        CapabilityRow(row.capability, _JIT_CODE, tuple(r for r in row.requires if r.package == "cuda_toolkit"))
        for row in _CUTLASS.rows
    ),
    absent=_CUTLASS.absent,
)

#: Which code has the operators, by SGLang release.
PROVIDERS: tuple[tuple[Requirement, Backend], ...] = (
    (Requirement("sglang", ">=0.5.9,<0.5.10", _CALLERS), _WHEEL),
    (Requirement("sglang", ">=0.5.10,<0.5.16", _JIT_CODE), _JIT),
)


def provider_of(facts: HostFacts) -> Backend | None:
    """Return whose operators the installed SGLang calls; ``None`` where it calls none."""
    return next((provider for releases, provider in PROVIDERS if holds(releases, facts)), None)


def calls_the_wheel(facts: HostFacts) -> bool:
    """Return whether the installed SGLang's operators are those of the sgl-kernel wheel."""
    return provider_of(facts) is _WHEEL


def has_no_kernels_here(facts: HostFacts) -> str | None:
    """Return why SGLang's own operators cannot run on this machine; ``None`` if they can, or if there are none."""
    provider = provider_of(facts)
    if provider is None:
        return None
    judged = judge(provider, facts)
    if judged.status != "ok":
        return judged.reason
    if calls_the_wheel(facts) and facts.wheel_code is False and facts.capability is not None:
        return "was compiled for other cards than compute capability {}.{}".format(*facts.capability)
    return None


def how_it_is_known(facts: HostFacts) -> str:
    """Say what the installed wheel's library adds to the table; empty where nothing was compiled ahead."""
    if not calls_the_wheel(facts):
        return ""
    if facts.wheel_code is None:
        return "by the table of published wheels; its library was not read"
    if facts.wheel_code:
        return "its library has code for this card"
    return "its library has no code for this card"
