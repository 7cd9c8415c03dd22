"""The GEMM that quantizes its activations itself, on a real GPU: the bits of quantizer and GEMM, in one launch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from library import GpuProblem, native  # noqa: E402
from problem import random_problem  # noqa: E402
from replay import check_chained_replays  # noqa: E402
from test_emulated_quantize import nasty, padded_rows  # noqa: E402

from sglang_sm120.layout import padded_scale_shape  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPES = [(8, 16), (40, 48), (136, 272), (464, 3696), (896, 5120), (512, 7168), (4096, 1024), (120, 14336)]


class Layer:
    """Weights and an encode scale on the GPU."""

    def __init__(self, gpu: GpuProblem, encode_scale: float = 37.3) -> None:
        self.gpu = gpu
        self.encode_scale = torch.tensor(encode_scale, device="cuda")

    def one_launch(self, x: torch.Tensor, out: torch.Tensor, *, pdl: bool = True, forced: int = 0) -> torch.Tensor:
        gpu = self.gpu
        native().nvfp4_linear(x, self.encode_scale, gpu.b, gpu.b_scale, gpu.alpha, gpu.bias, out, pdl, forced)
        return out

    def two_launches(self, x: torch.Tensor, out: torch.Tensor, *, forced: int = 0) -> torch.Tensor:
        gpu, (m, k) = self.gpu, x.shape
        codes = torch.empty(m, k // 2, dtype=torch.uint8, device="cuda")
        scales = torch.empty(padded_scale_shape(m, k // 16), dtype=torch.uint8, device="cuda")
        native().nvfp4_quantize(x, self.encode_scale, codes, scales, True, False, False)
        native().nvfp4_gemm(codes, scales, gpu.b, gpu.b_scale, gpu.alpha, gpu.bias, out, False, forced)
        return out

    def poisoned(self, m: int) -> torch.Tensor:
        return torch.full((m, self.gpu.problem.shape[1]), float("nan"), dtype=self.gpu.problem.out_type, device="cuda")


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """The same numbers at the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_quantizer_and_gemm(n: int, k: int, dtype: torch.dtype) -> None:
    layer = Layer(GpuProblem(random_problem(1, n, k, out_type=dtype)))
    for m in (1, 2, 7, 8, 9, 15, 16):
        x = on_gpu(padded_rows(nasty(m, k, dtype), 24))
        expected = layer.two_launches(x, layer.poisoned(m))
        for pdl in (False, True):
            assert same_bits(layer.one_launch(x, layer.poisoned(m), pdl=pdl), expected), f"M={m} pdl={pdl}"


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_every_cluster_size_has_the_bits_of_the_gemm_with_it(cluster: int) -> None:
    for m, n, k in [(5, 136, 2064), (16, 40, 7168)]:
        layer = Layer(GpuProblem(random_problem(1, n, k)))
        x = on_gpu(nasty(m, k, torch.bfloat16))
        out = layer.one_launch(x, layer.poisoned(m), forced=cluster)
        assert same_bits(out, layer.two_launches(x, layer.poisoned(m), forced=cluster))


def test_a_thousand_calls_give_the_same_bits() -> None:
    for m, n, k in [(1, 512, 7168), (8, 2048, 4096), (16, 464, 3696)]:
        layer = Layer(GpuProblem(random_problem(1, n, k)))
        x = torch.randn(m, k, device="cuda", generator=torch.Generator("cuda").manual_seed(5)).to(torch.bfloat16)
        first = layer.one_launch(x, layer.poisoned(m))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            wrong += (layer.one_launch(x, layer.poisoned(m)) != first).sum()
        assert int(wrong) == 0


@pytest.mark.parametrize("m", [4, 16])
def test_graph_replays_follow_new_activations_in_a_dependent_chain(m: int) -> None:
    layer = Layer(GpuProblem(random_problem(1, 896, 5120)))
    generator = torch.Generator("cuda").manual_seed(7)
    inputs = [torch.randn(m, 5120, device="cuda", generator=generator).to(torch.bfloat16) for _ in range(4)]
    live = inputs[0].clone()
    check_chained_replays(
        (live,),
        [(x,) for x in inputs],
        [layer.two_launches(x, layer.poisoned(m)) for x in inputs],
        lambda out: layer.one_launch(live, out),
        calls=8,
        rounds=40,
    )


def test_the_plan_follows_the_work_of_an_sm() -> None:
    """The figures hold for 129 to 256 SMs."""
    device = torch.cuda.current_device()
    assert native().nvfp4_quantizes_inside(device, 8, 512, 7168)
    assert native().nvfp4_quantizes_inside(device, 8, 1024, 4096)
    assert not native().nvfp4_quantizes_inside(device, 1, 34816, 5120)
    assert not native().nvfp4_quantizes_inside(device, 17, 8, 16)


@pytest.mark.parametrize(("m", "n"), [(8, 512), (8, 16384), (17, 512)])
def test_a_layer_has_the_same_bits_whatever_the_plan_is(m: int, n: int) -> None:
    from sglang_sm120 import native as backend

    layer = Layer(GpuProblem(random_problem(1, n, 2048)))
    gpu, x = layer.gpu, on_gpu(padded_rows(nasty(m, 2048, torch.bfloat16), 4))
    out = backend.linear(x, gpu.b, gpu.b_scale, layer.encode_scale, gpu.alpha, gpu.bias)
    assert same_bits(out, layer.two_launches(x.contiguous(), layer.poisoned(m)))


@pytest.mark.parametrize(
    ("shape", "stride", "dtype", "scales", "message"),
    [
        ((17, 272), 272, torch.bfloat16, 1, "M must be at most 16"),
        ((4, 272), 272, torch.float32, 1, "x must be bfloat16 or float16"),
        ((4, 272), 276, torch.bfloat16, 1, "multiples of 16 bytes"),
        ((4, 256), 256, torch.bfloat16, 1, "same K"),
        ((4, 272), 272, torch.bfloat16, 2, "global_scale must be one float32"),
    ],
)
def test_wrong_operands_are_refused_by_name(
    shape: tuple[int, int], stride: int, dtype: torch.dtype, scales: int, message: str
) -> None:
    layer = Layer(GpuProblem(random_problem(4, 136, 272)))
    layer.encode_scale = torch.ones(scales, device="cuda")
    x = torch.empty_strided(shape, (stride, 1), dtype=dtype, device="cuda")
    with pytest.raises(ValueError, match=message):
        layer.one_launch(x, layer.poisoned(shape[0]))


def test_an_empty_batch_is_nothing_to_do() -> None:
    layer = Layer(GpuProblem(random_problem(4, 136, 272)))
    layer.one_launch(torch.empty(0, 272, dtype=torch.bfloat16, device="cuda"), layer.poisoned(0))
    torch.cuda.synchronize()
