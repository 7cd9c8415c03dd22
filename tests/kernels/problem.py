"""GEMM problems for kernel tests: packed operands with poisoned padding, and the float64 answer.

Written apart from ``sglang_sm120.reference`` on purpose (tables and swizzle are spelled out again), so that the two
check each other; ``test_emulated_gemm.py`` compares them once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
#: NaN: what stands in every scale byte that a kernel must not use.
POISON_SCALE = 0x7F
OUTPUT_TYPES = (torch.bfloat16, torch.float16)


def scale_value(scale_bytes: torch.Tensor) -> torch.Tensor:
    """Return unsigned e4m3 bytes as float64."""
    return scale_bytes.view(torch.float8_e4m3fn).to(torch.float64)


def swizzle(scales: torch.Tensor, poison: int = POISON_SCALE) -> torch.Tensor:
    """Return ``[rows, blocks]`` bytes in the 128x4 order, padding filled with ``poison``."""
    rows, blocks = scales.shape
    k_tiles = -(-blocks // 4)
    out = torch.full((-(-rows // 128) * k_tiles * 512,), poison, dtype=torch.uint8)
    r = torch.arange(rows).unsqueeze(1)
    c = torch.arange(blocks).unsqueeze(0)
    offset = (r // 128 * k_tiles + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    out[offset.flatten()] = scales.flatten()
    return out


def pack(codes: torch.Tensor, stride: int, poison: int) -> torch.Tensor:
    """Return ``[rows, K]`` codes as ``[rows, stride]`` bytes, low nibble first, the tail filled with ``poison``."""
    rows, k = codes.shape
    out = torch.full((rows, stride), poison, dtype=torch.uint8)
    out[:, : k // 2] = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return out


@dataclass
class Problem:
    """One GEMM: ``out[m, n] = alpha[n] * sum_k x[m, k] * w[n, k] + bias[n]``."""

    x_codes: torch.Tensor
    x_scales: torch.Tensor
    w_codes: torch.Tensor
    w_scales: torch.Tensor
    alpha: torch.Tensor
    bias: torch.Tensor | None = None
    out_type: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, N, K."""
        return self.x_codes.shape[0], self.w_codes.shape[0], self.w_codes.shape[1]

    @property
    def weight_stride(self) -> int:
        """Bytes from one weight row to the next: K / 2 rounded up to 16."""
        return -(-self.shape[2] // 32) * 16

    def to(self, device: str) -> Problem:
        """The same problem with its tensors on ``device``, so that the answer is computed there."""
        moved = [t if t is None else t.to(device) for t in (
            self.x_codes, self.x_scales, self.w_codes, self.w_scales, self.alpha, self.bias
        )]  # fmt: skip
        return Problem(*moved, self.out_type)  # type: ignore[arg-type]

    def x_packed(self) -> torch.Tensor:
        """Activations as the quantizer hands them over: rows K / 2 bytes apart."""
        return pack(self.x_codes, self.shape[2] // 2, 0)

    def w_packed(self) -> torch.Tensor:
        """Weights with padded rows; the padding holds code -6, which must not count."""
        return pack(self.w_codes, self.weight_stride, 0xFF)

    def terms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both operands dequantised, without global scales."""
        table = E2M1.to(self.x_codes.device)
        x = table[self.x_codes.long()] * scale_value(self.x_scales).repeat_interleave(16, 1)
        w = table[self.w_codes.long()] * scale_value(self.w_scales).repeat_interleave(16, 1)
        return x, w

    def expected(self) -> torch.Tensor:
        """The answer in float64."""
        x, w = self.terms()
        out = x @ w.T * self.alpha.double()
        return out if self.bias is None else out + self.bias.double()

    def tolerance(self) -> torch.Tensor:
        """Bound on |error|: float32 sums of exact products, then one rounding to the output type.

        A sum passes through at most K / 64 + 16 float32 additions, each wrong by 2^-24 of a magnitude that the sum
        of absolute terms bounds; the hardware may truncate, hence 2^-22. The output type adds half an ulp.
        """
        x, w = self.terms()
        magnitude = x.abs() @ w.abs().T * self.alpha.double().abs()
        additions = self.shape[2] // 64 + 16
        unit = 2.0**-8 if self.out_type == torch.bfloat16 else 2.0**-11
        smallest = 2.0**-133 if self.out_type == torch.bfloat16 else 2.0**-25
        bias = 0.0 if self.bias is None else self.bias.double().abs()
        error32 = magnitude * additions * 2.0**-22 + bias * 2.0**-23
        return self.expected().abs() * unit * 1.01 + error32 * 1.01 + smallest


def random_problem(
    m: int,
    n: int,
    k: int,
    *,
    seed: int = 0,
    per_column: bool = True,
    bias: bool = True,
    out_type: torch.dtype = torch.bfloat16,
) -> Problem:
    """Random codes and scales over two decades."""
    gen = torch.Generator().manual_seed(seed * 1000003 + m * 10007 + n * 101 + k)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=gen, dtype=torch.uint8)

    return Problem(
        x_codes=draw(0, 16, m, k),
        x_scales=draw(0x20, 0x48, m, k // 16),
        w_codes=draw(0, 16, n, k),
        w_scales=draw(0x20, 0x48, n, k // 16),
        alpha=(torch.rand(n if per_column else 1, generator=gen) + 0.5) * 0.01,
        bias=torch.randn(n, generator=gen).to(out_type) if bias else None,
        out_type=out_type,
    )


def same_weights(m: int, n: int, k: int, *, count: int) -> list[Problem]:
    """Random problems that differ in their activations only."""
    first = random_problem(m, n, k)
    others = [random_problem(m, n, k, seed=seed) for seed in range(1, count)]
    return [first, *(replace(first, x_codes=p.x_codes, x_scales=p.x_scales) for p in others)]


def one_hot_problem(n: int, k: int, blocks: list[int], *, alpha: float = 1.0) -> Problem:
    """Token i holds the single value 1 at k = 16 * blocks[i] + (5 * i) % 16; every (n, k) weight is distinguishable.

    The weight at that place times its scale is then the exact output, so a wrong row, lane, block or nibble shows.
    """
    m = len(blocks)
    columns = torch.tensor([16 * b + 5 * i % 16 for i, b in enumerate(blocks)])
    x_codes = torch.zeros(m, k, dtype=torch.uint8)
    x_codes[torch.arange(m), columns] = 2
    rows = torch.arange(n).unsqueeze(1)
    places = torch.arange(k).unsqueeze(0)
    w_codes = ((rows * 7 + places * 5 + rows // 8 * 3 + places // 16) % 15 + 1).to(torch.uint8)
    w_codes[w_codes == 8] = 9
    block = torch.arange(k // 16).unsqueeze(0)
    w_scales = (0x28 + (rows * 5 + block * 3 + rows // 32) % 32).to(torch.uint8)
    x_scales = (0x30 + (torch.arange(m).unsqueeze(1) * 3 + block * 7) % 16).to(torch.uint8)
    return Problem(x_codes, x_scales, w_codes, w_scales, torch.full((1,), alpha), None, torch.float16)
