"""The places where SGLang's own code asks for something that does not exist without a GPU.

Everything else that used to need a patch on the CPU (the blackwell check, ``Tensor.cuda`` and the operator
``sglang::fp4_gemm`` in ModelOpt's linear method) is not reached: for a backend of ours the shipped package
prepares and runs the layer itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from cpu_host.runtime import after_import

_LORA_LAYERS = "sglang.srt.lora.layers"
_COMPRESSED_TENSORS = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"


def arm() -> None:
    after_import.after(_COMPRESSED_TENSORS, _skip_capability_question)
    after_import.before(_LORA_LAYERS, _leave_memory_unpinned)


def _skip_capability_question(module: ModuleType) -> None:
    """Every release: ``_check_scheme_supported`` calls ``torch.cuda.get_device_capability()`` unconditionally.

    The model loader's own check (ModelOpt goes through it) takes "no capability" as "nothing to compare";
    this makes the compressed-tensors one do the same.
    """
    import torch

    cls: Any = module.CompressedTensorsConfig
    original = cls._check_scheme_supported

    def _check_scheme_supported(self: Any, *args: Any, **kwargs: Any) -> bool:
        return not torch.cuda.is_available() or original(self, *args, **kwargs)

    cls._check_scheme_supported = _check_scheme_supported


def _leave_memory_unpinned() -> None:
    """From 0.5.22: LoRA layers keep their offsets in ``torch.tensor(..., pin_memory=True)``.

    Page-locked memory is for transfers to a device; torch refuses to allocate it where there is none.
    """
    import torch

    if torch.cuda.is_available():
        return
    original = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    torch.tensor = tensor
