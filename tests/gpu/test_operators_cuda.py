"""The old NVFP4 operators on a GPU, beside the real ``sgl_kernel`` wheel where one is installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from sglang_sm120.backends.operator_table import OPERATORS
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.sgl_kernel_ops import matmul, quantizers, registration
from sglang_sm120.sgl_kernel_ops.runner import cutlass_moe_fp4
from tests.sgl_kernel_ops.cases import make_sorted
from tests.sgl_kernel_ops.checks import check_experts
from tests.support.moe_problem import random_moe
from tests.support.nvfp4 import assert_matches_oracle, fresh_generator, random_activation

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [96, 48, 2048])
def test_each_expert_is_quantized_and_multiplied_by_itself(k: int, dtype: torch.dtype) -> None:
    check_experts(make_sorted(fresh_generator(), k=k, n=264, dtype=dtype, device=DEVICE), "sm120")


def test_the_wheels_without_them_get_the_torch_operators() -> None:
    """sgl_kernel 0.4.x, which SGLang 0.5.10 and later pin, has none of them; where a wheel has one, it stays."""
    if find_spec("sgl_kernel") is not None:
        import_module("sgl_kernel")
    names = {operator.torch_name for operator in OPERATORS if operator.torch_name}
    there = {name for name in names if hasattr(torch.ops.sgl_kernel, name)}
    assert set(registration.register_missing("sm120")) == names - there
    case = make_sorted(fresh_generator(), device=DEVICE)
    right, right_scales = quantizers.scaled_fp4_experts_quant(
        case.rows, case.encode, case.expert_offsets, case.scale_offsets, 1, backend="sm120"
    )
    codes = torch.empty_like(right)
    scales = torch.empty(512, 2, dtype=torch.int32, device=DEVICE)
    arguments = (case.rows, case.encode, case.expert_offsets, case.scale_offsets)
    torch.ops.sgl_kernel.scaled_fp4_experts_quant(codes, scales, *arguments)
    assert torch.equal(codes, right)
    if "scaled_fp4_experts_quant" not in there:  # the wheel's own leaves its padding as it was
        assert torch.equal(scales.view(torch.uint8), right_scales.view(torch.uint8)[:512])


def test_a_graph_records_the_masked_quantizer_and_refuses_the_experts() -> None:
    generator = fresh_generator()
    x = random_activation(40, 96, torch.bfloat16, generator, DEVICE).view(2, 20, 96)
    encode, mask = torch.tensor([2.0, 3.0], device=DEVICE), torch.tensor([20, 7], dtype=torch.int32, device=DEVICE)
    case = make_sorted(generator, device=DEVICE)
    expected = [t.clone() for t in quantizers.scaled_fp4_grouped_quant(x, encode, mask, backend="sm120")]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, scales = quantizers.scaled_fp4_grouped_quant(x, encode, mask, backend="sm120")
        with pytest.raises(UnsupportedError, match="--disable-cuda-graph"):
            quantizers.scaled_fp4_experts_quant(
                case.rows, case.encode, case.expert_offsets, case.scale_offsets, 1, backend="sm120"
            )
    codes.zero_()
    graph.replay()
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales.view(torch.uint8), expected[1].view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 9, 160])
def test_a_graph_records_the_whole_runner_and_follows_other_ids(tokens: int) -> None:
    case = random_moe(tokens, 16, 4, 512, 256, gate_first=True, per_expert=True, device=DEVICE)
    first = (case.w13.input_global_scale, case.w13.packed, case.w13.scales, case.w13.alpha)
    second = (case.w2.input_global_scale, case.w2.packed, case.w2.scales, case.w2.alpha)

    def call(backend: str) -> torch.Tensor:
        return cutlass_moe_fp4(case.hidden, *first, *second, case.weights, case.ids, None, backend=backend)

    call("sm120")  # what is compiled or asked once is done before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call("sm120")
        with pytest.raises(UnsupportedError, match="--disable-cuda-graph"):
            call("torch_reference")
    case.ids.copy_(torch.where(case.ids % 3 == 0, -1, (case.ids + 5) % 16))  # other experts, and other ranks'
    graph.replay()
    total, bound = case.expected()
    assert_matches_oracle(out.cpu(), total.cpu(), bound.cpu())


def test_one_weight_is_multiplied_as_by_the_dense_operator() -> None:
    case = make_sorted(fresh_generator(), k=256, device=DEVICE)
    weight, encode = case.weights[0], case.encode[:1]
    codes, scales = quantizers.scaled_fp4_quant(case.rows, encode, backend="sm120")
    dense = matmul.cutlass_scaled_fp4_mm(
        codes, weight.packed, scales, weight.scales, case.alphas[:1], torch.bfloat16, backend="sm120"
    )
    exact = matmul.cutlass_scaled_fp4_mm(
        codes, weight.packed, scales, weight.scales, case.alphas[:1], torch.bfloat16, backend="torch_reference"
    )
    torch.testing.assert_close(dense, exact, rtol=2**-7, atol=1e-3)
