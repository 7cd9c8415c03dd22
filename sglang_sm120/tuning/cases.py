"""What is measured: the (N, K) of a model's dense NVFP4 layers on one rank, and the M that a server runs. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.models.architecture import read_model
from sglang_sm120.models.budget import Setup, draft_step, step
from sglang_sm120.models.quantization import read_quantization
from sglang_sm120.models.source import load_source

#: Decode: one row per sequence. Verification of MTP drafts: one row per sequence and drafted token, so the same
#: range and its multiples of three. Prefill: chunks.
ROWS: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 2048, 8192)
#: SGLang pads N and K to it before FlashInfer sees them (ModelOpt).
_PADDING = 32


@dataclass(frozen=True)
class Shape:
    """One (N, K) as it reaches the kernel, and the layers that have it."""

    n: int
    k: int
    layers: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def label(self) -> str:
        """For messages and tables."""
        return f"N={self.n} K={self.k}"


def shapes_of_model(model: str, tp: int) -> list[Shape]:
    """Return the distinct shapes of the dense NVFP4 layers of a model on one of ``tp`` ranks; empty if it has none.

    Args:
        model: a folder, a ``config.json``, a hub id in the local cache, or a preset.
        tp: tensor-parallel ranks.

    Raises:
        ConfigError: the model is not known or cannot be divided.
    """
    source = load_source(model)
    read, quantization, setup = read_model(source), read_quantization(source.quantization), Setup(tp=tp)
    found: dict[tuple[int, int], list[str]] = {}
    for use in (*step(read, quantization, setup), *draft_step(read, quantization, setup)):
        if use.format == "nvfp4" and not use.gemm.is_expert:
            names = found.setdefault((padded(use.n), padded(use.k)), [])
            if use.gemm.name not in names:
                names.append(use.gemm.name)
    return [Shape(n, k, tuple(names)) for (n, k), names in found.items()]


def read_shapes(texts: Iterable[str]) -> list[Shape]:
    """Read shapes such as ``4096x7168`` (N x K).

    Raises:
        ConfigError: not of this form, or no NVFP4 shape.
    """
    found = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,7})[xX](\d{1,7})", text)
        n, k = (int(match[1]), int(match[2])) if match else (0, 0)
        if n < 1 or k < 16 or k % 16:
            raise ConfigError(bad_value("--shape", text, "write NxK, for example 4096x7168, with K a multiple of 16"))
        found.append(Shape(n, k))
    return found


def read_rows(text: str) -> tuple[int, ...]:
    """Read M values such as ``1,16,128``; empty for :data:`ROWS`.

    Raises:
        ConfigError: not of this form.
    """
    if not text:
        return ROWS
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text) or 0 in (values := {int(part) for part in text.split(",")}):
        raise ConfigError(bad_value("--rows", text, "write numbers of rows with commas between them, such as 1,16,128"))
    return tuple(sorted(values))


def padded(size: int) -> int:
    """Return N or K as it is measured: as SGLang pads it for FlashInfer (ModelOpt)."""
    return -(-size // _PADDING) * _PADDING
