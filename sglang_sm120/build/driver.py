"""Which CUDA the NVIDIA driver offers, and whether a compiled library can run on it."""

from __future__ import annotations

import ctypes

from sglang_sm120.errors import UnsupportedError


def require(cuda: tuple[int, int]) -> None:
    """Check that the driver can run what a CUDA compiler of this version made.

    Any driver for the same major version will do. The driver library is asked and not the kernel module: under
    WSL2 and with NVIDIA's compatibility packages that one tells nothing, or something else.

    Raises:
        UnsupportedError: no driver, or too old; the message has both versions.
    """
    offered = _cuda_of_driver()
    if offered is not None and offered[0] >= cuda[0]:
        return
    from sglang_sm120.backends.table import DRIVER_FLOOR  # here: setup.py imports this package without the others

    if offered is None:
        raise UnsupportedError(
            "The kernels need an NVIDIA driver, and libcuda.so.1 cannot be loaded: install a driver of "
            f"{DRIVER_FLOOR[max(DRIVER_FLOOR)]} or newer; in a container, start it with GPU access (--gpus all)."
        )
    from sglang_sm120.device import installed_versions

    installed = installed_versions().get("driver", "")
    floor = DRIVER_FLOOR.get(cuda[0])
    remedy = f"install driver {floor} or newer" if floor else "install a newer driver"
    raise UnsupportedError(
        f"The kernels are compiled with CUDA {cuda[0]}.{cuda[1]}, and the NVIDIA driver {installed} ".rstrip()
        + f" offers CUDA {offered[0]}.{offered[1]}: {remedy}."
    )


def _cuda_of_driver() -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the driver library knows. Creates no context."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10
