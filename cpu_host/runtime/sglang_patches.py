"""The places where SGLang's own code asks for something that does not exist without a GPU.

Everything else that used to need a patch on the CPU (the blackwell check, ``Tensor.cuda`` and the operator
``sglang::fp4_gemm`` in ModelOpt's linear method) is not reached: for a backend of ours the shipped package
prepares and runs the layer itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from cpu_host.runtime import after_import

_RUNNER = "sglang.srt.model_executor.model_runner"
_COMPRESSED_TENSORS = "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"


def arm() -> None:
    after_import.after(_COMPRESSED_TENSORS, _skip_capability_question)
    after_import.after(_RUNNER, _run_unpinned)


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


def _run_unpinned(module: ModuleType) -> None:
    """Page-locked memory is for transfers to a device, and torch refuses to allocate it where there is none.

    LoRA asks for it (from 0.5.10), and so does a request for the log-probabilities of its prompt (0.5.12 and some
    later releases). torch is only touched in processes that run a model.
    """
    import torch

    cls: Any = vars(module)["ModelRunner"]
    original = cls.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not torch.cuda.is_available():
            _leave_memory_unpinned()
        original(self, *args, **kwargs)

    cls.__init__ = __init__


def _leave_memory_unpinned() -> None:
    import torch

    def unpinned(create: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return create(*args, **kwargs)

        return call

    def pin_memory(self: Any, *args: Any) -> Any:
        return self

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
