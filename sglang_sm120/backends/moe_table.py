"""The rows of ``--moe-runner-backend``: what each runner needs for NVFP4 experts, where, and what goes wrong.

The record types and the verdict are those of the dense rows in ``table.py``. One thing is different: SGLang does not
always run what the value says, so :data:`ROUTES` holds what it runs instead. "code" sources name the release that was
read; each statement about SGLang was checked against all releases from 0.5.9 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglang_sm120.backends.moe_record import Quantization, Route
from sglang_sm120.backends.record import (
    CAPABILITIES,
    Absence,
    Backend,
    Capability,
    CapabilityRow,
    Fault,
    Preference,
    Requirement,
    Source,
)
from sglang_sm120.backends.table import BACKENDS, BEFORE_BLACKWELL, SM10X, SM12X


def _issue(ref: str) -> Source:
    return Source("issue", ref)


def _code(ref: str) -> Source:
    return Source("code", ref)


_METHOD = "srt/layers/quantization/modelopt_quant.py (ModelOptNvFp4FusedMoEMethod)"
_SCHEME = (
    "srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4_moe.py "
    "(CompressedTensorsW4A4Nvfp4MoE)"
)
_CUTLASS_MODULES = _code("flashinfer 0.7.4 jit/fused_moe.py (gen_cutlass_fused_moe_sm120_module)")
_CUBINS = _issue("flashinfer#3670")
_CUTE_DSL = _code("flashinfer 0.7.4 fused_moe/cute_dsl/fused_moe.py (supported_compute_capability)")

#: What FlashInfer needs to compile anything at all stands in the dense rows.
_DENSE = BACKENDS["flashinfer_cutlass"]
_NVCC: dict[Capability, Requirement] = {
    row.capability: bound for row in _DENSE.rows for bound in row.requires if bound.package == "cuda_toolkit"
}
_JIT_WANTS_12_9 = next(fault for fault in _DENSE.faults if fault.name == "jit-needs-cuda-12.9")

#: The define -DCUTLASS_ENABLE_GDC_FOR_SM100=1 is missing in jit/fused_moe.py up to 0.6.7.post3 and there from
#: 0.6.8.post1; the dense GEMM got it one release earlier.
_PDL_RACE = Fault(
    name="moe-pdl-race",
    capabilities=SM12X,
    when=(Requirement("flashinfer", "<0.6.8", _code("flashinfer 0.6.8.post1 jit/fused_moe.py")),),
    effect="under load the grouped GEMM reads what the kernel before it has not written yet, because it was compiled "
    "without the wait that its launch attribute needs: illegal instructions and garbage",
    remedy="install flashinfer-python >= 0.6.8.post1",
    severity="refuse",
    source=_issue("flashinfer#2913"),
)

_FLASHINFER_CUTLASS = Backend(
    value="flashinfer_cutlass",
    enum_name="FLASHINFER_CUTLASS",
    provider="flashinfer",
    summary="grouped CUTLASS kernels of FlashInfer; SGLang's own choice for ModelOpt NVFP4 on SM12x since 0.5.13",
    native_since="0.5.9",
    rows=tuple(
        CapabilityRow(
            capability,
            _CUTLASS_MODULES,
            requires=(
                Requirement("flashinfer", ">=0.6.3", _code("flashinfer 0.6.3 jit/fused_moe.py")),
                *([_NVCC[capability]] if capability in _NVCC else []),
            ),
        )
        for capability in (*SM10X, *SM12X)
    ),
    absent=_DENSE.absent,
    faults=(_PDL_RACE, _JIT_WANTS_12_9),
)

_GROUPED_GEMM = _code("sglang 0.5.14 jit_kernel/nvfp4.py (cutlass_fp4_group_mm)")
_CUTLASS = Backend(
    value="cutlass",
    enum_name="CUTLASS",
    provider="sglang",
    summary="grouped CUTLASS kernels of SGLang up to 0.5.15; what auto and most values end in there",
    native_since="0.5.9",
    rows=tuple(
        CapabilityRow(
            capability,
            _GROUPED_GEMM,
            requires=(
                Requirement("sglang", "<0.5.16", _code(f"sglang 0.5.16 {_METHOD}")),
                # Up to 0.5.9 the kernels come with the sgl-kernel wheel, which has sm_100a and sm_120a alone.
                *(
                    [Requirement("sglang", ">=0.5.10", _issue("sglang#17421"))]
                    if capability in ((10, 3), (12, 1))
                    else []
                ),
                *([_NVCC[capability]] if capability in _NVCC else []),
            ),
        )
        for capability in (*SM10X, *SM12X)
    ),
    absent=(Absence(BEFORE_BLACKWELL, "the kernels refuse capabilities below 10.0", _GROUPED_GEMM),),
)

_MARLIN = Backend(
    value="marlin",
    enum_name="MARLIN",
    provider="sglang",
    summary="weight-only kernels (W4A16): FP4 weights, activations stay bf16 or fp16",
    native_since="0.5.13",
    rows=tuple(
        CapabilityRow(
            capability,
            _code(f"sglang 0.5.23 {_METHOD}"),
            requires=(Requirement("sglang", ">=0.5.13", _code(f"sglang 0.5.13 {_METHOD}")),),
        )
        for capability in CAPABILITIES
    ),
    faults=(
        Fault(
            name="moe-weight-only",
            capabilities=SM12X,
            when=(),
            effect="Marlin multiplies unquantized activations; unless the experts are weight-only themselves, these "
            "are other numbers than the checkpoint was calibrated for",
            remedy="take another runner unless this is what you want",
            severity="warn",
            source=_code("sglang 0.5.23 srt/layers/quantization/marlin_utils_fp4.py"),
        ),
    ),
)


def _sm10x_only(value: str, since: str, summary: str, why: str, source: Source) -> Backend:
    """Record of a runner whose kernels exist for capability 10.x and nowhere else."""
    return Backend(
        value=value,
        enum_name=value.upper(),
        provider="sglang" if value.startswith("experimental") else "flashinfer",
        summary=summary,
        native_since=since,
        rows=tuple(CapabilityRow(capability, source) for capability in SM10X),
        absent=(Absence((*BEFORE_BLACKWELL, *SM12X), why, source),),
    )


_B12X_DENSE = BACKENDS["flashinfer_b12x"]
_B12X_EXPERTS = "fused_moe/cute_dsl/b12x_moe.py (B12xMoEWrapper)"
_FLASHINFER_B12X = Backend(
    value="flashinfer_b12x",
    enum_name="FLASHINFER_B12X",
    provider="flashinfer",
    summary="FlashInfer's fused CuTe DSL experts for SM12x (b12x); called by this package, which never saw them run",
    rows=tuple(
        CapabilityRow(
            capability,
            _code(f"flashinfer 0.7.4 {_B12X_EXPERTS}"),
            requires=(
                # Ids of -1, and workspaces that layers share.
                Requirement("flashinfer", ">=0.7.1", _code(f"flashinfer 0.7.1 {_B12X_EXPERTS}")),
                Requirement("cuda_toolkit", ">=13.0", _code(f"flashinfer 0.7.4 {_B12X_EXPERTS}")),
                Requirement("cutlass_dsl", ">=4.7", _code("flashinfer 0.7.1 metadata")),
            ),
            out_dtypes=("bfloat16",),
        )
        for capability in SM12X
    ),
    absent=_B12X_DENSE.absent,
    faults=(
        Fault(
            name="b12x-experts-unexplained-writes",
            capabilities=SM12X,
            when=(),
            effect="writes beyond its buffers were reported up to FlashInfer 0.7.0 (512 experts of top_k 10, H 2560, I "
            "640; many long prompts at once, vllm#50189) and not explained, so no release is known to be free of them",
            remedy="run sglang-sm120 probe first, and take another runner if a server dies of an illegal memory access",
            severity="warn",
            source=_issue("flashinfer#5446"),
        ),
    ),
    needs_probe=True,
    implementation="sglang_sm120.backends.flashinfer_b12x_experts",
)

_SM120_DENSE = BACKENDS["sm120"]
_OURS_SHOWN_BY: dict[Capability, Source] = {
    **{row.capability: row.source for row in _SM120_DENSE.rows},
    (9, 0): Source("test", "tests/kernels/gpu/test_gpu_moe.py"),
}
_SM120 = Backend(
    value="sm120",
    enum_name="SM120",
    provider="sglang_sm120",
    summary="CUDA kernels of this package, meant for few tokens; not measured on SM12x, so nothing recommends them yet",
    rows=tuple(
        CapabilityRow(row.capability, _OURS_SHOWN_BY[row.capability], requires=row.requires)
        for row in _SM120_DENSE.rows
    ),
    faults=_SM120_DENSE.faults,
    needs_probe=True,
    implementation="sglang_sm120.native_moe",
)

_TORCH_REFERENCE = Backend(
    value="torch_reference",
    enum_name="TORCH_REFERENCE",
    provider="sglang_sm120",
    summary="The oracle in torch, exact and very slow, without CUDA graphs; any device, CPU included",
    any_device=True,
    rows=tuple(
        CapabilityRow(capability, Source("test", "tests/host/test_moe_layers.py")) for capability in CAPABILITIES
    ),
    implementation="sglang_sm120.backends.torch_reference",
)

_SM120_TUNED = Backend(
    value="sm120_tuned",
    enum_name="SM120_TUNED",
    provider="sglang_sm120",
    summary="For each batch the runner that `sglang-sm120 tune` measured fastest for these experts on this card",
    any_device=True,
    rows=tuple(
        CapabilityRow(capability, Source("test", "tests/host/test_tuned_experts.py")) for capability in CAPABILITIES
    ),
    per_call=True,
)

_NO_CUBINS = "its kernels are binaries for capability 10.x only, and the first forward finds none"

#: Every runner that the package knows for NVFP4 experts, in the order in which they are shown.
MOE_RUNNERS: Mapping[str, Backend] = MappingProxyType(
    {
        runner.value: runner
        for runner in (
            _FLASHINFER_CUTLASS,
            _CUTLASS,
            _MARLIN,
            _sm10x_only("flashinfer_trtllm", "0.5.9", "TensorRT-LLM kernels through FlashInfer", _NO_CUBINS, _CUBINS),
            _sm10x_only(
                "flashinfer_trtllm_routed",
                "0.5.10",
                "TensorRT-LLM kernels through FlashInfer, routed by SGLang",
                _NO_CUBINS,
                _CUBINS,
            ),
            _sm10x_only(
                "experimental_sgl_trtllm",
                "0.5.13",
                "TensorRT-LLM kernels in a build of SGLang's own",
                _NO_CUBINS,
                _CUBINS,
            ),
            _sm10x_only(
                "flashinfer_cutedsl",
                "0.5.9",
                "CuTe DSL kernels of FlashInfer",
                "FlashInfer admits its CuTe DSL experts on capability 10.x only",
                _CUTE_DSL,
            ),
            _sm10x_only(
                "flashinfer_megamoe",
                "0.5.20",
                "one kernel for dispatch, both GEMMs and combine",
                "SGLang admits it on capability 10.x only",
                _code("sglang 0.5.23 srt/arg_groups/moe_hook.py (handle_a2a_moe)"),
            ),
            _FLASHINFER_B12X,
            _SM120,
            _TORCH_REFERENCE,
            _SM120_TUNED,
        )
    }
)

#: Values that ``ops.nvfp4_moe`` calls, and with the one that chooses among runners: what every SGLang gets from us.
CALLED_RUNNERS: tuple[str, ...] = tuple(value for value, record in MOE_RUNNERS.items() if record.implementation)
OUR_RUNNERS: tuple[str, ...] = (*CALLED_RUNNERS, _SM120_TUNED.value)
#: Those of them that multiply with code of this package: they take any batch, whatever ids it has, and hand nothing
#: in 16 bit from kernel to kernel.
KERNEL_RUNNERS: tuple[str, ...] = tuple(
    value for value in CALLED_RUNNERS if MOE_RUNNERS[value].provider == "sglang_sm120"
)
#: What can be called without a server, on the same weights.
CALLABLE_RUNNERS: tuple[str, ...] = (_FLASHINFER_CUTLASS.value, *CALLED_RUNNERS)

_MODELOPT: tuple[Quantization, ...] = ("modelopt_fp4", "modelopt_mixed", "fp8")
_MARLIN_VALUES = ("marlin", "experimental_sgl_marlin", "lora_marlin")
_WEIGHT_ONLY_RULE = _code("sglang 0.5.23 srt/arg_groups/model_overrides/qwen3_moe.py")
_TRTLLM = ("flashinfer_trtllm", "experimental_sgl_trtllm")
#: Values under which SGLang's dispatcher leaves the numbers of experts as they are.
_GLOBAL_IDS = (
    "flashinfer_cutlass",
    "flashinfer_cutedsl",
    "flashinfer_trtllm_routed",
    "flashinfer_mxfp4",
    "flashinfer_megamoe",
    "hpc_ops",
)
_OTHERS_RAISE = (
    "SGLang has no NVFP4 experts for it and raises NotImplementedError at the first forward, when the weights are "
    "loaded"
)

#: What SGLang runs for a value. A kind that no route names is none of this package's business.
ROUTES: tuple[Route, ...] = (
    *(
        Route(
            ("modelopt_fp4", "modelopt_mixed", "compressed-tensors"),
            (runner,),
            "",
            runner,
            Source("test", "tests/host/test_moe_layers.py"),
        )
        for runner in OUR_RUNNERS
    ),
    Route(
        ("fp8",),
        OUR_RUNNERS,
        "",
        None,
        _code("sglang 0.5.23 srt/arg_groups/moe_hook.py (handle_moe_kernel_config)"),
        "they need weights as flashinfer_cutlass keeps them, which SGLang refuses with this quantization",
    ),
    *(
        Route(_MODELOPT, (runner,), "", runner, _code(f"sglang 0.5.23 {_METHOD}"))
        for runner in (
            "flashinfer_cutlass",
            "flashinfer_trtllm",
            "flashinfer_trtllm_routed",
            "experimental_sgl_trtllm",
            "flashinfer_cutedsl",
            "flashinfer_megamoe",
        )
    ),
    Route(_MODELOPT, _MARLIN_VALUES, ">=0.5.13", "marlin", _code(f"sglang 0.5.13 {_METHOD}")),
    Route(
        _MODELOPT,
        ("cutlass",),
        ">=0.5.11,<0.5.15",
        None,
        _code("sglang 0.5.14 srt/layers/moe/moe_runner/runner.py (MoeRunner)"),
        "this SGLang has no runner of that name and raises NotImplementedError when the layer is made",
    ),
    Route(
        _MODELOPT,
        None,
        "<0.5.16",
        None,
        _code(f"sglang 0.5.15 {_METHOD}"),
        "with expert parallelism this SGLang multiplies the input scales of all experts with the weight scales of a "
        "rank's, and stops with a RuntimeError when the weights are loaded",
        expert_parallel=True,
    ),
    Route(_MODELOPT, None, "<0.5.16", "cutlass", _code(f"sglang 0.5.15 {_METHOD}")),
    Route(_MODELOPT, ("auto",), "", "flashinfer_trtllm", _code(f"sglang 0.5.16 {_METHOD}")),
    Route(_MODELOPT, None, "", None, _code(f"sglang 0.5.16 {_METHOD}"), _OTHERS_RAISE),
    Route(("nvfp4_weight_only",), _MARLIN_VALUES, ">=0.5.15", "marlin", _WEIGHT_ONLY_RULE),
    Route(
        ("nvfp4_weight_only",),
        None,
        "",
        None,
        _WEIGHT_ONLY_RULE,
        "these experts have no input scales, and SGLang's other runners read some all the same",
    ),
    Route(("compressed-tensors",), _TRTLLM, "", "flashinfer_trtllm", _code(f"sglang 0.5.23 {_SCHEME}")),
    Route(("compressed-tensors",), None, "<0.5.16", "cutlass", _code(f"sglang 0.5.15 {_SCHEME}")),
    # #30448 brought FlashInfer's kernels, which want up before gate; the loader learned it one release later.
    Route(
        ("compressed-tensors",),
        None,
        ">=0.5.16,<0.5.17",
        None,
        _issue("sglang#32430"),
        "this SGLang hands gate and up over in the wrong order and the model answers with garbage; 0.5.17 does not",
    ),
    Route(
        ("compressed-tensors",),
        _GLOBAL_IDS,
        ">=0.5.17",
        "flashinfer_cutlass",
        _code("sglang 0.5.17 srt/layers/moe/token_dispatcher/standard.py (skip_local_expert_mapping)"),
    ),
    # 0.5.23 asks the layer which runner it has, not the command line.
    Route(
        ("compressed-tensors",),
        None,
        ">=0.5.17,<0.5.23",
        None,
        _code("sglang 0.5.22 srt/layers/moe/token_dispatcher/standard.py (skip_local_expert_mapping)"),
        "with expert parallelism this SGLang renumbers the experts of each rank from 0 and then runs kernels that "
        "count them over all ranks: experts of every rank but the first add nothing; 0.5.23 does not",
        expert_parallel=True,
    ),
    Route(("compressed-tensors",), None, "", "flashinfer_cutlass", _code(f"sglang 0.5.16 {_SCHEME}")),
    # Unquantized experts, the usual ones of a draft layer, are judged where the runner has no kernels at all.
    *(
        Route(
            ("unquantized",),
            (runner,),
            "",
            runner,
            _code("sglang 0.5.23 srt/layers/quantization/unquant.py (UnquantizedFusedMoEMethod)"),
        )
        for runner in ("flashinfer_trtllm", "flashinfer_trtllm_routed")
    ),
)

_SGLANG_RULE = _code("sglang 0.5.23 srt/arg_groups/overrides.py (_moe_runner_backend_quant_constraints)")

#: Values of ``--quantization`` with which SGLang starts ``--moe-runner-backend flashinfer_cutlass``. With any other it
#: stops in an assertion while the arguments are resolved; without the flag it does not ask. Sources: sglang 0.5.9
#: srt/server_args.py (_handle_moe_kernel_config) to 0.5.23 srt/arg_groups/moe_hook.py (handle_moe_kernel_config).
CUTLASS_QUANTIZATIONS = frozenset({"modelopt_fp4", "modelopt_fp8", "modelopt_mixed"})


def _since(release: str, source: Source) -> tuple[Requirement, ...]:
    return (Requirement("sglang", f">={release}", source),)


#: What to start with on SM12x: the first whose bounds hold and that runs. ``auto`` stands where SGLang's own choice is
#: the right one. Nothing stands here for ``fp8``: SGLang refuses ``flashinfer_cutlass`` with that quantization, and
#: marlin changes the numbers, so the user has to choose.
MOE_AUTO: Mapping[Quantization, tuple[Preference, ...]] = MappingProxyType(
    {
        "modelopt_fp4": (
            Preference(
                "flashinfer_cutlass",
                "SGLang's own choice for SM12x since 0.5.13, made only where it knows the quantization in time",
                _SGLANG_RULE,
                _since("0.5.13", _code("sglang 0.5.13 srt/server_args.py (_handle_moe_kernel_config)")),
            ),
            Preference("auto", "ends in SGLang's own grouped CUTLASS kernels", _code(f"sglang 0.5.15 {_METHOD}")),
            Preference("flashinfer_cutlass", "runs where SGLang's own kernels do not", _CUTLASS_MODULES),
        ),
        "modelopt_mixed": (
            Preference(
                "flashinfer_cutlass",
                "what SGLang takes on SM12x for the same experts in a modelopt_fp4 checkpoint",
                _SGLANG_RULE,
                _since("0.5.16", _code(f"sglang 0.5.16 {_METHOD}")),
            ),
            Preference(
                "auto",
                "ends in SGLang's own grouped CUTLASS kernels",
                _code(f"sglang 0.5.15 {_METHOD}"),
                _since("0.5.10", _code("sglang 0.5.10 srt/layers/quantization/__init__.py")),
            ),
        ),
        "nvfp4_weight_only": (
            Preference(
                "marlin",
                "SGLang's only runner for weight-only experts on this card",
                _WEIGHT_ONLY_RULE,
                _since("0.5.15", _code("sglang 0.5.15 srt/layers/quantization/modelopt_quant.py (nvfp4a16_config)")),
            ),
        ),
        "compressed-tensors": (
            Preference(
                "auto",
                "SGLang's scheme takes CUTLASS kernels whatever the value says, except for TensorRT-LLM's",
                _code(f"sglang 0.5.23 {_SCHEME}"),
            ),
            Preference(
                "flashinfer_cutlass",
                "the same kernels with expert parallelism, where auto numbers the experts wrongly",
                _code("sglang 0.5.22 srt/layers/moe/token_dispatcher/standard.py (skip_local_expert_mapping)"),
                _since("0.5.17", _code(f"sglang 0.5.17 {_SCHEME}")),
            ),
        ),
    }
)
