"""A check of a backend of ours that takes a few milliseconds and runs before any weight is loaded.

Every number of the problem is small enough that a right result is exact in bf16: the expected values come
from Python integers and share nothing with the code under test. It is a smoke test for a broken build, driver
or device; ``probe`` is the thorough one.
"""

from __future__ import annotations

import torch

from sglang_sm120 import layout, ops
from sglang_sm120.errors import SelfTestError

M, N, K = 3, 24, 48
_BLOCK = 16
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes of e2m1 codes 0..7


def run(backend: str, device: torch.device | str) -> None:
    """Multiply one small problem with ``backend`` and compare every element exactly.

    Raises:
        SelfTestError: an element differs; the text names it.
    """
    x_codes, w_codes = _codes(M, seed=1), _codes(N, seed=2)
    scale_bytes = [[(0x30, 0x38, 0x40)[(n + b) % 3] for b in range(K // _BLOCK)] for n in range(N)]
    alphas = [(1.0, 0.5, 2.0)[n % 3] for n in range(N)]
    x = torch.tensor([[_value(c) for c in row] for row in x_codes], dtype=torch.bfloat16)
    packed = torch.tensor([[row[i] | row[i + 1] << 4 for i in range(0, K, 2)] for row in w_codes], dtype=torch.uint8)
    out = ops.nvfp4_linear(
        x.to(device),
        packed.to(device),
        layout.swizzle_128x4(torch.tensor(scale_bytes, dtype=torch.uint8).to(device)),
        torch.ones((), dtype=torch.float32, device=device),
        torch.tensor(alphas, dtype=torch.float32, device=device),
        None,
        backend,
    )
    _compare(backend, out.float().cpu().tolist(), _expected(x_codes, w_codes, scale_bytes, alphas))


def _codes(rows: int, seed: int) -> list[list[int]]:
    """A fixed pattern of e2m1 codes in which every block contains a six, so that its scale is exactly one.

    Few elements are nonzero: each result stays below 2**8 halves, which bf16 holds exactly.
    """
    table = [[0] * K for _ in range(rows)]
    for r, row in enumerate(table):
        for b in range(K // _BLOCK):
            row[b * _BLOCK + (r + b) % _BLOCK] = 7
            row[b * _BLOCK + (5 * r + 3 * b + seed) % _BLOCK] = (r + seed + b) % 8 | 8
            row[b * _BLOCK + (r + b) % _BLOCK] = 7
    return table


def _value(code: int) -> float:
    return (-1 if code & 8 else 1) * _DOUBLED[code & 7] / 2


def _expected(
    x_codes: list[list[int]], w_codes: list[list[int]], scale_bytes: list[list[int]], alphas: list[float]
) -> list[list[float]]:
    scale = {0x30: 0.5, 0x38: 1.0, 0x40: 2.0}
    return [
        [
            alphas[n]
            * sum(_value(a) * _value(w) * scale[scale_bytes[n][k // _BLOCK]] for k, (a, w) in enumerate(pairs))
            for n, pairs in enumerate([list(zip(row, w_row, strict=True)) for w_row in w_codes])
        ]
        for row in x_codes
    ]


def _compare(backend: str, out: list[list[float]], expected: list[list[float]]) -> None:
    for m, (row, right) in enumerate(zip(out, expected, strict=True)):
        for n, (got, want) in enumerate(zip(row, right, strict=True)):
            if got != want:
                raise SelfTestError(
                    f"--fp4-gemm-backend {backend} gave {got} instead of {want} at row {m}, column {n} of its "
                    "start-up check; no model is served with it. Choose another backend and report this."
                )
