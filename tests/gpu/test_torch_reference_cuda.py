"""The oracle through SGLang's real linear methods on a GPU: the same numbers, graphs and torch.compile."""

from __future__ import annotations

import pytest
import torch

from sglang_sm120 import ops, self_test
from sglang_sm120.backends.record import HostFacts
from tests.host.conftest import Serving
from tests.host.linear_layers import Case, make_case
from tests.support.nvfp4 import assert_matches_oracle, fresh_generator, random_activation

pytestmark = pytest.mark.gpu
KINDS = ["modelopt", "compressed-tensors", "modelopt, weight-only"]


def here() -> HostFacts:
    return HostFacts(capability=torch.cuda.get_device_capability(), device_name=torch.cuda.get_device_name())


def check(case: Case, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    expected, product = case.expected(x, bias), case.expected(x).abs()
    out = case.run(x.cuda(), None if bias is None else bias.cuda())
    assert out.is_cuda
    tiny = (float(product.max()) * 1e-12 if product.numel() else 0.0) + 1e-30
    assert_matches_oracle(out.cpu(), expected, expected.abs() * 2.0**-8 + product * 2.0**-22 + tiny)


def test_the_self_test_passes_on_this_gpu() -> None:
    self_test.run("torch_reference", "cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("m", "widths", "k"), [(1, [512], 7168), (7, [200], 3696), (33, [128, 64, 64], 256), (0, [64], 48)]
)
def test_layers_are_right_below_capability_10(serving: Serving, kind: str, m: int, widths: list[int], k: int) -> None:
    serving.decide("torch_reference", facts=here())
    generator = fresh_generator()
    case = make_case(kind, k, widths, generator, same_scales=False, device="cuda")
    bias = torch.randn(sum(widths), generator=generator).to(torch.bfloat16)
    check(case, random_activation(m, k, torch.bfloat16, generator), bias)


def test_a_captured_graph_replays_with_new_inputs_and_reloaded_weights(serving: Serving) -> None:
    serving.decide("torch_reference", facts=here())
    generator = fresh_generator()
    case = make_case("modelopt", 256, [128, 64], generator, same_scales=False, device="cuda")
    x = random_activation(5, 256, torch.bfloat16, generator).cuda()
    case.run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(x)
    for _ in range(3):
        x.copy_(random_activation(5, 256, torch.bfloat16, generator))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, case.run(x))
    fresh = make_case("modelopt", 256, [128, 64], generator, same_scales=False, device="cuda")
    case.load(fresh.shards)
    case.prepare()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, fresh.run(x))


def test_torch_compile_takes_the_layer_as_one_graph(serving: Serving) -> None:
    serving.decide("torch_reference", facts=here())
    generator = fresh_generator()
    case = make_case("compressed-tensors", 256, [128], generator, device="cuda")
    compiled = torch.compile(lambda x: torch.relu(case.run(x)) + 1, fullgraph=True)
    x = random_activation(9, 256, torch.bfloat16, generator).cuda()
    assert torch.equal(compiled(x), torch.relu(case.run(x)) + 1)


def test_the_operators_allocate_only_what_they_return_and_never_wait(serving: Serving) -> None:
    """A capture would fail on a synchronisation; this says which operator it was."""
    x = random_activation(4, 64, torch.bfloat16, fresh_generator()).cuda()
    scale = torch.tensor(100.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed, scales = ops.nvfp4_quantize(x, scale, True, "torch_reference")
        ops.nvfp4_gemm(packed, packed, scales, scales, scale, None, torch.bfloat16, "torch_reference")
    finally:
        torch.cuda.set_sync_debug_mode("default")
