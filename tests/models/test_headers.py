"""Headers of safetensors files that lie: every one is refused with a typed error, before anything is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_sm120.errors import FormatError
from sglang_sm120.models.headers import MAX_HEADER_BYTES, read_chunks, read_header

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, header: Any, data: bytes = b"\0" * 8, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_a_file_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b": torch.tensor(1.5),
        "c": torch.zeros(4, 2, dtype=torch.float8_e4m3fn),
        "d": torch.zeros(0, 5),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    found = {tensor.name: tensor for tensor in read_header(path)}
    assert {name: tensor.shape for name, tensor in found.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert found["c"].dtype == "F8_E4M3"
    with path.open("rb") as file:
        data = b"".join(read_chunks(file, found["a"]))
    assert data == bytes(tensors["a"].view(torch.uint8).flatten().tolist())


LIES: dict[str, Any] = {
    "the end is outside the file": {"a": {**GOOD, "shape": [4], "data_offsets": [0, 16]}},
    "the end is before the start": {"a": {**GOOD, "data_offsets": [8, 0]}},
    "negative places": {"a": {**GOOD, "data_offsets": [-8, 0]}},
    "more elements than bytes": {"a": {**GOOD, "shape": [3]}},
    "a negative size": {"a": {**GOOD, "shape": [-1, -2]}},
    "a size that overflows": {"a": {**GOOD, "shape": [1 << 62, 1 << 62, 8]}},
    "a size that is true": {"a": {**GOOD, "shape": [True, 2]}},
    "a type that does not exist": {"a": {**GOOD, "dtype": "F7"}},
    "overlapping tensors": {"a": GOOD, "b": GOOD},
    "a hole": {"a": {**GOOD, "shape": [1], "data_offsets": [4, 8]}},
    "bytes that belong to nobody": {"a": {**GOOD, "shape": [1], "data_offsets": [0, 4]}},
    "no fields": {"a": {}},
    "an entry that is no object": {"a": 3},
    "three places": {"a": {**GOOD, "data_offsets": [0, 4, 8]}},
    "a list": [1, 2],
    "no JSON": b"{",
    "no UTF-8": b'{"\xff": 1}',
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused_as_the_library_refuses_it(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", LIES[name])
    with pytest.raises(FormatError, match=r"x\.safetensors is no sound"):
        read_header(path)
    with pytest.raises((SafetensorError, OverflowError)):
        safe_open(path, "pt").__enter__()


def test_a_name_that_comes_twice(tmp_path: Path) -> None:
    entry = json.dumps(GOOD)
    path = write(tmp_path / "x.safetensors", f'{{"a": {entry}, "a": {entry}}}'.encode())
    with pytest.raises(FormatError, match="'a' twice"):
        read_header(path)


def test_deep_nesting(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", b"[" * 200_000)
    with pytest.raises(FormatError, match="no JSON"):
        read_header(path)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, (1 << 64) - 1, 1000])
def test_a_header_that_is_larger_than_the_file_is_not_read(length: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": GOOD}, length=length)
    with pytest.raises(FormatError, match=str(length)):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_a_header(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\0" * size)
    with pytest.raises(FormatError, match=f"it has {size} bytes"):
        read_header(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": GOOD})
    (tensor,) = read_header(path)
    path.write_bytes(path.read_bytes()[:-4])
    with path.open("rb") as file, pytest.raises(FormatError, match="ends inside a"):
        list(read_chunks(file, tensor))
