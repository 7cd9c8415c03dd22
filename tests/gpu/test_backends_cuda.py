"""Backends of ours through SGLang's real linear methods on a GPU: the same numbers, graphs and torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_sm120 import native, ops, self_test
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.device import collect_facts
from tests.host import sm120_layers
from tests.host.conftest import Serving
from tests.host.linear_layers import Case, make_case
from tests.support.nvfp4 import assert_matches_oracle, fresh_generator, random_activation

pytestmark = pytest.mark.gpu
OURS = [record.value for record in BACKENDS.values() if record.implementation is not None and not record.per_call]
#: What each backend of ours multiplies.
KINDS = [
    (backend, kind)
    for backend in OURS
    for kind in ("modelopt", "compressed-tensors", "modelopt, weight-only")
    if BACKENDS[backend].serves_weight_only or not kind.endswith("weight-only")
]
Make = Callable[..., Case]


@pytest.fixture(scope="module")
def facts() -> HostFacts:
    """Of this machine; a backend that the table refuses here fails its tests instead of vanishing from them."""
    return collect_facts()


@pytest.fixture
def make(serving: Serving, facts: HostFacts) -> Make:
    """Make a layer on the GPU that the named backend serves."""

    def make_layer(backend: str, *args: object, **kwargs: object) -> Case:
        serving.decide(backend, facts=facts)
        creator = make_case if backend == "torch_reference" else sm120_layers.make_sm120_case
        return creator(*args, device="cuda", **kwargs)  # type: ignore[arg-type]

    return make_layer


def check(backend: str, case: Case, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    if backend != "torch_reference":
        sm120_layers.check(case, x, bias)
        return
    expected, product = case.expected(x, bias), case.expected(x).abs()
    out = case.run(x.cuda(), None if bias is None else bias.cuda())
    assert out.is_cuda
    tiny = (float(product.max()) * 1e-12 if product.numel() else 0.0) + 1e-30
    assert_matches_oracle(out.cpu(), expected, expected.abs() * 2.0**-8 + product * 2.0**-22 + tiny)


@pytest.mark.parametrize("backend", OURS)
def test_the_self_test_passes_on_this_gpu(backend: str) -> None:
    self_test.run(backend, "cuda")


@pytest.mark.parametrize(("backend", "kind"), KINDS)
@pytest.mark.parametrize(
    ("m", "widths", "k"),
    [
        (1, [512], 7168),
        (7, [200], 3696),
        (33, [128, 64, 64], 256),
        (0, [64], 48),
        (65, [96, 40], 144),
        (1000, [464], 176),
    ],
)
def test_layers_are_right(make: Make, backend: str, kind: str, m: int, widths: list[int], k: int) -> None:
    generator = fresh_generator()
    case = make(backend, kind, k, widths, generator, same_scales=False)
    bias = torch.randn(sum(widths), generator=generator).to(torch.bfloat16)
    check(backend, case, random_activation(m, k, torch.bfloat16, generator), bias)


@pytest.mark.parametrize("backend", OURS)
def test_half_precision_and_shards_of_different_input_scales(make: Make, backend: str) -> None:
    generator = fresh_generator()
    scales = [0.002, 0.004, 0.001]
    case = make(backend, "modelopt", 144, [128, 64, 72], generator, dtype=torch.float16, input_decode=scales)
    if backend == "torch_reference":
        x = random_activation(11, 144, torch.float16, generator)
        expected = case.expected(x)
        assert_matches_oracle(case.run(x.cuda()).cpu(), expected, expected.abs() * 2.0**-10 + 2.0**-20)
    else:
        check(backend, case, random_activation(11, 144, torch.float16, generator))


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("k", [256, 144])
def test_a_captured_graph_replays_with_new_inputs_and_reloaded_weights(make: Make, backend: str, k: int) -> None:
    """144 / 2 bytes are no multiple of 16: the weight is a view of a padded buffer, which a reload must write to."""
    generator = fresh_generator()
    case = make(backend, "modelopt", k, [128, 64], generator, same_scales=False)
    x = random_activation(5, k, torch.bfloat16, generator).cuda()
    case.run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(x)
    for _ in range(3):
        x.copy_(random_activation(5, k, torch.bfloat16, generator))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, case.run(x))
    fresh = make(backend, "modelopt", k, [128, 64], generator, same_scales=False)
    case.load(fresh.shards)
    case.prepare()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, fresh.run(x))


@pytest.mark.parametrize("backend", OURS)
def test_a_captured_chain_of_layers_gives_what_the_layers_give_one_by_one(make: Make, backend: str) -> None:
    """Launched as dependents, a layer's GEMM starts while the layer in front still runs."""
    generator = fresh_generator()
    chain = [make(backend, "modelopt", 256, [256], generator) for _ in range(6)]
    x = random_activation(4, 256, torch.bfloat16, generator).cuda()

    def run_all(hidden: torch.Tensor) -> torch.Tensor:
        for case in chain:
            hidden = case.run(hidden)
            hidden = hidden / hidden.abs().amax()  # keeps activations in the range of the scales
        return hidden

    expected = x
    for case in chain:
        torch.cuda.synchronize()
        expected = case.run(expected)
        torch.cuda.synchronize()
        expected = expected / expected.abs().amax()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_all(x)
    for _ in range(20):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", OURS)
def test_torch_compile_takes_the_layer_as_one_graph(make: Make, backend: str) -> None:
    generator = fresh_generator()
    case = make(backend, "compressed-tensors", 256, [128], generator)
    compiled = torch.compile(lambda x: torch.relu(case.run(x)) + 1, fullgraph=True)
    x = random_activation(9, 256, torch.bfloat16, generator).cuda()
    assert torch.equal(compiled(x), torch.relu(case.run(x)) + 1)


@pytest.mark.parametrize("backend", OURS)
def test_the_operators_never_wait_for_the_gpu(backend: str) -> None:
    """A capture would fail on a synchronisation; this says which operator it was."""
    x = random_activation(4, 64, torch.bfloat16, fresh_generator()).cuda()
    weight = torch.zeros(8, 32, dtype=torch.uint8, device="cuda")
    scales = torch.zeros(128, 4, dtype=torch.uint8, device="cuda")
    scale = torch.tensor(100.0, device="cuda")
    ops.start(backend, x.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed, x_scales = ops.nvfp4_quantize(x, scale, True, backend)
        ops.nvfp4_gemm(packed, weight, x_scales, scales, scale, None, torch.bfloat16, backend)
        ops.nvfp4_linear(x, weight, scales, scale, scale, None, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_kernels_allocate_only_what_they_return() -> None:
    x = random_activation(4, 64, torch.bfloat16, fresh_generator()).cuda()
    weight = torch.zeros(8, 32, dtype=torch.uint8, device="cuda")
    scales = torch.zeros(128, 4, dtype=torch.uint8, device="cuda")
    scale = torch.tensor(100.0, device="cuda")
    native.linear(x, weight, scales, scale, scale, None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    packed, x_scales = native.quantize(x, scale, True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2
    native.gemm(packed, weight, x_scales, scales, scale, None, torch.bfloat16)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 3
