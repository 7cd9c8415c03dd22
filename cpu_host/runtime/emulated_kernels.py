"""``--fp4-gemm-backend sm120`` on a machine without a GPU: the same kernel sources, emulated.

Two things differ from a GPU, both replaced here: where ``sglang_sm120.native`` gets its library from, and the
capability table, which rightly says that the value needs a CUDA device. Everything between SGLang and the library is
as shipped.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from cpu_host.runtime import after_import

_NATIVE = "sglang_sm120.native"
_TABLE = "sglang_sm120.backends.table"
_VALUE = "sm120"


def arm(library: Path) -> None:
    """Take ``library`` (of ``cpu_host.kernels.build``) for the compiled one in this process."""
    after_import.after(_TABLE, _admit)
    after_import.after(_NATIVE, lambda module: _load_from(module, library))


def _admit(module: ModuleType) -> None:
    names: Any = vars(module)
    record = replace(names["BACKENDS"][_VALUE], any_device=True)
    names["BACKENDS"] = MappingProxyType({**names["BACKENDS"], _VALUE: record})


def _load_from(module: ModuleType, library: Path) -> None:
    from cpu_host.kernels.library import EmulatedLibrary

    loaded = EmulatedLibrary(library)
    vars(module)["_library"] = lambda device: (loaded, True)
