"""Read the scales of a checkpoint, a piece at a time, and say what is wrong with their values."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from sglang_sm120.models.findings import Findings
from sglang_sm120.models.headers import Tensor, read_chunks

#: Outside this range a global scale is absurd in either convention: as 448 * 6 / amax it would mean weights or
#: activations whose largest element is below 3e-9 or above 3e15 (and the same for the reciprocal, roughly).
SMALLEST_SCALE, LARGEST_SCALE = 1e-12, 1e12

_BYTES_FROM_0X80 = bytes(range(0x80, 0x100))
_EXPORT_AGAIN = "export the checkpoint again; this layer multiplies garbage"


@dataclass(frozen=True)
class Spread:
    """Smallest and largest of the finite values of a scale tensor, and how many there are."""

    smallest: float
    largest: float
    count: int


def check_global_scale(file: BinaryIO, tensor: Tensor, findings: Findings) -> Spread | None:
    """Check every value of a float32, bfloat16 or float16 scale; return its spread, ``None`` without a good value."""
    smallest = largest = None
    bad: dict[str, float] = {}
    count = 0
    for value in _numbers(read_chunks(file, tensor), tensor.dtype):
        count += 1
        problem = _problem(value)
        if problem is not None:
            bad.setdefault(problem, value)
            continue
        smallest = value if smallest is None else min(smallest, value)
        largest = value if largest is None else max(largest, value)
    for problem, value in bad.items():
        findings.add(f"scale-{problem}", "error", tensor.name, value, _MEANING[problem], _EXPORT_AGAIN)
    return Spread(smallest, largest, count) if smallest is not None and largest is not None else None


_MEANING = {
    "not-finite": "the scale is no number; the output of the layer is NaN",
    "zero": "the scale is zero; its reciprocal is infinite",
    "negative": "the scale is negative; scales have no sign",
    "absurd": f"the scale is outside {SMALLEST_SCALE:g} to {LARGEST_SCALE:g}",
}


def check_block_scales(file: BinaryIO, tensor: Tensor, findings: Findings) -> None:
    """Check the bytes of e4m3 block scales: 0x7F and 0xFF are NaN, and a scale has no sign."""
    not_a_number = negative = zeros = 0
    for chunk in read_chunks(file, tensor):
        not_a_number += chunk.count(0x7F) + chunk.count(0xFF)
        negative += len(chunk) - len(chunk.translate(None, _BYTES_FROM_0X80)) - chunk.count(0xFF)
        zeros += chunk.count(0)
    total = tensor.elements
    if not_a_number:
        what = f"{not_a_number} of {total} block scales are NaN (0x7F or 0xFF), and so is every output they touch"
        findings.add("block-scale-nan", "error", tensor.name, "NaN", what, _EXPORT_AGAIN)
    if negative:
        what = f"{negative} of {total} block scales have the sign bit, which the kernels do not expect"
        findings.add("block-scale-negative", "error", tensor.name, "negative", what, _EXPORT_AGAIN)
    if total and zeros == total:
        fix = "check the original weight; if it is not zero, export the checkpoint again"
        findings.add("block-scales-zero", "warning", tensor.name, 0, "every block scale is zero: a layer of zeros", fix)


def _problem(value: float) -> str | None:
    if not math.isfinite(value):
        return "not-finite"
    if value == 0:
        return "zero"
    if value < 0:
        return "negative"
    return None if SMALLEST_SCALE <= value <= LARGEST_SCALE else "absurd"


def _numbers(chunks: Iterable[bytes], dtype: str) -> Iterator[float]:
    for chunk in chunks:
        if dtype == "BF16":
            # The upper half of a float32.
            chunk = b"".join(b"\0\0" + chunk[i : i + 2] for i in range(0, len(chunk), 2))
        for (value,) in struct.iter_unpack("<e" if dtype == "F16" else "<f", chunk):
            yield value
