"""Compute capabilities of the GPUs of this machine, without torch and without creating a CUDA context.

Used once per process, and only when a seam is broken and it matters whether this machine has an SM12x GPU.
"""

from __future__ import annotations

import ctypes


def compute_capabilities() -> list[tuple[int, int]]:
    """Return (major, minor) of every GPU that the driver's management library sees; empty without a driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    try:
        return _read(library)
    finally:
        library.nvmlShutdown()


def _read(library: ctypes.CDLL) -> list[tuple[int, int]]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        status = library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        if status == 0:
            found.append((major.value, minor.value))
    return found
