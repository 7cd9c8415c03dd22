"""``sm120``, as GEMM backend and as MoE runner, on a machine without a GPU: the same kernel sources, emulated.

Two things differ from a GPU, both replaced here: where ``sglang_sm120.native`` gets its library from, and the
capability tables, which rightly say that the value needs a CUDA device. Everything between SGLang and the library is
as shipped.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from cpu_host.runtime import after_import

_NATIVE = "sglang_sm120.native"
_TABLES = {"sglang_sm120.backends.table": "BACKENDS", "sglang_sm120.backends.moe_table": "MOE_RUNNERS"}
_VALUE = "sm120"


def arm(library: Path) -> None:
    """Take ``library`` (of ``cpu_host.kernels.build``) for the compiled one in this process."""
    for table in _TABLES:
        after_import.after(table, _admit)
    after_import.after(_NATIVE, lambda module: _load_from(module, library))


def _admit(module: ModuleType) -> None:
    names: Any = vars(module)
    name = _TABLES[module.__name__]
    record = replace(names[name][_VALUE], any_device=True)
    names[name] = MappingProxyType({**names[name], _VALUE: record})


def _load_from(module: ModuleType, library: Path) -> None:
    from cpu_host.kernels.library import EmulatedLibrary

    loaded = EmulatedLibrary(library)
    vars(module)["_library"] = lambda device: (loaded, True)
