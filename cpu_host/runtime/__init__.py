"""Everything that is put into SGLang's processes on a machine without a GPU.

The environments of ``tools/envs.py`` call :func:`arm` at interpreter start from a ``.pth`` file, so that every
process that SGLang spawns has it too. Nothing is imported here that the process would not import anyway: each
part waits for the module it concerns.

``SM120_CPU_HOST_STANDINS`` forces the stand-ins on (1) or off (0); without it they are for machines that have no
NVIDIA driver. ``SM120_CPU_HOST_EVIDENCE`` is a folder: the process that runs the model writes there what it
counted. ``SM120_CPU_HOST_MUTATION`` is a file whose content names a mistake to plant into the backend, for the
negative controls of the tests; see :mod:`cpu_host.runtime.mutations`. ``SM120_CPU_HOST_KERNELS`` is the library of
``cpu_host.kernels.build``, with which the value ``sm120`` runs without a GPU.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

EVIDENCE_VARIABLE = "SM120_CPU_HOST_EVIDENCE"
MUTATION_VARIABLE = "SM120_CPU_HOST_MUTATION"
STANDINS_VARIABLE = "SM120_CPU_HOST_STANDINS"
KERNELS_VARIABLE = "SM120_CPU_HOST_KERNELS"

#: New containers between two runs of the garbage collector. Importing SGLang makes a million objects that all stay, and
#: with Python's 700 the collector takes a quarter of the import's processor time to find nothing.
_GC_THRESHOLD = 100_000

_armed = False


def arm() -> None:
    """Put the import hooks in place; costs about a millisecond and imports nothing heavy."""
    global _armed
    if _armed:  # Python runs the .pth files of a venv twice
        return
    _armed = True
    if _wants_standins():
        gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
        from cpu_host.runtime import drafting, sglang_patches, standins, torchvision_ops

        standins.arm()
        torchvision_ops.arm()
        sglang_patches.arm()
        drafting.arm()
    if os.environ.get(KERNELS_VARIABLE):
        from cpu_host.runtime import emulated_kernels

        emulated_kernels.arm(Path(os.environ[KERNELS_VARIABLE]))
    if os.environ.get(EVIDENCE_VARIABLE) or os.environ.get(MUTATION_VARIABLE):
        from cpu_host.runtime import evidence

        evidence.arm()


def has_nvidia_driver() -> bool:
    """Whether there may be a GPU here, without loading CUDA (``/dev/dxg`` is the one of WSL)."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))


def _wants_standins() -> bool:
    forced = os.environ.get(STANDINS_VARIABLE)
    return forced == "1" if forced in ("0", "1") else not has_nvidia_driver()
