"""The tests of this room are tested: each wrong rule is patched in, and a test has to fail.

A mutation that no test notices is a rule that nothing protects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sglang_sm120 import formats, layout, reference, scales
from tests.core import test_formats, test_gemm, test_layout, test_moe, test_quantize, test_scales
from tests.support.nvfp4 import fresh_generator

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Mutation:
    """Replace ``target.name`` by ``make(original)``; then ``test`` must fail."""

    target: object
    name: str
    make: Callable[[Any], Any]
    test: Callable[[], None]


def swap_nibbles(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda codes: (packed := function(codes)) >> 4 | packed << 4


def ties(up: bool) -> Callable[[Any], Any]:
    return lambda midpoints: tuple((value, up) for value, _ in midpoints)


def exact_products() -> None:
    test_quantize.test_random_rows_are_quantized_exactly(torch.float32, CPU, fresh_generator())


def e2m1_exhaustive() -> None:
    test_formats.test_e2m1_of_every_16_bit_number_is_the_nearest_code(CPU, torch.float16)


def gemm_exact(dtype: torch.dtype = torch.bfloat16) -> None:
    test_gemm.test_gemm_is_the_exact_result_rounded_once(3, 5, 48, dtype, CPU, fresh_generator())


def column_alpha() -> None:
    test_scales.test_every_column_gets_the_alpha_of_its_own_shard(CPU, fresh_generator())


def gated_moe() -> None:
    test_moe.test_moe_is_the_weighted_sum_of_its_experts(True, True, CPU, fresh_generator())


def one_for_all(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments: (alpha := function(*arguments)).amax().expand_as(alpha)


MUTATIONS = {
    "ties away from zero": Mutation(formats, "_E2M1_MIDPOINTS", ties(True), e2m1_exhaustive),
    "ties towards zero": Mutation(formats, "_E2M1_MIDPOINTS", ties(False), e2m1_exhaustive),
    "ties away from zero in quantize": Mutation(
        formats,
        "_E2M1_MIDPOINTS",
        ties(True),
        lambda: test_quantize.test_one_block_of_every_scale_with_every_tie(CPU),
    ),
    "high nibble first": Mutation(reference, "pack_e2m1", swap_nibbles, exact_products),
    "high nibble first, both ways": Mutation(
        test_formats, "pack_e2m1", swap_nibbles, lambda: test_formats.test_the_low_nibble_is_the_even_k(CPU)
    ),
    "scales up to 480": Mutation(
        formats,
        "_UE4M3",
        lambda grid: replace(grid, max_code=0x7F),
        lambda: test_formats.test_ue4m3_saturates_and_maps_what_is_no_scale_to_nan(CPU),
    ),
    "no subnormal scales": Mutation(
        formats,
        "_UE4M3",
        lambda grid: replace(grid, min_exponent=-7),
        lambda: test_formats.test_ue4m3_rounds_right_beside_every_value_and_midpoint(CPU),
    ),
    "output rounded through float32": Mutation(
        reference,
        "round_float64",
        lambda _: lambda value, dtype: value.to(torch.float32).to(dtype),
        lambda: test_gemm.test_the_result_is_not_rounded_through_float32(torch.bfloat16, 8, CPU),
    ),
    "rows of a tile in groups of 16": Mutation(
        layout, "_ROW_GROUP", lambda _: 16, test_layout.test_offsets_are_the_ones_of_the_drawing
    ),
    "scales not swizzled": Mutation(
        test_layout,
        "swizzle_128x4",
        lambda _: (
            lambda scales: torch.zeros(384, 8, dtype=torch.uint8).index_put_(
                tuple(torch.meshgrid(torch.arange(257), torch.arange(5), indexing="ij")), scales
            )
        ),
        lambda: test_layout.test_closed_form_and_transpose_are_the_same_bijection(5, fresh_generator()),
    ),
    "NaN becomes zero": Mutation(
        reference,
        "nearest_e2m1_code",
        lambda nearest: lambda x, scale: nearest(x, scale).masked_fill(x.isnan(), 0),
        lambda: test_quantize.test_nan_and_infinity_follow_the_documented_rule(torch.float16, CPU),
    ),
    "block scale rounded to float32 first": Mutation(
        reference,
        "encode_ue4m3",
        lambda encode: lambda amax: encode(amax.to(torch.float32)),
        lambda: test_quantize.test_the_block_scale_is_decided_on_the_exact_product(CPU, fresh_generator()),
    ),
    "one alpha for all shards": Mutation(test_scales, "column_alpha_modelopt", one_for_all, column_alpha),
    "decode scales taken for encode scales": Mutation(
        test_scales, "column_alpha_modelopt", lambda _: scales.column_alpha_compressed_tensors, column_alpha
    ),
    "bias forgotten": Mutation(reference, "gemm", lambda gemm: lambda *a: gemm(*a[:6]), gemm_exact),
    "scale bytes with a sign taken as scales": Mutation(
        formats,
        "UE4M3_NAN",
        lambda _: 0xFF,
        lambda: test_formats.test_every_scale_byte_has_its_value_or_is_nan(CPU),
    ),
    "gate and up exchanged": Mutation(
        reference, "_activate", lambda act: lambda first, name, gate: act(first, name, not gate), gated_moe
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_wrong_rule_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.test()  # right before it is wrong
    monkeypatch.setattr(mutation.target, mutation.name, mutation.make(getattr(mutation.target, mutation.name)))
    with pytest.raises(AssertionError):
        mutation.test()
    monkeypatch.undo()
    mutation.test()
