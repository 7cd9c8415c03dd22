"""Compute capabilities of the GPUs of this machine, without torch and without creating a CUDA context.

For whoever must know what cards there are before a process has chosen one: the arguments of a server, and a start that
is stopped.
"""

from __future__ import annotations

import ctypes
import os


def compute_capabilities() -> list[tuple[int, int]]:
    """Return (major, minor) of every GPU that this process may use; empty without a driver.

    ``CUDA_VISIBLE_DEVICES`` is honoured where it lists indices or nothing; written as UUIDs it is taken to allow every
    GPU.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    try:
        return [c for index, c in _read(library).items() if _visible(index)]
    finally:
        library.nvmlShutdown()


def _visible(index: int) -> bool:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not listed.strip():
        return listed is None  # set and empty hides every GPU
    words = listed.replace(" ", "").split(",")
    return str(index) in words if all(word.lstrip("-").isdigit() for word in words) else True


def _read(library: ctypes.CDLL) -> dict[int, tuple[int, int]]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return {}
    found = {}
    for index in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        status = library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        if status == 0:
            found[index] = (major.value, minor.value)
    return found
