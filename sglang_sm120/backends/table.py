"""The one table: what every value of ``--fp4-gemm-backend`` needs, where, and what is known to go wrong.

Values, resolution, guards, command line, documentation and test skips all read it. To add a backend, add a
record to ``BACKENDS``. A statement without a source does not belong here; "code" sources name the release that
was read. FlashInfer bounds are the first release whose wheel has the thing, found by reading every release
between the pins of SGLang 0.5.9 (0.6.3) and 0.5.23 (0.7.2), and 0.7.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglang_sm120.backends.record import (
    CAPABILITIES,
    Absence,
    Backend,
    Capability,
    CapabilityRow,
    Fault,
    Preference,
    Requirement,
    ShapeRule,
    Source,
)

#: The newest FlashInfer whose source this table was checked against. A newer one is believed when it says that
#: it supports a capability for which the table has no row.
NEWEST_FLASHINFER_READ = "0.7.4"


def _issue(ref: str) -> Source:
    return Source("issue", ref)


def _code(ref: str) -> Source:
    return Source("code", ref)


SM10X: tuple[Capability, ...] = ((10, 0), (10, 3))
SM12X: tuple[Capability, ...] = ((12, 0), (12, 1))
BEFORE_BLACKWELL: tuple[Capability, ...] = ((8, 0), (9, 0))

_GEMM = _code("flashinfer 0.7.4 gemm/gemm_base.py (supported_compute_capability)")
_ARCH = _code("flashinfer 0.7.4 compilation_context.py (_normalize_cuda_arch)")
_PADDING = _code("sglang 0.5.23 srt/layers/quantization/modelopt_quant.py (FP4_GEMM_ALIGNMENT)")

_FLASHINFER = Requirement("flashinfer", ">=0.6.3", _code("flashinfer 0.6.3 gemm/gemm_base.py (mm_fp4)"))
#: FlashInfer compiles its quantizer and its kernels on the machine, for the exact card.
_NVCC: dict[Capability, Requirement] = {
    (12, 0): Requirement("cuda_toolkit", ">=12.8", _ARCH),
    (12, 1): Requirement("cuda_toolkit", ">=12.9", _ARCH),
}
#: vllm#48898: with K not a multiple of 32, three different GEMMs multiplied stale scale columns.
_MULTIPLE_OF_32 = ShapeRule(32, 32, _PADDING)

_NOT_BEFORE_BLACKWELL = Absence(
    BEFORE_BLACKWELL, "the kernels use the FP4 instructions of capability 10.0 and up", _GEMM
)

_JIT_WANTS_12_9 = Fault(
    name="jit-needs-cuda-12.9",
    capabilities=((12, 0),),
    when=(
        Requirement("flashinfer", ">=0.6.7,<0.7.1", _code("flashinfer 0.7.0 compilation_context.py")),
        Requirement("cuda_toolkit", "<12.9", _code("flashinfer 0.7.0 compilation_context.py")),
    ),
    effect='this FlashInfer compiles nothing for the card: it raises "SM 12.x requires CUDA >= 12.9"',
    remedy="install a CUDA toolkit >= 12.9, or flashinfer-python >= 0.7.1",
    severity="refuse",
    source=_issue("flashinfer#3633"),
)
_PDL_RACE = Fault(
    name="pdl-race",
    capabilities=SM12X,
    # The define -DCUTLASS_ENABLE_GDC_FOR_SM100=1 is missing in jit/gemm/core.py up to 0.6.6 and there from
    # 0.6.7. (flashinfer#2716 was reverted before 0.6.6; flashinfer#2780 is the fix that stayed.)
    when=(Requirement("flashinfer", "<0.6.7", _code("flashinfer 0.6.6 and 0.6.7 jit/gemm/core.py")),),
    effect="under load the CUTLASS GEMM leaves output tiles unwritten (NaN or garbage), because it was compiled "
    "without the wait that its launch attribute needs",
    remedy="install flashinfer-python >= 0.6.7",
    severity="refuse",
    source=_issue("flashinfer#2708"),
)
_WORKSPACE_RESIZE = Fault(
    name="cudnn-workspace-resize",
    capabilities=SM12X,
    # Up to 0.6.11.post3 a call that needs more gets a buffer of its own, and from 0.7.0 on again.
    when=(
        Requirement(
            "flashinfer", ">=0.6.12,<0.7.0", _code("flashinfer 0.6.12 gemm/gemm_base.py (execute_cudnn_gemm_fp4_graph)")
        ),
    ),
    effect="FlashInfer may move cuDNN's workspace after CUDA graphs captured its address; servers died or gave "
    "garbage after minutes of load",
    remedy="install flashinfer-python >= 0.7.0, or start with --disable-cuda-graph",
    severity="warn",
    source=_issue("vllm#52540"),
)
_PLANS_OF_ANOTHER_GRAPH = Fault(
    name="cudnn-plan-of-another-graph",
    capabilities=(*SM10X, *SM12X),
    # Graphs for ranges of M came with 0.6.8 and need this cuDNN; 0.6.11 numbers plans and graphs by the same ranges.
    when=(
        Requirement("flashinfer", ">=0.6.8,<0.6.11", _code("flashinfer 0.6.8.post1 and 0.6.11 gemm/gemm_base.py")),
        Requirement("cudnn", ">=9.21", _code("flashinfer 0.6.9 gemm/gemm_base.py (is_cudnn_override_shape_available)")),
    ),
    effect="FlashInfer runs plans of cuDNN that were chosen for another graph: a few elements are NaN or infinite "
    "where M is no power of two",
    remedy="install flashinfer-python >= 0.6.11",
    severity="refuse",
    source=_issue("flashinfer#3192"),
)
_DSL_WHEELS = Fault(
    name="cutlass-dsl-wheels-overlap",
    capabilities=SM12X,
    when=(
        Requirement("cutlass_dsl", ">=4.4,<4.6", _issue("NVIDIA/cutlass#3259")),
        Requirement("cuda", ">=13.0", _issue("NVIDIA/cutlass#3259")),
    ),
    effect="two wheels of this CuTe DSL (libs-base, libs-cu13) write different files to the same paths; if the "
    "wrong one was installed last, the kernel does not compile",
    remedy="if it does not compile: pip install --force-reinstall --no-deps nvidia-cutlass-dsl-libs-cu13 in the "
    "version of nvidia-cutlass-dsl",
    severity="warn",
    source=_issue("NVIDIA/cutlass#3259"),
)
_DSL_FOR_121 = Requirement("cutlass_dsl", ">=4.5", _issue("vllm#40082"))


def _flashinfer_rows(
    capabilities: tuple[Capability, ...], *requires: Requirement, floor: Requirement = _FLASHINFER
) -> tuple[CapabilityRow, ...]:
    """Rows of a FlashInfer backend that needs the same on each capability, plus nvcc for SM12x."""
    return tuple(
        CapabilityRow(
            capability,
            _GEMM,
            requires=(floor, *([_NVCC[capability]] if capability in _NVCC else []), *requires),
            shape=_MULTIPLE_OF_32,
        )
        for capability in capabilities
    )


_CUDNN_FLOOR = Requirement(
    "cudnn", ">=9.10.2", _code("flashinfer 0.7.4 gemm/gemm_base.py (_check_cudnn_fp4_availability)")
)

_FLASHINFER_CUTLASS = Backend(
    value="flashinfer_cutlass",
    enum_name="FLASHINFER_CUTLASS",
    provider="flashinfer",
    summary="CUTLASS kernels of FlashInfer; SGLang's own choice for SM12x since 0.5.13",
    flashinfer_name="cutlass",
    native_since="0.5.9",
    rows=_flashinfer_rows((*SM10X, *SM12X)),
    absent=(_NOT_BEFORE_BLACKWELL,),
    faults=(_PDL_RACE, _JIT_WANTS_12_9),
)

_FLASHINFER_CUDNN = Backend(
    value="flashinfer_cudnn",
    enum_name="FLASHINFER_CUDNN",
    provider="flashinfer",
    summary="cuDNN through FlashInfer; SGLang's own choice for SM12x from 0.5.10 to 0.5.12",
    flashinfer_name="cudnn",
    native_since="0.5.9",
    rows=_flashinfer_rows((*SM10X, *SM12X), _CUDNN_FLOOR),
    absent=(_NOT_BEFORE_BLACKWELL,),
    faults=(_PLANS_OF_ANOTHER_GRAPH, _WORKSPACE_RESIZE, _JIT_WANTS_12_9),
)

_FLASHINFER_TRTLLM = Backend(
    value="flashinfer_trtllm",
    enum_name="FLASHINFER_TRTLLM",
    provider="flashinfer",
    summary="TensorRT-LLM kernels through FlashInfer; for capability 10.x only",
    flashinfer_name="trtllm",
    native_since="0.5.9",
    rows=tuple(
        CapabilityRow(
            capability,
            _GEMM,
            requires=(_FLASHINFER,),
            out_dtypes=("bfloat16",),
            shape=ShapeRule(
                128, 64, _code("sglang 0.5.23 srt/layers/quantization/modelopt_quant.py (pads N to 128, K/16 to 4)")
            ),
        )
        for capability in SM10X
    ),
    absent=(
        _NOT_BEFORE_BLACKWELL,
        Absence(
            SM12X,
            "its kernels exist for capability 10.x only; FlashInfer refuses the first GEMM, after SGLang has shuffled "
            "the weights into a layout that no other backend reads",
            _issue("flashinfer#2577"),
        ),
    ),
)

_CUTEDSL_SINCE_065 = Requirement("flashinfer", ">=0.6.5", _code("flashinfer 0.6.5 gemm/gemm_base.py (cute-dsl)"))
_SM12X_CUTE = _code("flashinfer 0.7.1 gemm/kernels/sm12x_cute/runner.py (check_requirement)")

_FLASHINFER_CUTEDSL = Backend(
    value="flashinfer_cutedsl",
    enum_name="FLASHINFER_CUTEDSL",
    provider="flashinfer",
    summary="CuTe DSL kernels of FlashInfer; on SM12x only when asked for by name",
    flashinfer_name="cute-dsl",
    native_since="0.5.12",
    rows=(
        *_flashinfer_rows(SM10X, floor=_CUTEDSL_SINCE_065),
        *(
            CapabilityRow(
                capability,
                _GEMM,
                requires=(
                    Requirement("flashinfer", ">=0.7.1", _code("flashinfer 0.7.0 and 0.7.1 gemm/gemm_base.py")),
                    Requirement("cuda", ">=13.0", _SM12X_CUTE),
                    _NVCC[capability],
                    *([_DSL_FOR_121] if capability == (12, 1) else []),
                ),
                out_dtypes=("bfloat16",),
                shape=ShapeRule(64, 64, _code("flashinfer 0.7.1 gemm/kernels/sm12x_cute/policy.py (check_shape)")),
            )
            for capability in SM12X
        ),
    ),
    absent=(_NOT_BEFORE_BLACKWELL,),
    faults=(_DSL_WHEELS,),
)

_B12X_SINCE = Requirement("flashinfer", ">=0.6.9", _code("flashinfer 0.6.8.post1 and 0.6.9 gemm/gemm_base.py"))
_B12X_CUDA = Requirement("cuda_toolkit", ">=12.9", _code("flashinfer 0.7.0 gemm/gemm_base.py (_MIN_B12X_CUDA_VERSION)"))
_B12X_WANTS_13 = Fault(
    name="b12x-needs-cuda-13",
    capabilities=SM12X,
    when=(
        Requirement("flashinfer", "<0.7.0", _code("flashinfer 0.6.18 gemm/gemm_base.py (_b12x_gemm_fp4_requirement)")),
        Requirement("cuda_toolkit", "<13.0", _code("flashinfer 0.6.18 gemm/gemm_base.py")),
    ),
    effect="this FlashInfer raises ValueError on every call: before 0.7.0 the backend wants CUDA 13",
    remedy="install a CUDA toolkit >= 13.0, or flashinfer-python >= 0.7.1",
    severity="refuse",
    source=_code("flashinfer 0.6.18 gemm/gemm_base.py (_b12x_gemm_fp4_requirement)"),
)

_FLASHINFER_B12X = Backend(
    value="flashinfer_b12x",
    enum_name="FLASHINFER_B12X",
    provider="flashinfer",
    summary="CuTe DSL kernels for SM12x (b12x) through FlashInfer; reported fastest for few rows on large layers",
    flashinfer_name="b12x",
    rows=(
        CapabilityRow(
            (12, 0),
            _GEMM,
            requires=(
                _B12X_SINCE,
                _B12X_CUDA,
                Requirement("cutlass_dsl", ">=4.4.2", _code("flashinfer 0.6.9 metadata")),
            ),
            # FlashInfer checks K itself from 0.6.14 on; before that a ragged K is read wrongly in silence.
            shape=_MULTIPLE_OF_32,
        ),
        CapabilityRow((12, 1), _GEMM, requires=(_B12X_SINCE, _B12X_CUDA, _DSL_FOR_121), shape=_MULTIPLE_OF_32),
    ),
    absent=(Absence((*BEFORE_BLACKWELL, *SM10X), "the kernels use the FP4 instruction of SM12x", _GEMM),),
    faults=(_B12X_WANTS_13, _JIT_WANTS_12_9, _DSL_WHEELS),
)

_FLASHINFER_AUTO = Backend(
    value="flashinfer_auto",
    enum_name="FLASHINFER_AUTO",
    provider="flashinfer",
    summary="FlashInfer's own choice per call: b12x first on 12.0 where it runs, else cutlass or cudnn",
    flashinfer_name="auto",
    rows=_flashinfer_rows((*SM10X, *SM12X)),
    absent=(_NOT_BEFORE_BLACKWELL,),
    # It may take any of them, so it has the faults of each.
    faults=(_PDL_RACE, _JIT_WANTS_12_9, _WORKSPACE_RESIZE),
)

_JIT_RELEASES = Requirement(
    "sglang",
    ">=0.5.10,<0.5.16",
    _code("sglang 0.5.16 srt/layers/quantization/fp4_utils.py (there from 0.5.10 to 0.5.15)"),
)
_JIT_KERNELS = _code("sglang 0.5.14 jit_kernel/nvfp4.py")

_CUTLASS = Backend(
    value="cutlass",
    enum_name="CUTLASS",
    provider="sglang",
    summary="SGLang's own CUTLASS kernels, compiled at start; SGLang 0.5.10 to 0.5.15 only",
    native_since="0.5.10",
    rows=tuple(
        CapabilityRow(
            capability,
            _JIT_KERNELS,
            requires=(_JIT_RELEASES, _FLASHINFER, *([_NVCC[capability]] if capability in _NVCC else [])),
            shape=ShapeRule(32, 32, _code("sglang 0.5.14 jit_kernel/csrc/gemm/nvfp4/nvfp4_scaled_mm_kernels.cuh")),
        )
        for capability in (*SM10X, *SM12X)
    ),
    absent=(Absence(BEFORE_BLACKWELL, "the kernels refuse capabilities below 10.0", _JIT_KERNELS),),
)

_MARLIN_CODE = _code("sglang 0.5.23 srt/layers/quantization/modelopt_quant.py (is_marlin)")
_WEIGHT_ONLY = Fault(
    name="weight-only",
    capabilities=SM12X,
    when=(),
    effect="Marlin multiplies unquantized activations and ignores their scales: other numbers than the checkpoint was "
    "calibrated for, and slower from some tens of rows on",
    remedy="take a flashinfer backend unless this is what you want",
    severity="warn",
    source=_code("sglang 0.5.23 srt/layers/quantization/marlin_utils_fp4.py"),
)

_MARLIN = Backend(
    value="marlin",
    enum_name="MARLIN",
    provider="sglang",
    summary="Weight-only kernels (W4A16): FP4 weights, activations stay bf16 or fp16",
    native_since="0.5.13",
    rows=tuple(
        CapabilityRow(
            capability,
            _MARLIN_CODE,
            requires=(Requirement("sglang", ">=0.5.13", _code("sglang 0.5.13 srt/layers/quantization/fp4_utils.py")),),
        )
        for capability in CAPABILITIES
    ),
    faults=(_WEIGHT_ONLY,),
)

_TORCH_REFERENCE = Backend(
    value="torch_reference",
    enum_name="TORCH_REFERENCE",
    provider="sglang_sm120",
    summary="The oracle in torch, exact and very slow; any device, CPU included, for bisection and tests",
    any_device=True,
    rows=tuple(
        CapabilityRow(capability, Source("test", "tests/host/test_linear_methods.py")) for capability in CAPABILITIES
    ),
    exact_fused_scales=True,
    quantizes_itself=True,
    serves_weight_only=True,
    implementation="sglang_sm120.backends.torch_reference",
)


def _test(ref: str) -> Source:
    return Source("test", ref)


_PTX = _code("cuda 13.0 PTX ISA (mma.sync m16n8k16 from sm_80; clusters, st.async, griddepcontrol from sm_90)")
#: What is shown on each capability: the kernels ran on 9.0, their machine code for 12.x is checked, nothing ran on the
#: others.
_KERNELS_SHOWN_BY: dict[Capability, Source] = {
    (8, 0): _PTX,
    (9, 0): _test("tests/gpu/test_backends_cuda.py"),
    (10, 0): _PTX,
    (10, 3): _PTX,
    (12, 0): _test("tests/kernels/test_kernel_gate.py"),
    (12, 1): _test("tests/kernels/test_kernel_gate.py"),
}
#: Oldest driver branch that runs programs of a CUDA major version; newer minor versions need no newer driver.
DRIVER_FLOOR: Mapping[int, int] = MappingProxyType({12: 525, 13: 580})
_DRIVER_TABLE = _code("cuda 13.0 minor version compatibility, table 1")
_CUDA_13_DRIVER = Fault(
    name=f"kernels-need-driver-{DRIVER_FLOOR[13]}",
    capabilities=CAPABILITIES,
    when=(
        Requirement("kernels_cuda", ">=13.0", _DRIVER_TABLE),
        Requirement("driver", f"<{DRIVER_FLOOR[13]}", _DRIVER_TABLE),
    ),
    effect=f"its kernels are compiled with CUDA 13, whose programs need an NVIDIA driver >= {DRIVER_FLOOR[13]}",
    remedy=f"install an NVIDIA driver >= {DRIVER_FLOOR[13]}",
    severity="refuse",
    source=_DRIVER_TABLE,
)

_SM120 = Backend(
    value="sm120",
    enum_name="SM120",
    provider="sglang_sm120",
    summary="CUDA kernels of this package, meant for few rows; exact with fused projections of different scales",
    rows=tuple(
        CapabilityRow(
            capability,
            source,
            requires=(
                Requirement("tvm_ffi", ">=0.1.9,<0.2", _test("tests/gpu/test_backends_cuda.py")),
                Requirement("kernels_cuda", ">=12.9", _code("cuda 12.9 PTX ISA (family-specific targets)")),
            ),
            shape=ShapeRule(8, 16, _test("tests/kernels/test_emulated_gemm.py")),
        )
        for capability, source in _KERNELS_SHOWN_BY.items()
    ),
    faults=(_CUDA_13_DRIVER,),
    exact_fused_scales=True,
    quantizes_itself=True,
    needs_probe=True,
    implementation="sglang_sm120.native",
)

_SM120_TUNED = Backend(
    value="sm120_tuned",
    enum_name="SM120_TUNED",
    provider="sglang_sm120",
    summary="For each call the backend that `sglang-sm120 tune` measured fastest for (N, K, dtype) and M on this card",
    any_device=True,
    rows=tuple(CapabilityRow(capability, _test("tests/host/test_tuned_layers.py")) for capability in CAPABILITIES),
    exact_fused_scales=True,
    per_call=True,
    implementation="sglang_sm120.tuning.backend",
)

#: Every value except ``auto``, in the order in which they are shown.
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        backend.value: backend
        for backend in (
            _FLASHINFER_CUTLASS,
            _FLASHINFER_CUDNN,
            _FLASHINFER_B12X,
            _FLASHINFER_CUTEDSL,
            _FLASHINFER_AUTO,
            _FLASHINFER_TRTLLM,
            _CUTLASS,
            _MARLIN,
            _SM120,
            _TORCH_REFERENCE,
            _SM120_TUNED,
        )
    }
)

#: The names to ask ``flashinfer.mm_fp4.is_backend_supported`` about; its ``auto`` is not a backend there.
FLASHINFER_NAMES: tuple[str, ...] = tuple(
    b.flashinfer_name for b in BACKENDS.values() if b.flashinfer_name not in (None, "auto")
)

#: What ``auto`` takes on SM12x: the first whose bounds hold and which the table does not refuse. Left out on
#: purpose: flashinfer_b12x and flashinfer_auto, which win in some reports (flashinfer#3051, sglang#38170) and lose
#: in others (flashinfer#5100), so that the user's own card has to decide; flashinfer_cutedsl, which FlashInfer
#: keeps out of its own choice on SM12x; marlin, which changes the numbers; and code of ours, which nobody has
#: checked on the card.
AUTO_ORDER: tuple[Preference, ...] = (
    Preference(
        "flashinfer_cutlass",
        "SGLang's own choice for SM12x since 0.5.13, which also autotunes it",
        _issue("sglang#26496"),
        when=(Requirement("sglang", ">=0.5.13", _code("sglang 0.5.13 srt/layers/quantization/fp4_utils.py")),),
    ),
    Preference(
        "flashinfer_cudnn",
        "SGLang's own choice for SM12x from 0.5.10 to 0.5.12",
        _issue("sglang#20047"),
    ),
    Preference(
        "flashinfer_cutlass",
        "the remaining backend that FlashInfer chooses by itself on SM12x",
        _code("flashinfer 0.6.3 gemm/gemm_base.py (_heuristic_func_mm_fp4)"),
    ),
)
