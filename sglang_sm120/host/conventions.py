"""How each SGLang linear method names its tensors and writes its global scales.

ModelOpt stores *decode* scales (multiply to get the real value), compressed-tensors *encode* scales (divide).
Everything that differs between the methods stands here; the code in ``layers.py`` is the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from sglang_sm120.backends.moe_record import Quantization

QUANTIZATION = "sglang.srt.layers.quantization"
FP4_UTILS = f"{QUANTIZATION}.fp4_utils"
MODELOPT = f"{QUANTIZATION}.modelopt_quant"
SCHEMES = f"{QUANTIZATION}.compressed_tensors.schemes"
CT_W4A4 = f"{SCHEMES}.compressed_tensors_w4a4_nvfp4"
CT_W4A16 = f"{SCHEMES}.compressed_tensors_w4a16_nvfp4"
CT_W4A4_MOE = f"{SCHEMES}.compressed_tensors_w4a4_nvfp4_moe"
UNQUANTIZED = f"{QUANTIZATION}.unquant"
MOE_UTILS = "sglang.srt.layers.moe.utils"
OVERRIDES = "sglang.srt.arg_groups.overrides"
CUTLASS_MOE = "sglang.srt.layers.moe.cutlass_moe"
JIT_OPERATORS = "sglang.jit_kernel.nvfp4"


@dataclass(frozen=True)
class Convention:
    """One class of SGLang that owns NVFP4 linear layers.

    Attributes:
        label: for logs and the names of its seams.
        module, cls, apply: where the class is and what its forward method is called.
        scales: ``modelopt`` (decode scales) or ``compressed-tensors`` (encode scales).
        weight, weight_scale, weight_global: parameter names of the packed weight [N, K/2], its block scales
            [N, K/16] and its global scale, one float32 per fused shard.
        input_global: parameter name of the activation's global scale, ``None`` for weight-only layers.
        pads_to: N and K are padded to this multiple by SGLang before FlashInfer sees them.
        since: first release that has the class.
    """

    label: str
    module: str
    cls: str
    apply: str
    scales: Literal["modelopt", "compressed-tensors"]
    weight: str
    weight_scale: str
    weight_global: str
    input_global: str | None
    pads_to: int = 1
    since: Version | None = None

    @property
    def weight_only(self) -> bool:
        return self.input_global is None


CONVENTIONS: tuple[Convention, ...] = (
    Convention(
        label="ModelOpt",
        module=MODELOPT,
        cls="ModelOptFp4LinearMethod",
        apply="apply",
        scales="modelopt",
        weight="weight",
        weight_scale="weight_scale",
        weight_global="weight_scale_2",
        input_global="input_scale",
        pads_to=32,
    ),
    Convention(
        label="compressed-tensors",
        module=CT_W4A4,
        cls="CompressedTensorsW4A4Fp4",
        apply="apply_weights",
        scales="compressed-tensors",
        weight="weight_packed",
        weight_scale="weight_scale",
        weight_global="weight_global_scale",
        input_global="input_global_scale",
    ),
    Convention(
        label="ModelOpt, weight-only",
        module=MODELOPT,
        cls="ModelOptNvFp4A16LinearMethod",
        apply="apply",
        scales="modelopt",
        weight="weight",
        weight_scale="weight_scale",
        weight_global="weight_scale_2",
        input_global=None,
        since=Version("0.5.15"),
    ),
    Convention(
        label="compressed-tensors, weight-only",
        module=CT_W4A16,
        cls="CompressedTensorsW4A16Fp4",
        apply="apply_weights",
        scales="compressed-tensors",
        weight="weight_packed",
        weight_scale="weight_scale",
        weight_global="weight_global_scale",
        input_global=None,
        since=Version("0.5.22"),
    ),
)


@dataclass(frozen=True)
class ExpertConvention:
    """One class of SGLang that owns NVFP4 experts.

    Attributes:
        label: for the names of its seams.
        quantization: how it stores them.
        module, cls, apply: where it is, its name, and that of its forward method.
        signature: arguments of its constructor.
        w13_scale, w2_scale: attributes of the layer with the swizzled block scales, after SGLang's preparation.
        w13_global_scale: attribute with the global scales of w13 as they are loaded, [E, 2] where gate and up have one
            each.
        decodes: whether these multiply what is decoded (ModelOpt), or are the reciprocal of that.
        row_multiple: rows of a gated w13 must be a multiple of this, or SGLang's preparation fails.
    """

    label: str
    quantization: Quantization
    module: str
    cls: str
    apply: str
    signature: tuple[str, ...]
    w13_scale: str
    w2_scale: str
    w13_global_scale: str
    decodes: bool
    row_multiple: int


EXPERT_CONVENTIONS: tuple[ExpertConvention, ...] = (
    ExpertConvention(
        label="ModelOpt",
        quantization="modelopt_fp4",
        module=MODELOPT,
        cls="ModelOptNvFp4FusedMoEMethod",
        apply="apply",
        w13_scale="w13_blockscale_swizzled",
        w2_scale="w2_blockscale_swizzled",
        w13_global_scale="w13_weight_scale_2",
        decodes=True,
        row_multiple=128,
        signature=("self", "quant_config"),
    ),
    ExpertConvention(
        label="compressed-tensors",
        quantization="compressed-tensors",
        module=CT_W4A4_MOE,
        cls="CompressedTensorsW4A4Nvfp4MoE",
        apply="apply_weights",
        w13_scale="w13_weight_scale",
        w2_scale="w2_weight_scale",
        w13_global_scale="w13_weight_global_scale",
        decodes=False,
        row_multiple=1,
        signature=("self",),
    ),
)
