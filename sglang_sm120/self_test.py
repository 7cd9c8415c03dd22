"""A check of a backend of ours that takes a few milliseconds and runs before any weight is loaded.

Every number of the problem is small enough that a right result is exact in bf16: the expected values come
from Python integers and share nothing with the code under test. It is a smoke test for a broken build, driver
or device; ``probe`` is the thorough one.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_sm120 import layout, ops, reference
from sglang_sm120.backends.expert_limits import ExpertSizes, beyond_limits
from sglang_sm120.backends.moe_table import KERNEL_RUNNERS
from sglang_sm120.errors import SelfTestError

#: (M, N, K): one token block of the kernels and several, one slice of K and several, tokens that the GEMM quantizes
#: itself and tokens that it does not; N and K no multiples of 32.
SMALL_PROBLEMS = ((3, 24, 48), (67, 24, 48), (3, 40, 1040), (17, 8, 1040))
#: For the kernel that multiplies many tokens: it is taken once every SM has a tile.
_MANY_TOKENS, _MANY_TOKENS_K = 65, 48
#: What the kernels' emulation on the CPU says of itself.
_SMS_OF_CPU = 8
#: Of a MoE runner: activation, whether the gate comes first, tokens. One block of tokens and two.
_MOE_CASES: tuple[tuple[reference.Activation, bool, int], ...] = (
    ("silu", False, 3),
    ("silu", True, 9),
    ("relu2", True, 3),
)
#: H and I; the first that the runner takes.
_MOE_SIZES = ((48, 32), (128, 256))
#: A step of FP4 more or less in a few values between the two layers stays below this part of the largest result.
_MOE_TOLERANCE = 0.05
#: The same where 16-bit numbers pass from kernel to kernel and exponentials are approximate: more values take another
#: step, and block scales too. With errors of 2**-8 it came to 0.1; a wrong expert, order or scale is off by about one.
_MOE_TOLERANCE_ROUNDED = 0.2
_BLOCK = 16
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes of e2m1 codes 0..7
#: Every pattern below repeats after so many rows.
_PERIOD = 48


def problems(device: torch.device) -> tuple[tuple[int, int, int], ...]:
    """The sizes (M, N, K) of the check: small ones, and a tile of either size for every SM of the device."""
    sms = _SMS_OF_CPU
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    narrow, wide = 128 * -(-sms // 4), 128 * sms  # 65 tokens are two tiles of 64 x 64, or one of 128 x 128
    return (*SMALL_PROBLEMS, *((_MANY_TOKENS, n, _MANY_TOKENS_K) for n in (narrow, wide)))


def run(backend: str, device: torch.device | str) -> None:
    """Multiply small problems with ``backend`` and compare every element exactly.

    Raises:
        SelfTestError: an element differs; the text names it.
    """
    where = torch.device(device)
    for m, n, k in problems(where):
        _run_one(backend, where, m, n, k)


def run_moe(runner: str, device: torch.device | str) -> None:
    """Run small layers of experts with a MoE runner of ours and compare with the oracle.

    Not exactly: a value next to a rounding boundary between the two layers may take either neighbour.

    Raises:
        SelfTestError: a result is far from the oracle's; the text names it.
    """
    where = torch.device(device)
    for activation, gate_first, tokens in _MOE_CASES:
        if not (gate_first and activation == "silu" and ops.wants_up_first(runner)):
            _run_experts(runner, where, activation, gate_first, tokens)


def _run_experts(
    runner: str, device: torch.device, activation: reference.Activation, gate_first: bool, tokens: int
) -> None:
    experts, top_k = 5, 2
    hidden, inner = next(
        size for size in _MOE_SIZES if not beyond_limits(runner, ExpertSizes(experts, experts, top_k, *size))
    )
    generator = torch.Generator().manual_seed(tokens)
    # SGLang loads weights with a default type and a default device of its own.
    plain: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    coded: dict[str, Any] = {"device": "cpu", "dtype": torch.uint8}

    def stack(rows: int, k: int) -> reference.ExpertWeights:
        packed = torch.randint(0, 256, (experts, rows, k // 2), generator=generator, **coded)
        linear = torch.randint(0x30, 0x40, (experts, rows, k // _BLOCK), generator=generator, **coded)
        alpha = torch.rand(experts, generator=generator, **plain) / (4 * k)
        scales = torch.stack([layout.swizzle_128x4(expert) for expert in linear])
        return reference.ExpertWeights(packed, scales, alpha, torch.tensor(7.3, **plain))

    w13, w2 = stack(2 * inner if activation == "silu" else inner, hidden), stack(hidden, inner)
    x = torch.randn(tokens, hidden, generator=generator, **plain).to(torch.bfloat16)
    ids = torch.rand(tokens, experts, generator=generator, **plain).argsort(1)[:, :top_k].to(torch.int32)
    weights = torch.rand(tokens, top_k, generator=generator, **plain)
    order = gate_first if activation == "silu" else None
    expected = reference.moe(x, ids, weights, w13, w2, activation, order).double()
    given = [t for s in (w13, w2) for t in (s.packed, s.scales, s.alpha, s.input_global_scale)]
    operands = [t.to(device) for t in (x, ids, weights, *given)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # as above
    out = ops.nvfp4_moe(*operands, activation, gate_first, 0, runner).double().cpu()
    error = (out - expected).abs().nan_to_num(nan=torch.inf)
    tolerance = _MOE_TOLERANCE if runner in KERNEL_RUNNERS else _MOE_TOLERANCE_ROUNDED
    if float(error.max()) <= tolerance * float(expected.abs().max()):
        return
    token, column = divmod(int(error.argmax()), hidden)
    raise SelfTestError(
        f"--moe-runner-backend {runner} gave {out[token, column].item()} instead of {expected[token, column].item()} "
        f"for token {token}, column {column} of its start-up check ({activation}); no model is served with it. Choose "
        "another runner and report this."
    )


def _run_one(backend: str, device: torch.device, m: int, n: int, k: int) -> None:
    x_rows, w_rows = min(m, _PERIOD), min(n, _PERIOD)  # Python works on these, torch repeats them
    x_codes, w_codes = _codes(x_rows, k, seed=1), _codes(w_rows, k, seed=2)
    scale_bytes = [[(0x30, 0x38, 0x40)[(row + b) % 3] for b in range(k // _BLOCK)] for row in range(w_rows)]
    alphas = [(1.0, 0.5, 2.0)[row % 3] for row in range(w_rows)]
    biases = [(0.0, -2.0, 4.0, 8.0)[row % 4] for row in range(w_rows)]
    expected = _expected(x_codes, w_codes, scale_bytes, alphas, biases)
    tokens, columns = torch.arange(m) % x_rows, torch.arange(n) % w_rows
    x = torch.tensor([[_value(c) for c in row] for row in x_codes], dtype=torch.bfloat16)
    packed = torch.tensor([[row[i] | row[i + 1] << 4 for i in range(0, k, 2)] for row in w_codes], dtype=torch.uint8)
    scales = layout.swizzle_128x4(torch.tensor(scale_bytes, dtype=torch.uint8)[columns])
    operands = (
        x[tokens].to(device),
        layout.align_rows(packed[columns].to(device)),
        scales.to(device),
        torch.ones((), dtype=torch.float32, device=device),
        torch.tensor(alphas, dtype=torch.float32)[columns].to(device),
        torch.tensor(biases, dtype=torch.bfloat16)[columns].to(device),
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels may read weights before the copies in front of them have ended
    out = ops.nvfp4_linear(*operands, backend)
    _compare(backend, out.float().cpu(), torch.tensor(expected, dtype=torch.float32)[tokens][:, columns])


def _codes(rows: int, k: int, seed: int) -> list[list[int]]:
    """A fixed pattern of e2m1 codes in which every block that is not zero contains a six: its scale is exactly one.

    Only the first two blocks, the last and one in the middle hold anything, a six and one other number each. Results
    stay so small that bf16 holds every one exactly.
    """
    table = [[0] * k for _ in range(rows)]
    blocks = k // _BLOCK
    for r, row in enumerate(table):
        for b in {0, 1, blocks // 2, blocks - 1}:
            row[b * _BLOCK + (5 * r + 3 * b + seed) % _BLOCK] = (r + seed + b) % 8 | 8
            row[b * _BLOCK + (r + b) % _BLOCK] = 7
    return table


def _value(code: int) -> float:
    return (-1 if code & 8 else 1) * _DOUBLED[code & 7] / 2


def _expected(
    x_codes: list[list[int]],
    w_codes: list[list[int]],
    scale_bytes: list[list[int]],
    alphas: list[float],
    biases: list[float],
) -> list[list[float]]:
    scale = {0x30: 0.5, 0x38: 1.0, 0x40: 2.0}
    return [
        [
            alphas[n]
            * sum(_value(a) * _value(w) * scale[scale_bytes[n][k // _BLOCK]] for k, (a, w) in enumerate(pairs) if a)
            + biases[n]
            for n, pairs in enumerate([list(zip(row, w_row, strict=True)) for w_row in w_codes])
        ]
        for row in x_codes
    ]


def _compare(backend: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = (out != expected).nonzero()
    if wrong.numel() == 0:
        return
    m, n = wrong[0].tolist()
    got, want = out[m, n].item(), expected[m, n].item()
    raise SelfTestError(
        f"--fp4-gemm-backend {backend} gave {got} instead of {want} at row {m}, column {n} of its "
        "start-up check; no model is served with it. Choose another backend and report this."
    )
