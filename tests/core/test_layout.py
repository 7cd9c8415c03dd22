"""The 128x4 swizzle: the documented offsets, a bijection, and padding that is zero."""

from __future__ import annotations

import pytest
import torch

from sglang_sm120.errors import FormatError
from sglang_sm120.layout import align_rows, padded_scale_shape, swizzle_128x4, swizzle_offset, unswizzle_128x4


def random_bytes(rows: int, blocks: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1, 256, (rows, blocks), dtype=torch.uint8, generator=generator)


def test_offsets_are_the_ones_of_the_drawing() -> None:
    one_tile = {(0, 0): 0, (0, 3): 3, (1, 0): 16, (31, 0): 496, (32, 0): 4, (33, 2): 22, (127, 3): 511}
    for (row, block), offset in one_tile.items():
        assert swizzle_offset(row, block, 4) == offset
    # 5 columns are two tiles; the second tile of a row of tiles comes before the next 128 rows
    assert swizzle_offset(0, 4, 5) == 512
    assert swizzle_offset(128, 0, 5) == 1024
    assert swizzle_offset(130, 4, 5) == 1024 + 512 + 2 * 16


def test_padded_shape_rounds_up_to_tiles() -> None:
    assert padded_scale_shape(1, 1) == (128, 4)
    assert padded_scale_shape(128, 4) == (128, 4)
    assert padded_scale_shape(129, 5) == (256, 8)
    assert padded_scale_shape(0, 1) == (0, 4)


@pytest.mark.parametrize("blocks", range(1, 10))
def test_round_trip_of_every_small_shape(blocks: int, device: torch.device, generator: torch.Generator) -> None:
    scales = random_bytes(257, blocks, generator).to(device)
    for rows in range(1, 258) if device.type == "cpu" else (1, 127, 128, 129, 257):
        swizzled = swizzle_128x4(scales[:rows])
        assert tuple(swizzled.shape) == padded_scale_shape(rows, blocks)
        assert torch.equal(unswizzle_128x4(swizzled, rows, blocks), scales[:rows])


@pytest.mark.parametrize("blocks", range(1, 10))
def test_closed_form_and_transpose_are_the_same_bijection(blocks: int, generator: torch.Generator) -> None:
    rows = 257
    scales = random_bytes(rows, blocks, generator)
    offsets = [swizzle_offset(row, block, blocks) for row in range(rows) for block in range(blocks)]
    flat = swizzle_128x4(scales).flatten()
    assert len(set(offsets)) == rows * blocks
    assert torch.equal(flat[torch.tensor(offsets)], scales.flatten())
    padding = torch.ones_like(flat, dtype=torch.bool)
    padding[torch.tensor(offsets)] = False
    assert not flat[padding].any()


def test_padding_is_zero_even_if_the_memory_was_poisoned(device: torch.device) -> None:
    for rows, blocks in ((1, 1), (5, 3), (129, 5), (200, 9)):
        scales = torch.full((rows, blocks), 0x7F, dtype=torch.uint8, device=device)
        for _ in range(4):
            poison = torch.full(padded_scale_shape(rows, blocks), 0xFF, dtype=torch.uint8, device=device)
            del poison
            assert int((swizzle_128x4(scales) != 0).sum()) == rows * blocks


def test_unswizzle_ignores_padding_and_takes_the_pitch_from_the_buffer(generator: torch.Generator) -> None:
    whole = swizzle_128x4(random_bytes(300, 11, generator))
    linear = unswizzle_128x4(whole, 384, 12)
    assert torch.equal(unswizzle_128x4(whole, 130, 6), linear[:130, :6])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_any_one_byte_dtype_keeps_its_dtype_and_bits(dtype: torch.dtype, generator: torch.Generator) -> None:
    scales = random_bytes(130, 5, generator)
    swizzled = swizzle_128x4(scales.view(dtype))
    assert swizzled.dtype == dtype
    assert torch.equal(swizzled.view(torch.uint8), swizzle_128x4(scales))
    back = unswizzle_128x4(swizzled, 130, 5)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scales)


@pytest.mark.parametrize("width", [8, 24, 72, 1848])
def test_rows_are_moved_to_multiples_of_16_bytes_with_zeros_behind(width: int) -> None:
    packed = torch.randint(1, 256, (5, width), dtype=torch.uint8)
    aligned = align_rows(packed)
    assert torch.equal(aligned, packed)
    assert aligned.stride() == (-(-width // 16) * 16, 1)
    assert aligned.data_ptr() % 16 == 0
    whole = aligned.as_strided((5, aligned.stride(0)), aligned.stride())
    assert not whole[:, width:].any()


def test_rows_that_stand_right_stay_where_they_are() -> None:
    packed = torch.zeros(5, 32, dtype=torch.uint8)
    assert align_rows(packed) is packed
    padded = align_rows(torch.zeros(5, 24, dtype=torch.uint8))
    assert align_rows(padded) is padded


def test_a_start_between_two_multiples_is_moved() -> None:
    off = torch.arange(5 * 32 + 3, dtype=torch.uint8)[3:].view(5, 32)
    aligned = align_rows(off)
    assert aligned.data_ptr() % 16 == 0
    assert torch.equal(aligned, off)


def test_only_packed_weights_have_rows_to_align() -> None:
    with pytest.raises(FormatError, match="packed"):
        align_rows(torch.zeros(4, 4))
