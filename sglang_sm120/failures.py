"""What is said when a layer of a running server fails: who failed, in which layer, at which sizes, and what helps."""

from __future__ import annotations

from sglang_sm120 import env
from sglang_sm120.errors import BackendError, Sm120Error


def failed_call(served_by: str, layer: str, sizes: str, error: Exception, remedy: str) -> Sm120Error:
    """Return the error to raise in place of ``error``, which ended the call of one layer.

    Args:
        served_by: the backend or runner, and how it was chosen where that is not plain.
        layer: its name, or those of the layers that share the call.
        sizes: such as ``M=8 N=5120 K=3200``.
        error: what was raised.
        remedy: an imperative sentence without a final full stop.

    Returns:
        An error of the type of ``error`` if that is one of ours, else a :class:`BackendError`.
    """
    late = ""
    if "CUDA error" in str(error):
        late = " A CUDA error may come from a kernel that was launched before this one: CUDA_LAUNCH_BLOCKING=1 tells."
    kind = type(error) if isinstance(error, Sm120Error) else BackendError
    return kind(
        f"{served_by} failed in {layer}, {sizes}: {type(error).__name__}: {error}.{late} {remedy}. "
        f"{env.VERIFY}=1 checks every call before it and keeps the operands of the first wrong one."
    )
