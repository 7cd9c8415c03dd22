"""Headers of safetensors files: names, types, shapes and places of tensors, without reading their data.

A header comes from whoever published the checkpoint, so nothing in it is believed: its size is bounded, every tensor
must lie inside the file and fill exactly its type and shape, and tensors may neither overlap nor leave holes. The
rules are those of the safetensors library (format 0.x), which a tensor's data is never given to here.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sglang_sm120.errors import FormatError

#: The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
#: How much is read at a time.
CHUNK_BYTES = 1 << 20
#: Bits per element.
BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
INDEX_NAMES = ("model.safetensors.index.json", "consolidated.safetensors.index.json")


@dataclass(frozen=True)
class Tensor:
    """One tensor: ``start`` and ``stop`` are places in its file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> tuple[Tensor, ...]:
    """Return the tensors of one safetensors file in the order of their data.

    Raises:
        FormatError: the file is cut off, or its header is none or lies.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if len(head) < 8:
            raise _broken(path, f"it has {size} bytes, a header begins with 8")
        (length,) = struct.unpack("<Q", head)
        if length > MAX_HEADER_BYTES:
            raise _broken(path, f"its header would have {length} bytes, at most {MAX_HEADER_BYTES} are allowed")
        if length > size - 8:
            raise _broken(
                path, f"its header would have {length} bytes and the file has {size - 8} left; download it again"
            )
        text = file.read(length)
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in _entries(path, text)]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    _check_places(path, tensors, 8 + length, size)
    return tuple(tensors)


def read_chunks(file: BinaryIO, tensor: Tensor) -> Iterator[bytes]:
    """Yield the data of ``tensor`` in pieces of at most :data:`CHUNK_BYTES`.

    Raises:
        FormatError: the file ends before the tensor does.
    """
    file.seek(tensor.start)
    left = tensor.stop - tensor.start
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise FormatError(f"{file.name} ends inside {tensor.name}: it was changed while it was read.")
        left -= len(chunk)
        yield chunk


def _entries(path: Path, text: bytes) -> list[tuple[str, Any]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _broken(path, f"its header names {twice!r} twice")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is no JSON ({type(error).__name__})") from error
    if not isinstance(header, dict):
        raise _broken(path, f"its header is a {type(header).__name__}, not an object")
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]


def _tensor(path: Path, name: str, entry: Any, offset: int) -> Tensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(path, f"the entry of {name!r} has not the fields dtype, shape and data_offsets") from error
    if not isinstance(shape, list) or not all(_is_size(number) for number in (*shape, start, stop)):
        raise _broken(path, f"{name!r} has the shape {shape!r} at [{start!r}, {stop!r}]: integers are needed")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _broken(path, f"{name!r} has the type {dtype!r}, known are {', '.join(BITS)}")
    needed = math.prod(shape) * BITS[dtype]
    if stop < start or 8 * (stop - start) != needed:
        raise _broken(path, f"{name!r} is a {dtype} of shape {shape} and takes {stop - start} bytes")
    return Tensor(name, dtype, tuple(shape), offset + start, offset + stop)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_places(path: Path, tensors: list[Tensor], begin: int, size: int) -> None:
    place = begin
    for tensor in tensors:
        if tensor.stop > size:
            raise _broken(path, f"{tensor.name!r} ends at byte {tensor.stop} and the file at {size}; download it again")
        if tensor.start != place:
            what = "overlaps the tensor before it" if tensor.start < place else "leaves bytes before it unused"
            raise _broken(path, f"{tensor.name!r} {what}")
        place = tensor.stop
    if place != size:
        raise _broken(path, f"{size - place} bytes at its end belong to no tensor")


def _broken(path: Path, why: str) -> FormatError:
    return FormatError(f"{path.name} is no sound safetensors file: {why}.")
