"""Backends with one planted fault each, below the interface that a server calls. Loaded by the child of a probe."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

import torch

from sglang_sm120 import layout, reference
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.formats import decode_e2m1, decode_ue4m3, encode_e2m1, encode_ue4m3, pack_e2m1, unpack_e2m1
from sglang_sm120.layout import ScaleLayout
from sglang_sm120.probing.operations import Operations

Tensor = torch.Tensor


def right_gemm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, alpha: Tensor, bias: Tensor | None, dtype):  # type: ignore[no-untyped-def]
    """In float32 and in two halves of K, so that only the bound can make it pass, not equality with the oracle."""
    left, right = _real(a, a_scale), _real(b, b_scale)
    half = left.shape[1] // 32 * 16
    out = left[:, half:] @ right[:, half:].T + left[:, :half] @ right[:, :half].T
    out = out * alpha
    return (out if bias is None else out + bias.float()).to(dtype)


def _real(packed: Tensor, scales: Tensor) -> Tensor:
    m, k = packed.shape[0], 2 * packed.shape[1]
    linear = layout.unswizzle_128x4(scales.view(torch.uint8), m, k // 16)
    values = decode_e2m1(unpack_e2m1(packed)).view(m, k // 16, 16) * decode_ue4m3(linear).unsqueeze(-1)
    return values.view(m, k).float()


def right_quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """In float32 with reciprocals, as kernels do; not bit-equal to the oracle."""
    blocks = (x.float() * scale).view(x.shape[0], -1, 16)
    amax = blocks.abs().amax(-1)
    scales = encode_ue4m3(amax * torch.tensor(1 / 6))
    inverse = torch.where(scales == 0, 0.0, 1 / decode_ue4m3(scales).float())
    codes = encode_e2m1((blocks * inverse.unsqueeze(-1)).clamp(-6, 6))
    return pack_e2m1(codes.view(x.shape)), layout.swizzle_128x4(scales)


def right_linear(x: Tensor, w: Tensor, w_scale: Tensor, scale: Tensor, alpha: Tensor, bias: Tensor | None) -> Tensor:
    a, a_scale = right_quantize(x, scale)
    return right_gemm(a, w, a_scale, w_scale, alpha, bias, x.dtype)


def _spoilt(spoil: Callable[..., Tensor]) -> Operations:
    """A GEMM whose right result goes through ``spoil(out, a, b, a_scale, b_scale, alpha, bias, dtype)``."""

    def gemm(*operands):  # type: ignore[no-untyped-def]
        return spoil(right_gemm(*operands), *operands)

    return _with(gemm=gemm)


def _with(**changes) -> Operations:  # type: ignore[no-untyped-def]
    parts = {"quantize": right_quantize, "gemm": right_gemm, "linear": right_linear, **changes}
    return Operations(**parts, column_alpha=True, judges_quantizer=True)


def _spoilt_quantizer(spoil: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Operations:
    return _with(quantize=lambda x, scale: spoil(x, *right_quantize(x, scale)))


def _unwritten(out: Tensor, *operands: object) -> Tensor:
    fresh = torch.empty_like(out)
    fresh[: out.shape[0] // 2] = out[: out.shape[0] // 2]
    return fresh


def _late() -> Operations:
    calls = 0

    def spoil(out: Tensor, *_: object) -> Tensor:
        nonlocal calls
        calls += 1
        return -out if calls > 1000 else out

    return _spoilt(spoil)


def _stale() -> Operations:
    before: list[Tensor] = []

    def gemm(*operands):  # type: ignore[no-untyped-def]
        out = right_gemm(*operands)
        if before and before[-1].shape[1] == out.shape[1] and before[-1].shape[0] < out.shape[0]:
            out[: before[-1].shape[0]] = before[-1]
        before.append(out.clone())
        return out

    return _with(gemm=gemm)


def _linear_scales(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *rest: object) -> Tensor:
    shape = b.shape[0], b.shape[1] // 8
    return right_gemm(a, b, a_scale, layout.swizzle_128x4(b_scale.flatten()[: shape[0] * shape[1]].view(shape)), *rest)


def _only(m: int, spoil: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda out, *operands: spoil(out) if out.shape[0] == m else out


def _drop_last_block(a: Tensor, b: Tensor, *rest: object) -> Tensor:
    a = a.clone()
    a[:, -8:] = 0
    return right_gemm(a, b, *rest)


def _stale_quantizer_input() -> Operations:
    """Right alone; behind a quantizer it multiplies what the launch before it quantized (a missing wait)."""
    fresh: list[Tensor] = []
    late: dict[torch.Size, Tensor] = {}

    def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        packed, scales = right_quantize(x, scale)
        fresh.append(packed)
        return packed, scales

    def gemm(a: Tensor, *rest: object) -> Tensor:
        raced = any(a is packed for packed in fresh)
        used = late.get(a.shape, a) if raced else a
        late[a.shape] = a
        return right_gemm(used, *rest)

    return Operations(quantize=quantize, gemm=gemm, column_alpha=True)


class BackendSupportedError(Exception):
    """Called like FlashInfer's own."""


def _segfault(*_: object) -> Tensor:
    ctypes.string_at(0)
    raise AssertionError("reached")


def _raise(error: BaseException) -> Callable[..., Tensor]:
    def gemm(*_: object) -> Tensor:
        raise error

    return gemm


def _hang(*_: object) -> Tensor:
    time.sleep(600)
    raise AssertionError("reached")


def _hang_at_the_end() -> Operations:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return _with()


def _crash_at_the_end() -> Operations:
    atexit.register(ctypes.string_at, 0)
    return _with()


def _noisy() -> Operations:
    """Right, and writes everywhere as native libraries do."""
    print('{"status": "wrong", "reason": "noise"}', flush=True)
    os.write(1, b'{"status": "wrong"}\n')
    sys.stderr.write("warning: noise\n")
    return _with()


def _broken_import() -> Operations:
    import no_such_package_of_a_backend  # noqa: F401

    return _with()


def _zero_scales_of(m: int) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda x, packed, scales: (packed, torch.zeros_like(scales) if x.shape[0] == m else scales)


def _nan_padding(x: Tensor, packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    m, blocks = x.shape[0], x.shape[1] // 16
    linear = layout.unswizzle_128x4(scales, *scales.shape)
    linear[:m, blocks:] = 0x7F
    return packed, layout.swizzle_128x4(linear)


def _unswizzled(x: Tensor, packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    linear = layout.unswizzle_128x4(scales, *scales.shape)
    return packed, linear


def _next_code(x: Tensor, packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    packed = packed.clone()
    packed[-1, 3] ^= 0x02
    return packed, scales


def _quantizer_alone() -> Operations:
    return Operations(quantize=lambda x, s: reference.quantize(x, s, ScaleLayout.SWIZZLE_128X4), judges_quantizer=True)


FAULTS: dict[str, Callable[[], Operations]] = {
    "none": _with,
    "none, quantizer alone": _quantizer_alone,
    "none, noisy": _noisy,
    "zeros": lambda: _spoilt(lambda out, *_: torch.zeros_like(out)),
    "NaN": lambda: _spoilt(lambda out, *_: torch.full_like(out, torch.nan)),
    "one NaN": lambda: _spoilt(lambda out, *_: out.index_fill(1, torch.tensor([5]), torch.nan)),
    "unwritten rows": lambda: _spoilt(_unwritten),
    "stale rows": _stale,
    "linear scales read as swizzled": lambda: _with(gemm=_linear_scales),
    "only M=33": lambda: _spoilt(_only(33, torch.neg)),
    "only M=47, which no probe tries": lambda: _spoilt(_only(47, torch.neg)),
    "only after 1,000 calls": _late,
    "last block of K dropped": lambda: _with(gemm=_drop_last_block),
    "bias forgotten": lambda: _with(gemm=lambda *o: right_gemm(*o[:5], None, o[6])),
    "one alpha for all columns": lambda: _with(gemm=lambda *o: right_gemm(*o[:4], o[4][:1].expand_as(o[4]), *o[5:])),
    "alpha squared": lambda: Operations(gemm=lambda *o: right_gemm(*o[:4], o[4] ** 2, *o[5:])),
    "rounded twice": lambda: _spoilt(lambda out, *_: (out.float() * (1 + 2**-7)).to(out.dtype)),
    "two columns swapped": lambda: _spoilt(lambda out, *_: out.index_copy(1, torch.tensor([0, 1]), out[:, [1, 0]])),
    "wrong shape": lambda: _spoilt(lambda out, *_: out[:, :-1]),
    "fused operator forgets the scale": lambda: _with(linear=lambda *o: right_linear(*o[:3], o[3] * 2, *o[4:])),
    "race with the quantizer": _stale_quantizer_input,
    "quantizer: zero scales for M=33": lambda: _spoilt_quantizer(_zero_scales_of(33)),
    "quantizer: NaN padding": lambda: _spoilt_quantizer(_nan_padding),
    "quantizer: scales not swizzled": lambda: _spoilt_quantizer(_unswizzled),
    "quantizer: one wrong code": lambda: _spoilt_quantizer(_next_code),
    "segfault": lambda: _with(gemm=_segfault),
    "out of memory": lambda: _with(gemm=_raise(MemoryError("cannot allocate 8 GiB"))),
    "CUDA error": lambda: _with(gemm=_raise(RuntimeError("CUDA error: an illegal memory access\nwas encountered"))),
    "refuses": lambda: _with(gemm=_raise(UnsupportedError("no kernel image"))),
    "refuses by ValueError": lambda: _with(gemm=_raise(ValueError("needs CUDA 13"))),
    "refuses as FlashInfer does": lambda: _with(gemm=_raise(BackendSupportedError("not on 120"))),
    "refuses M=33 only": lambda: _spoilt(_only(33, lambda out: _raise(ValueError("M"))(out))),
    "import fails": _broken_import,
    "hang": lambda: _with(gemm=_hang),
    "hang after the verdict": _hang_at_the_end,
    "crash after the verdict": _crash_at_the_end,
}


def make(subject: str) -> Operations:
    """The factory that a test names in its job."""
    return FAULTS[subject]()
