"""The steps of a probe: the quantizer alone, products on poisoned memory, launches in a row, a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_sm120 import reference
from sglang_sm120.capture import captured
from sglang_sm120.layout import padded_scale_shape, swizzle_128x4
from sglang_sm120.probing.checks import check_product, check_quantized, gemm_bound
from sglang_sm120.probing.operations import Operations
from sglang_sm120.probing.plan import Plan
from sglang_sm120.scales import encode_scale_from_amax

#: A name, and what runs; it may return a line about what it found.
Step = tuple[str, Callable[[], str | None]]


def planned(operations: Operations, plan: dict[str, Any], device: torch.device) -> Iterator[Step]:
    """:func:`steps` for the child process, which has the plan as JSON."""
    return steps(operations, Plan.from_json(plan), device)


def steps(operations: Operations, plan: Plan, device: torch.device) -> Iterator[Step]:
    """Yield the name of each step and what it runs: the quantizer alone first, then products, then both in a row."""
    data = DenseData(device)
    if operations.quantize is not None and operations.judges_quantizer:
        for k in plan.widths:
            for m in plan.rows:
                yield f"quantizer M={m} K={k}", lambda m=m, k=k: _quantizer(operations, data, m, k)  # type: ignore[misc]
    if operations.gemm is None:
        return
    for index, (n, k) in enumerate(plan.shapes):
        weight = data.weight(n, k)
        for name in plan.dtypes if index == 0 else plan.dtypes[:1]:
            dtype: torch.dtype = getattr(torch, name)
            for m in plan.rows:
                place = f"M={m} N={n} K={k} {name}"
                problem = (operations, data, weight, m, dtype, plan.repeats)
                yield f"GEMM {place}", lambda p=problem: _products(*p)  # type: ignore[misc]
                if operations.linear is not None:
                    yield f"linear {place}", lambda p=problem: _linear(*p)  # type: ignore[misc]
    if operations.quantize is None or plan.burst == 0:
        return
    for n, k in plan.shapes:
        weight = data.weight(n, k)
        yield f"{plan.burst} launches in a row N={n} K={k}", lambda w=weight: _burst(operations, data, w, plan)  # type: ignore[misc]
        if device.type == "cuda":
            yield f"CUDA graph N={n} K={k}", lambda w=weight: _graph(operations, data, w, plan)  # type: ignore[misc]


class DenseWeight:
    """A random weight with one global scale, and with one for each column.

    Attributes:
        packed: e2m1 codes, uint8 [N, K/2].
        scales: e4m3 bytes in the 128x4 swizzle.
        alpha: float32 [].
        alphas: float32 [N].
        bias: float32 [N].
    """

    def __init__(self, data: DenseData, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.packed = data.bytes(0, 256, n, k // 2)
        scales = data.bytes(0x18, 0x60, n, k // 16)
        scales[::7, ::3] = 0
        self.scales = swizzle_128x4(scales)
        self.alpha = torch.full((), 1.5e-4, dtype=torch.float32, device=data.device)
        self.alphas = (data.normal(n, 1).flatten().abs() + 0.5) * 1e-4
        self.bias = data.normal(n, 1).flatten()

    def epilogue(self, per_column: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Alpha and bias: in each column, or one alpha and no bias."""
        return (self.alphas, self.bias.to(dtype)) if per_column else (self.alpha, None)


class DenseData:
    """Random operands of dense layers, from a seed, so that a verdict can be repeated.

    Args:
        device: where they lie; the numbers are the same everywhere.
        seed: of the numbers.
    """

    def __init__(self, device: torch.device, seed: int = 20) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)
        self._weights: dict[tuple[int, int], DenseWeight] = {}

    def bytes(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Bytes of ``[low, high)``."""
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=self._generator).to(self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        """Normal float32 numbers."""
        return torch.randn(*shape, generator=self._generator).to(self.device)

    def weight(self, n: int, k: int) -> DenseWeight:
        """The weight of these sizes, made once."""
        if (n, k) not in self._weights:
            self._weights[n, k] = DenseWeight(self, n, k)
        return self._weights[n, k]

    def activation(self, m: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of different size, a block of zeros and one of tiny numbers; and the encode scale."""
        x = self.normal(m, k) * torch.exp2(self.normal(m, 1))
        x[0, :16] = 0
        x[-1, 16:32] *= 2.0**-20
        x = x.to(dtype)
        return x, encode_scale_from_amax(x.abs().amax().to(torch.float32))


def poison(device: torch.device, *sizes: int) -> None:
    """Leave blocks of these sizes (in bytes) full of NaN where the allocator will find them next."""
    junk = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes for _ in range(3)]
    del junk


def _quantizer(operations: Operations, data: DenseData, m: int, k: int) -> None:
    assert operations.quantize is not None
    x, scale = data.activation(m, k, torch.bfloat16)
    rows, columns = padded_scale_shape(m, k // 16)
    for factor in (1.0, 0.25):
        poison(data.device, m * k // 2, rows * columns)
        packed, scales = operations.quantize(x, scale * factor)
        check_quantized(x, scale * factor, packed, scales)


def _products(
    operations: Operations, data: DenseData, weight: DenseWeight, m: int, dtype: torch.dtype, repeats: int
) -> None:
    """Products of operands that the oracle quantized, on memory full of NaN."""
    assert operations.gemm is not None
    x, scale = data.activation(m, weight.k, dtype)
    a, a_scale = reference.quantize(x, scale)
    alpha, bias = weight.epilogue(operations.column_alpha, dtype)
    operands = (a, weight.packed, a_scale, weight.scales, alpha, bias, dtype)
    exact, bound = gemm_bound(*operands)
    for _ in range(repeats):
        poison(data.device, m * weight.n * dtype.itemsize)
        check_product(operations.gemm(*operands), exact, bound)


def _linear(
    operations: Operations, data: DenseData, weight: DenseWeight, m: int, dtype: torch.dtype, repeats: int
) -> None:
    """The fused operator computes what its own quantizer and an exact product would."""
    assert operations.linear is not None
    assert operations.quantize is not None
    x, scale = data.activation(m, weight.k, dtype)
    a, a_scale = operations.quantize(x, scale)
    alpha, bias = weight.epilogue(True, dtype)
    exact, bound = gemm_bound(a, weight.packed, a_scale, weight.scales, alpha, bias, dtype)
    for _ in range(repeats):
        poison(data.device, m * weight.n * dtype.itemsize, m * weight.k // 2)
        check_product(operations.linear(x, weight.packed, weight.scales, scale, alpha, bias), exact, bound)


def _burst(operations: Operations, data: DenseData, weight: DenseWeight, plan: Plan) -> None:
    """Many launches of mixed M without a wait: a race with the quantizer shows only then (flashinfer#2708)."""
    _check_all(_launches(operations, data, weight, plan)(), weight)


def _graph(operations: Operations, data: DenseData, weight: DenseWeight, plan: Plan) -> None:
    """The same inside a captured graph, replayed on results that were overwritten."""
    launch = _launches(operations, data, weight, plan)
    graph, results = captured(launch)
    for _ in range(plan.repeats):
        for out, *_ in results:
            out.fill_(torch.nan)
        graph.replay()
        _check_all(results, weight)


_Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"]


def _launches(operations: Operations, data: DenseData, weight: DenseWeight, plan: Plan) -> Callable[[], list[_Result]]:
    quantize, gemm = operations.quantize, operations.gemm
    assert quantize is not None
    assert gemm is not None
    dtype: torch.dtype = getattr(torch, plan.dtypes[0])
    rows = [m for m in plan.rows if m <= 256]
    inputs = [data.activation(rows[i % len(rows)], weight.k, dtype) for i in range(plan.burst)]
    alpha, bias = weight.epilogue(operations.column_alpha, dtype)

    def launch() -> list[_Result]:
        results: list[_Result] = []
        for x, scale in inputs:
            a, a_scale = quantize(x, scale)
            results.append(
                (gemm(a, weight.packed, a_scale, weight.scales, alpha, bias, dtype), a, a_scale, alpha, bias)
            )
        return results

    return launch


def _check_all(results: list[_Result], weight: DenseWeight) -> None:
    for out, a, a_scale, alpha, bias in results:
        shape = padded_scale_shape(a.shape[0], weight.k // 16)
        scales = a_scale.view(torch.uint8).reshape(shape)
        exact, bound = gemm_bound(a, weight.packed, scales, weight.scales, alpha, bias, out.dtype)
        check_product(out, exact, bound)
