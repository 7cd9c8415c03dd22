"""Which GPUs a shared library has code for, read from its section ``.nv_fatbin`` without any tool of CUDA.

The section holds one container for each compiled source file, and a container one image for each target: machine code
(ELF) or PTX. Only headers are read. Their fields are in no specification; they were found by compiling for known
targets with nvcc 13.0, and a test compiles for them again.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_CONTAINER_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<4sHHQ")  # magic, version, bytes of this header, bytes of the images
#: Kind, a version, bytes of this header, bytes of the image; at 28 the architecture, at 40 flags.
_IMAGE = struct.Struct("<HHIQ12xI8xQ")
_SECTION = struct.Struct("<IIQQQQ")  # name, type, flags, address, offset, bytes
_KINDS: dict[int, Literal["sm", "compute"]] = {1: "compute", 2: "sm"}
_ARCHITECTURE_SPECIFIC, _FAMILY_SPECIFIC = 1 << 20, 1 << 21


@dataclass(frozen=True, order=True)
class Target:
    """What one image was compiled for: ``sm_120f`` is machine code, ``compute_90`` PTX that the driver translates."""

    kind: Literal["sm", "compute"]
    architecture: int
    suffix: Literal["", "a", "f"] = ""

    def __str__(self) -> str:
        return f"{self.kind}_{self.architecture}{self.suffix}"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether a GPU takes the image (CUDA C++ programming guide, binary and PTX compatibility)."""
        own = divmod(self.architecture, 10)
        if self.suffix == "a":
            return own == capability
        if self.suffix == "f" or self.kind == "sm":
            return own[0] == capability[0] and own[1] <= capability[1]
        return own <= capability


def containers(library: Path) -> tuple[frozenset[Target], ...]:
    """Return the targets of each container of a shared library; empty if it holds no GPU code.

    Raises:
        ValueError: it is no 64-bit ELF file, is cut off, or has headers that cannot be right.
        OSError: it cannot be read.
    """
    with library.open("rb") as file:
        if file.read(len(_ELF64_LITTLE_ENDIAN)) != _ELF64_LITTLE_ENDIAN:
            raise ValueError(f"{library.name} is no 64-bit ELF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return tuple(found for start, size in _fatbins(data) for found in _containers(data, start, size))
            # A place in the file comes from the file: it may lie outside of it, or be no place at all.
            except (struct.error, OverflowError, IndexError) as error:
                raise ValueError(f"{library.name} is cut off or damaged: {error}") from error


def _fatbins(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Offset and bytes of every section with GPU code."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry, count, names = struct.unpack_from("<HHH", data, 0x3A)
    sections = [_SECTION.unpack_from(data, table + index * entry) for index in range(count)]
    for name, _, _, _, offset, size in sections:
        place = sections[names][4] + name
        if data[place : place + 11] == b".nv_fatbin\0":
            if offset + size > len(data):
                raise ValueError("its GPU code is cut off")
            yield offset, size


def _containers(data: mmap.mmap, start: int, size: int) -> Iterator[frozenset[Target]]:
    place, section = start, start + size
    while (place := data.find(_CONTAINER_MAGIC, place, section)) >= 0:  # the linker aligns containers with zeros
        _, _, header, length = _CONTAINER.unpack_from(data, place)
        end = place + header + length
        if header < _CONTAINER.size or end > section:
            raise ValueError(f"a container of GPU code of {header} + {length} bytes cannot be right")
        yield frozenset(_images(data, place + header, end))
        place = end


def _images(data: mmap.mmap, place: int, end: int) -> Iterator[Target]:
    while place + _IMAGE.size <= end:
        kind, _, header, length, architecture, flags = _IMAGE.unpack_from(data, place)
        if kind in _KINDS:
            specific = "a" if flags & _ARCHITECTURE_SPECIFIC else "f" if flags & _FAMILY_SPECIFIC else ""
            yield Target(_KINDS[kind], architecture, specific)  # type: ignore[arg-type]
        if header < _IMAGE.size:
            raise ValueError(f"an image of GPU code with a header of {header} bytes cannot be right")
        place += header + length
