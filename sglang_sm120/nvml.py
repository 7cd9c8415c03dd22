"""Compute capabilities of the GPUs of this machine, without torch and without creating a CUDA context.

For whoever must know what cards there are before a process has chosen one: the arguments of a server, and a start that
is stopped.
"""

from __future__ import annotations

import ctypes
import os
from itertools import takewhile


def compute_capabilities() -> list[tuple[int, int]]:
    """Return (major, minor) of every GPU that this process may use; empty without a driver.

    ``CUDA_VISIBLE_DEVICES`` is honoured where it lists nothing, or indices that mean the same cards here: CUDA numbers
    cards by speed unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, and NVML by bus. Indices of cards that differ, and UUIDs,
    are taken to allow every GPU.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    try:
        found = _read(library)
    finally:
        library.nvmlShutdown()
    listed = _listed()
    same_order = len(set(found.values())) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if listed is None or (listed and not same_order):
        return list(found.values())
    return [capability for index, capability in found.items() if index in listed]


def _listed() -> set[int] | None:
    """Indices in ``CUDA_VISIBLE_DEVICES``, which CUDA reads up to the first that is none; ``None`` for every GPU."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    words = text.replace(" ", "").split(",")  # set and empty hides every GPU
    if any(word and not word.lstrip("-").isdecimal() for word in words):
        return None
    return {int(word) for word in takewhile(str.isdecimal, words)}


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
