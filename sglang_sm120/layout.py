"""Where the block scales of an NVFP4 operand stand in memory.

A row of the scale matrix belongs to a row of the operand (M for activations, N for weights), a column to 16
elements along K. Checkpoints store it row-major (*linear*). Block-scaled tensor cores read it in the *128x4
swizzle*: tiles of 128 rows by 4 columns, 512 contiguous bytes each, tiles of one row of tiles next to each
other. Inside a tile the four scales of a row stay together, and rows 32 apart stand side by side::

    byte      0      4      8     12
           +------+------+------+------+
       0   | r  0 | r 32 | r 64 | r 96 |     each cell: columns c, c+1, c+2, c+3 of one row
      16   | r  1 | r 33 | r 65 | r 97 |
      32   | r  2 | r 34 | r 66 | r 98 |
       :   |  :      :      :      :   |
     496   | r 31 | r 63 | r 95 | r127 |
           +------+------+------+------+

Rows are padded to 128 and columns to 4. Padding must be zero: a kernel that reads a whole tile multiplies it
with elements that are zero, and a stale NaN there would become a NaN of the result.

Source: "Scale factor layout" of the cuBLAS documentation (1D block scaling factors, 128x4 tiles); CUTLASS,
TensorRT-LLM and FlashInfer use the same one.
"""

from __future__ import annotations

from enum import Enum

import torch

from sglang_sm120.errors import FormatError, bad_value
from sglang_sm120.formats import require_tensor

TILE_ROWS = 128
TILE_COLUMNS = 4
_TILE_BYTES = TILE_ROWS * TILE_COLUMNS
#: Rows this far apart stand side by side in a tile.
_ROW_GROUP = 32

SCALE_DTYPES = (torch.uint8, torch.float8_e4m3fn)
#: Bytes at whose multiples the rows of a packed weight start: kernels copy 16 bytes at a time.
ROW_ALIGNMENT = 16


class ScaleLayout(Enum):
    """Order of a block-scale buffer."""

    #: Row-major ``[rows, K / 16]``, as in checkpoints.
    LINEAR = "linear"
    #: The 128x4 swizzle, kept as a 2-D tensor of the padded shape.
    SWIZZLE_128X4 = "swizzle_128x4"


def padded_scale_shape(rows: int, blocks: int) -> tuple[int, int]:
    """Return the shape of a swizzled buffer: ``rows`` rounded up to 128 and ``blocks`` to 4.

    Args:
        rows: rows of the operand; 0 is allowed, an empty batch has an empty buffer.
        blocks: K / 16, at least 1.

    Raises:
        FormatError: a number out of range.
    """
    _require_extent(rows, blocks)
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-blocks // TILE_COLUMNS) * TILE_COLUMNS


def swizzle_offset(row: int, block: int, blocks: int) -> int:
    """Return the byte offset of the scale of ``row`` and ``block`` in a buffer for ``blocks`` columns.

    The closed form that kernels use; :func:`swizzle_128x4` does the same to a whole matrix by transposing.

    Raises:
        FormatError: a row or block outside the matrix.
    """
    _require_extent(row, blocks)
    if not 0 <= block < blocks:
        raise FormatError(bad_value("block", block, f"use 0 to {blocks - 1}"))
    tiles_per_row = -(-blocks // TILE_COLUMNS)
    tile = (row // TILE_ROWS) * tiles_per_row + block // TILE_COLUMNS
    row_in_tile = row % TILE_ROWS
    line = (row_in_tile % _ROW_GROUP) * (_TILE_BYTES // _ROW_GROUP)
    return tile * _TILE_BYTES + line + (row_in_tile // _ROW_GROUP) * TILE_COLUMNS + block % TILE_COLUMNS


def swizzle_128x4(scales: torch.Tensor) -> torch.Tensor:
    """Bring a linear scale matrix into the 128x4 swizzle.

    Args:
        scales: ``[rows, blocks]`` of any 1-byte dtype, row-major.

    Returns:
        ``padded_scale_shape(rows, blocks)``, same dtype and device; the padding bytes are zero.

    Raises:
        FormatError: wider elements, another rank, no columns, or a tensor that is not contiguous.
    """
    _require_bytes("scales", scales)
    rows, blocks = scales.shape
    padded_rows, padded_blocks = padded_scale_shape(rows, blocks)
    linear = torch.zeros(padded_rows, padded_blocks, dtype=torch.uint8, device=scales.device)
    linear[:rows, :blocks] = scales.view(torch.uint8)
    tiles = linear.view(
        padded_rows // TILE_ROWS,
        TILE_ROWS // _ROW_GROUP,
        _ROW_GROUP,
        padded_blocks // TILE_COLUMNS,
        TILE_COLUMNS,
    )
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_blocks).view(scales.dtype)


def unswizzle_128x4(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Undo :func:`swizzle_128x4` and drop the padding.

    Args:
        swizzled: ``[R, C]`` of any 1-byte dtype, R a multiple of 128 and C of 4. It may be larger than the
            matrix needs, as the buffer of a padded weight is; its own C gives the distance between rows of
            tiles.
        rows: rows to return, at most R.
        blocks: columns to return, at most C.

    Returns:
        ``[rows, blocks]``, same dtype and device, contiguous.

    Raises:
        FormatError: a shape that is no swizzled buffer or is too small, wider elements, or not contiguous.
    """
    _require_bytes("swizzled", swizzled)
    least_rows, least_blocks = padded_scale_shape(rows, blocks)
    have_rows, have_blocks = swizzled.shape
    if have_rows % TILE_ROWS or have_blocks % TILE_COLUMNS or have_rows < least_rows or have_blocks < least_blocks:
        remedy = f"pass the 2-D buffer of swizzle_128x4, at least [{least_rows}, {least_blocks}]"
        raise FormatError(bad_value("swizzled.shape", (have_rows, have_blocks), remedy))
    tiles = swizzled.view(torch.uint8).view(
        have_rows // TILE_ROWS,
        have_blocks // TILE_COLUMNS,
        _ROW_GROUP,
        TILE_ROWS // _ROW_GROUP,
        TILE_COLUMNS,
    )
    linear = tiles.permute(0, 3, 2, 1, 4).reshape(have_rows, have_blocks)
    return linear[:rows, :blocks].contiguous().view(swizzled.dtype)


def align_rows(packed: torch.Tensor) -> torch.Tensor:
    """Return ``packed`` with rows that start at multiples of 16 bytes.

    Args:
        packed: uint8 ``[N, K / 2]`` with adjacent columns.

    Returns:
        ``packed`` itself where its rows do, else the same shape as a view of a new buffer with padded rows. The
        padding is zero; kernels may read it and must not use it.

    Raises:
        FormatError: another dtype or rank.
    """
    if packed.dtype != torch.uint8 or packed.ndim != 2:
        raise FormatError(bad_value("packed", f"{packed.dtype} {tuple(packed.shape)}", "pass uint8 [N, K / 2]"))
    rows, width = packed.shape
    if packed.stride(0) % ROW_ALIGNMENT == 0 and packed.data_ptr() % ROW_ALIGNMENT == 0:
        return packed
    stride = -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT
    buffer = torch.zeros(rows, stride, dtype=torch.uint8, device=packed.device)
    buffer[:, :width] = packed
    return buffer[:, :width]


def _require_extent(rows: int, blocks: int) -> None:
    if rows < 0:
        raise FormatError(bad_value("row count or index", rows, "use 0 or more"))
    if blocks < 1:
        raise FormatError(bad_value("blocks", blocks, "use K / 16, at least 1"))


def _require_bytes(name: str, tensor: torch.Tensor) -> None:
    if tensor.element_size() != 1:
        raise FormatError(bad_value(f"{name}.dtype", tensor.dtype, "pass the scale bytes, one byte each"))
    require_tensor(name, tensor, (tensor.dtype,), rank=2)
