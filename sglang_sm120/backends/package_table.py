"""The rows of the table about packages that do not go together, whatever backend serves. ``doctor`` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglang_sm120.backends.record import CAPABILITIES, Fault, Requirement, Source

#: Wheels with compiled kernels of FlashInfer, which must have its version; a build tag after ``+`` does not count.
FLASHINFER_COMPANIONS: Mapping[str, Source] = MappingProxyType(
    {
        "flashinfer-cubin": Source("code", "flashinfer 0.7.4 jit/env.py (_check_cubin_version)"),
        "flashinfer-jit-cache": Source("code", "flashinfer 0.7.4 jit/env.py (_check_jit_cache_version)"),
    }
)

#: What FlashInfer's metadata asks for, where another version than that fails late: while a kernel is compiled for the
#: first time, or inside the first product.
FLASHINFER_NEEDS: Mapping[str, Source] = MappingProxyType(
    {
        "nvidia-cutlass-dsl": Source("issue", "vllm#43738"),
        "nvidia-cudnn-frontend": Source("issue", "flashinfer#1288"),
    }
)

#: Wheels of cuDNN by CUDA's major version. They write to the same folder, so that the one installed last is there.
CUDNN_WHEELS: Mapping[int, str] = MappingProxyType({12: "nvidia-cudnn-cu12", 13: "nvidia-cudnn-cu13"})
CUDNN_WHEELS_SOURCE = Source("issue", "flashinfer#2195")

#: A part of cuDNN that wheels of 9.20 load by its bare name and do not bring along, and the versions that do so.
CUDNN_LOADED_BY_NAME = "libcudnn_engines_tensor_ir.so.9"
CUDNN_LOADS_BY_NAME = Requirement("cudnn", ">=9.20,<9.21", Source("issue", "pytorch#188892"))

#: Parts of the CuTe DSL that write different files to the same paths. On CUDA 13 the second one must have come last.
DSL_WHEELS = ("nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13")
DSL_WHEELS_SOURCE = Source("issue", "NVIDIA/cutlass#3259")

#: Versions that are wrong together by themselves.
PACKAGE_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="torch-2.9.1-cudnn",
        capabilities=CAPABILITIES,
        when=(
            Requirement("torch", ">=2.9.1,<2.9.2", Source("issue", "pytorch#168167")),
            Requirement("cudnn", "<9.15", Source("issue", "pytorch#168167")),
        ),
        effect="Conv3d of this torch with this cuDNN is slow and takes much memory, and SGLang 0.5.9 ends the start of "
        "a multimodal model because of it",
        remedy='pip install "nvidia-cudnn-cu12>=9.15" (or -cu13, as torch has it)',
        severity="warn",
        source=Source("code", "sglang 0.5.9 srt/server_args.py (check_torch_2_9_1_cudnn_compatibility)"),
    ),
)
