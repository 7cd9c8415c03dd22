"""The old operators against the oracle, expert by expert: who gets which scale, where bytes go, what stays zero."""

from __future__ import annotations

import pytest
import torch

from sglang_sm120 import reference
from sglang_sm120.backends.operator_table import OPERATORS
from sglang_sm120.errors import FormatError, UnsupportedError
from sglang_sm120.layout import ScaleLayout, unswizzle_128x4
from sglang_sm120.sgl_kernel_ops import experts, matmul, quantizers, registration
from tests.sgl_kernel_ops.cases import COUNTS, Sorted, linear_scales, make_sorted, oracle
from tests.support.nvfp4 import random_activation

BACKEND = "torch_reference"


def quantized(case: Sorted) -> tuple[torch.Tensor, torch.Tensor]:
    return quantizers.scaled_fp4_experts_quant(
        case.rows, case.encode, case.expert_offsets, case.scale_offsets, 1, backend=BACKEND
    )


def test_each_row_is_quantized_with_the_scale_of_its_expert(generator: torch.Generator) -> None:
    case = make_sorted(generator)
    codes, scales = quantized(case)
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float8_e4m3fn)
    starts = case.expert_offsets.tolist()
    for expert, found in enumerate(linear_scales(case, scales)):
        right, right_scales = oracle(case, expert)
        assert torch.equal(codes[starts[expert] : starts[expert + 1]], right)
        assert torch.equal(found, right_scales.view(torch.uint8))


def test_every_byte_of_padding_is_zero(generator: torch.Generator) -> None:
    """K / 16 is 6 of 8 columns; 130 rows leave 126 of their second tile."""
    case = make_sorted(generator)
    scales = quantized(case)[1].view(torch.uint8)
    kept = torch.zeros(scales.shape[0], 6, dtype=torch.uint8)
    for start, found in zip(case.scale_offsets.tolist(), linear_scales(case, scales), strict=False):
        kept[start : start + found.shape[0]] = found
    assert int(scales.count_nonzero()) == int(kept.count_nonzero()) > 0


def test_tokens_are_taken_by_the_map(generator: torch.Generator) -> None:
    case = make_sorted(generator)
    order = torch.randperm(case.rows.shape[0], generator=generator)
    tokens = torch.empty_like(case.rows)
    tokens[order] = case.rows
    with_map = quantizers.scaled_fp4_experts_quant(
        tokens, case.encode, case.expert_offsets, case.scale_offsets, 1, order.to(torch.int32), backend=BACKEND
    )
    for found, right in zip(with_map, quantized(case), strict=True):
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))
    with pytest.raises(FormatError, match=r"expert_map\.shape"):
        quantizers.scaled_fp4_experts_quant(
            tokens, case.encode, case.expert_offsets, case.scale_offsets, 2, order, backend=BACKEND
        )


def test_silu_and_mul_rounds_once_and_is_then_quantized(generator: torch.Generator) -> None:
    case = make_sorted(generator)
    both = random_activation(case.rows.shape[0], 192, torch.bfloat16, generator)
    gate, up = both.double().chunk(2, 1)
    activated = (gate * torch.sigmoid(gate) * up).to(torch.bfloat16)
    fused = quantizers.silu_and_mul_scaled_fp4_experts_quant_packed(
        both, case.encode, case.expert_offsets, case.scale_offsets, 1, backend=BACKEND
    )
    apart = quantizers.scaled_fp4_experts_quant(
        activated, case.encode, case.expert_offsets, case.scale_offsets, 1, backend=BACKEND
    )
    # float32 instead of float64 may round an element of the activation to its neighbour in bf16.
    different = (fused[0] != apart[0]).sum() + (fused[1].view(torch.uint8) != apart[1].view(torch.uint8)).sum()
    assert int(different) <= 0.005 * fused[0].numel()


@pytest.mark.parametrize("activated", [False, True])
def test_groups_come_out_in_the_layout_of_the_masked_gemm(activated: bool, generator: torch.Generator) -> None:
    groups, m, k = 3, 20, 96
    x = random_activation(groups * m, 2 * k if activated else k, torch.float16, generator).view(groups, m, -1)
    x[1, 15:] = torch.nan  # what no token wrote
    encode, mask = torch.rand(groups, generator=generator) * 9 + 1, torch.tensor([20, 15, 0], dtype=torch.int32)
    name = "silu_and_mul_scaled_fp4_grouped_quant" if activated else "scaled_fp4_grouped_quant"
    codes, scales = getattr(quantizers, name)(x, encode, mask, backend=BACKEND)
    assert tuple(codes.shape) == (m, k // 2, groups)
    assert tuple(scales.shape) == (32, 4, 1, 4, 2, groups)
    if activated:
        gate, up = x.float().chunk(2, -1)
        x = (torch.nn.functional.silu(gate) * up).half()
    for group, count in enumerate(mask.tolist()):
        right, right_scales = reference.quantize(x[group, :count].contiguous(), encode[group], ScaleLayout.LINEAR)
        assert torch.equal(codes[:count, :, group], right)
        assert not codes[count:, :, group].any()
        for row in (0, 11, 14, 19):
            column = scales.view(torch.uint8)[row % 32, row // 32, 0, :, :, group].T.flatten()[: k // 16]
            expected = right_scales[row].view(torch.uint8) if row < count else torch.zeros_like(column)
            assert torch.equal(column, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_row_is_multiplied_with_the_weight_of_its_expert(dtype: torch.dtype, generator: torch.Generator) -> None:
    case = make_sorted(generator, dtype=dtype)
    codes, scales = quantized(case)
    out = matmul.cutlass_fp4_group_mm(
        codes, case.packed(), scales, case.scales(), case.alphas, dtype, case.params, backend=BACKEND
    )
    starts = case.expert_offsets.tolist()
    assert out.dtype == dtype
    for expert, weight in enumerate(case.weights):
        rows = case.rows[starts[expert] : starts[expert + 1]]
        right = reference.linear(rows, weight.packed, weight.scales, case.encode[expert], case.alphas[expert])
        assert torch.equal(out[starts[expert] : starts[expert + 1]], right)


def test_rows_of_no_expert_are_zero(generator: torch.Generator) -> None:
    """Expert parallelism leaves slots of other ranks behind the last expert of this one."""
    case = make_sorted(generator)
    codes, scales = quantized(case)
    params = {**case.params, "problem_sizes": case.sizes.clone()}
    params["problem_sizes"][4, 0] = 0
    out = matmul.cutlass_fp4_group_mm(
        codes, case.packed(), scales, case.scales(), case.alphas, torch.bfloat16, params, backend=BACKEND
    )
    assert out[:131].any(1).all()
    assert not out[131:].any()


def test_one_weight_and_leading_dimensions(generator: torch.Generator) -> None:
    x = random_activation(6, 96, torch.bfloat16, generator)
    weight, encode = make_sorted(generator).weights[0], torch.tensor([5.0])
    codes, scales = quantizers.scaled_fp4_quant(x.view(2, 3, 96), encode, backend=BACKEND)
    out = matmul.cutlass_scaled_fp4_mm(
        codes, weight.packed, scales, weight.scales, torch.tensor([0.5]), torch.bfloat16, backend=BACKEND
    )
    assert tuple(scales.shape) == (128, 8)
    assert torch.equal(out, reference.linear(x, weight.packed, weight.scales, encode, torch.tensor(0.5)))
    assert quantizers.scaled_fp4_quant(x[0], encode, backend=BACKEND)[0].shape == (1, 48)


def test_the_torch_operators_do_the_same_and_are_registered_once(generator: torch.Generator) -> None:
    assert set(registration.register_missing(BACKEND)) == {o.torch_name for o in OPERATORS if o.torch_name}
    assert registration.register_missing(BACKEND) == []
    operators = torch.ops.sgl_kernel
    for operator in OPERATORS:
        if operator.torch_name:
            written = torch._C.parse_schema(f"sgl_kernel::{operator.torch_name}{operator.schema}")
            assert getattr(operators, operator.torch_name).default._schema == written
    case = make_sorted(generator)
    codes, scales = quantized(case)
    filled = torch.full_like(codes, 0x55), torch.full((512, 2), -1, dtype=torch.int32)
    operators.scaled_fp4_experts_quant(*filled, case.rows, case.encode, case.expert_offsets, case.scale_offsets)
    assert torch.equal(filled[0], codes)
    assert torch.equal(filled[1].view(torch.uint8)[: scales.shape[0]], scales.view(torch.uint8)[:512])
    out = torch.empty(codes.shape[0], 40, dtype=torch.bfloat16)
    unused = torch.empty(len(COUNTS), dtype=torch.int64)
    where = (case.sizes, case.expert_offsets[:-1], case.scale_offsets[:-1])
    operators.cutlass_fp4_group_mm(
        out, codes, case.packed(), scales, case.scales(), case.alphas, unused, unused, *where
    )
    right = matmul.cutlass_fp4_group_mm(
        codes, case.packed(), scales, case.scales(), case.alphas, torch.bfloat16, case.params, backend=BACKEND
    )
    assert torch.equal(out, right)
    x = random_activation(40, 64, torch.bfloat16, generator).view(2, 20, 64)
    mask, encode = torch.tensor([20, 7], dtype=torch.int32), torch.tensor([2.0, 3.0])
    packed, blocks = torch.empty(40, 16, dtype=torch.uint8), torch.empty(256, 1, dtype=torch.int32)
    operators.silu_and_mul_scaled_fp4_experts_quant(packed, blocks, x.view(40, 64), encode, mask, True)
    masked, tiles = quantizers.silu_and_mul_scaled_fp4_grouped_quant(x, encode, mask, backend=BACKEND)
    assert torch.equal(packed.view(2, 20, 16), masked.permute(2, 0, 1))
    for group in range(2):
        rows = unswizzle_128x4(blocks.view(torch.uint8)[128 * group : 128 * group + 128], 20, 2)
        assert torch.equal(rows, tiles.view(torch.uint8)[:20, 0, 0, :2, 0, group])
    weight = case.weights[1]
    one, alpha = torch.tensor(4.0), torch.tensor(0.25)
    product = torch.empty(146, 40, dtype=torch.bfloat16)
    flat, flat_scales = torch.empty(148, 48, dtype=torch.uint8), torch.empty(256, 2, dtype=torch.int32)
    operators.scaled_fp4_quant(flat, case.rows, flat_scales, one)
    operators.cutlass_scaled_fp4_mm(
        product, flat[:146], weight.packed, flat_scales.view(torch.float8_e4m3fn), weight.scales, alpha
    )
    assert torch.equal(product, reference.linear(case.rows[:146], weight.packed, weight.scales, one, alpha))


def test_offsets_that_do_not_fit_are_refused(generator: torch.Generator) -> None:
    case = make_sorted(generator)
    codes, scales = quantized(case)
    arguments = (codes, case.packed(), scales, case.scales(), case.alphas, torch.bfloat16)
    for change, name in (
        ({"blockscale_offsets": case.scale_offsets[:-1] + 4}, r"blockscale_offsets\[1\]"),
        ({"blockscale_offsets": case.scale_offsets[:-1] + 1024}, r"blockscale_offsets\[\d\]"),
        ({"expert_offsets": case.expert_offsets[:-1] + 1}, r"expert_offsets\[4\]"),
        ({"expert_offsets": case.expert_offsets[:-1] - 2}, "offsets of expert"),
        ({"expert_offsets": case.expert_offsets}, "entries per expert"),
    ):
        with pytest.raises(FormatError, match=name):
            matmul.cutlass_fp4_group_mm(*arguments, {**case.params, **change}, backend=BACKEND)
    with pytest.raises(FormatError, match="bfloat16 or float16"):
        quantizers.scaled_fp4_quant(case.rows.float(), torch.tensor(1.0), backend=BACKEND)


def test_a_capture_is_refused_before_the_host_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="--disable-cuda-graph"):
        experts.spans(OnGpu(), OnGpu(), OnGpu())  # type: ignore[arg-type]
