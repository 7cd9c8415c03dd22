"""What is said and kept when a layer of a running server fails: who, in which layer, at which sizes, and what helps."""

from __future__ import annotations

from sglang_sm120 import env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import BackendError, Sm120Error
from sglang_sm120.records import identity_of
from sglang_sm120.verification import failed_file
from sglang_sm120.verification.failed_file import DenseFacts, ExpertFacts

#: In texts of torch and FlashInfer, of our own kernels and Triton, and of the driver.
_CUDA_ERRORS = ("CUDA error", "cudaError", "CUDA_ERROR", "CUDA driver error")


def failed_call(
    backend: str,
    layer: str,
    call: DenseFacts | ExpertFacts,
    error: Exception,
    remedy: str,
    machine: HostFacts | None,
    *,
    chosen: str = "",
) -> Sm120Error:
    """Return the error to raise in place of ``error``, which ended the call of one layer, and keep the call in a file.

    Asks the device nothing: after a CUDA error it does not answer. Whatever happens to the file, ``error`` is told.

    Args:
        backend: the value or runner that was called.
        layer: its name, or those of the layers that share the call.
        call: what it was asked.
        error: what was raised.
        remedy: an imperative sentence without a final full stop.
        machine: facts from the start of the server; without them there is no file.
        chosen: how the backend was chosen, where that is not plain.

    Returns:
        An error of the type of ``error`` if that is one of ours, else a :class:`BackendError`.
    """
    late = ""
    if any(mark in str(error) for mark in _CUDA_ERRORS):
        late = " A CUDA error may come from a kernel that was launched before this one: CUDA_LAUNCH_BLOCKING=1 tells."
    kind = type(error) if isinstance(error, Sm120Error) else BackendError
    told = kind(
        f"{backend}{chosen} failed in {layer}, {call.text}: {type(error).__name__}: {error}.{late} {remedy}. "
        f"{env.VERIFY}=1 checks every call before it and keeps the operands of the first wrong one. "
        f"{_keep(backend, layer, call, error, machine)}"
    )
    told.names_call = True
    return told


def _keep(backend: str, layer: str, call: DenseFacts | ExpertFacts, error: Exception, machine: HostFacts | None) -> str:
    """Write the file and say how it is used, or why there is none."""
    if machine is None:
        return "The call is not kept: nothing was decided in this process yet."
    try:
        path = failed_file.write(call, backend, layer, error, identity_of(machine))
    except Exception as problem:  # noqa: BLE001 - nothing may take the place of what failed
        return f"The call could not be kept: {str(problem).removesuffix('.')}."
    return f"The call is kept without its operands; with random ones it is made again by sglang-sm120 replay {path}"
