"""What ``sglang_sm120.build.load`` returns on a GPU, for CPU tensors: the same functions, the kernels emulated.

It refuses what the binding refuses, in so far as the package's own checks rely on it: the place of weight rows, their
types and sizes. A test that passes here with an operand that the binding does not take would prove nothing.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import torch

_ADDRESS, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_BYTES = (torch.uint8, torch.float8_e4m3fn)
_OUTPUTS = (torch.bfloat16, torch.float16)


class EmulatedLibrary:
    """The functions of ``csrc/binding/ffi.cc``. One call at a time: there is one emulated machine."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._gemm = library.sm120_emulated_gemm
        self._gemm.argtypes = [*[_ADDRESS] * 7, *[_INT] * 5, _LONG, _INT, _INT, _ADDRESS]
        self._quantizes_inside = library.sm120_emulated_quantizes_inside
        self._quantizes_inside.argtypes = [_INT] * 3
        self._quantize = library.sm120_emulated_quantize
        self._quantize.argtypes = [*[_ADDRESS] * 4, _LONG, *[_INT] * 5]
        self._moe = library.sm120_emulated_moe
        self._moe.argtypes = [*[_ADDRESS] * 13, _LONG, *[_INT] * 11]
        self._moe_workspace = library.sm120_emulated_moe_workspace
        self._moe_workspace.argtypes, self._moe_workspace.restype = [_INT] * 3, _LONG
        self._lock = threading.Lock()

    def nvfp4_gemm(
        self,
        a: torch.Tensor,
        a_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        alpha: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        dependent_launch: bool,
        cluster: int,
    ) -> None:
        m, half_k = a.shape
        _require(a.is_contiguous() and a.dtype == torch.uint8, "a must be contiguous uint8 [M, K/2]")
        _require_scales(a_scale, m, 2 * half_k)
        self._multiply(m, 2 * half_k, a, half_k, a_scale, None, b, b_scale, alpha, bias, out)

    def nvfp4_linear(
        self,
        x: torch.Tensor,
        global_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        alpha: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        dependent_launch: bool,
        cluster: int,
    ) -> None:
        m, k = x.shape
        _require(m <= 16, "M must be at most 16")
        _require_numbers(x, global_scale)
        _require(x.dtype == out.dtype, "the emulated kernel takes x in out's dtype")
        stride = 2 * (x.stride(0) if m > 1 else k)
        self._multiply(m, k, x, stride, None, global_scale, b, b_scale, alpha, bias, out)

    def nvfp4_quantizes_inside(self, device: int, m: int, n: int, k: int) -> bool:
        return bool(self._quantizes_inside(m, n, k))

    def _multiply(
        self,
        m: int,
        k: int,
        a: torch.Tensor,
        a_stride: int,
        a_scale: torch.Tensor | None,
        encode_scale: torch.Tensor | None,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        alpha: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        n, half_k = b.shape[0], k // 2
        _require(k > 0 and k % 16 == 0, "K must be a positive multiple of 16")
        _require(n % 8 == 0, "N must be a multiple of 8")
        _require(b.dtype == torch.uint8 and b.shape[1] == half_k and b.stride(1) == 1, "b must be uint8 [N, K/2]")
        _require(_starts_at(b, 16) and (n == 1 or b.stride(0) % 16 == 0), "b rows must start at multiples of 16 bytes")
        _require_scales(b_scale, n, k)
        _require(alpha.dtype == torch.float32 and alpha.numel() in (1, n), "alpha must be float32, one or N values")
        _require(out.dtype in _OUTPUTS and out.shape == (m, n) and out.is_contiguous(), "out must be [M, N]")
        if bias is not None:
            _require(bias.dtype == out.dtype and bias.numel() == n, "bias must be N values of out's dtype")
            _require(bias.is_contiguous() and _starts_at(bias, 4), "bias must be contiguous and 4-byte aligned")
        with self._lock:
            error = self._gemm(
                *map(_address, (a, a_scale, b, b_scale, alpha, bias, out)),
                m, n, k, a_stride, b.stride(0) if n > 1 else half_k, n,
                int(alpha.numel() == n and n > 1), int(out.dtype == torch.float16), _address(encode_scale),
            )  # fmt: skip
        _check("the GEMM", error)

    def nvfp4_quantize(
        self,
        x: torch.Tensor,
        global_scale: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        swizzled: bool,
        exact: bool,
        dependent_launch: bool,
    ) -> None:
        m, k = x.shape
        _require_numbers(x, global_scale)
        with self._lock:
            error = self._quantize(
                *map(_address, (x, global_scale, codes, scales)),
                x.stride(0), m, k, int(x.dtype == torch.float16), int(swizzled), int(exact),
            )  # fmt: skip
        _check("the quantizer", error)

    def nvfp4_moe_workspace(self, m: int, top_k: int, intermediate: int) -> int:
        return int(self._moe_workspace(m, top_k, intermediate))

    def nvfp4_moe(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w13_alpha: torch.Tensor,
        w13_input_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
        w2_alpha: torch.Tensor,
        w2_input_scale: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor,
        activation: int,
        gate_first: bool,
        first_expert: int,
        dependent_launch: bool,
    ) -> None:
        (m, width), top_k, (experts, rows, _) = hidden.shape, topk_ids.shape[1], w13.shape
        inner = 2 * w2.shape[2]
        _require(hidden.dtype in _OUTPUTS and width % 16 == 0, "hidden must be bfloat16 or float16 [M, H], H % 16 == 0")
        _require(inner > 0 and inner % 16 == 0, "the intermediate size must be a positive multiple of 16")
        _require(rows == (inner if activation else 2 * inner), "w13 must have the rows that w2 and activation ask for")
        for weights, scale, n, k in ((w13, w13_scale, rows, width), (w2, w2_scale, width, inner)):
            _require(weights.is_contiguous() and weights.shape == (experts, n, k // 2), "weights must be contiguous")
            padded = experts * (-(-n // 128)) * (-(-k // 64)) * 512
            _require(
                scale.dtype in _BYTES and scale.is_contiguous() and scale.numel() == padded, "scales must be padded"
            )
            _require(_starts_at(weights, 16) and _starts_at(scale, 16), "weights and scales must be aligned")
        for ids, dtype in ((topk_ids, torch.int32), (topk_weights, torch.float32)):
            _require(ids.dtype == dtype and ids.is_contiguous() and len(ids) == m, "routing must be int32 and float32")
        for values in (w13_alpha, w2_alpha):
            _require(values.dtype == torch.float32 and values.shape == (experts,), "alpha must be float32 [experts]")
        for values in (w13_input_scale, w2_input_scale):
            _require(values.dtype == torch.float32 and values.numel() in (1, experts), "input scales must be float32")
        _require(out.dtype == hidden.dtype and out.is_contiguous() and out.shape == (m, width), "out must be [M, H]")
        tensors = (
            hidden, topk_ids, topk_weights, w13, w13_scale, w13_alpha, w13_input_scale,
            w2, w2_scale, w2_alpha, w2_input_scale, out, workspace,
        )  # fmt: skip
        with self._lock:
            error = self._moe(
                *map(_address, tensors), hidden.stride(0) if m > 1 else width, m, top_k, width, inner, experts,
                first_expert, *(int(t.numel() == experts and experts > 1) for t in (w13_input_scale, w2_input_scale)),
                int(gate_first), activation, int(hidden.dtype == torch.float16),
            )  # fmt: skip
        _check("the experts", error)


def _require(condition: bool, remedy: str) -> None:
    if not condition:
        raise ValueError(remedy)


def _require_numbers(x: torch.Tensor, global_scale: torch.Tensor) -> None:
    m, k = x.shape
    _require(x.dtype in _OUTPUTS, "x must be bfloat16 or float16")
    _require(k > 0 and k % 16 == 0, "K must be a positive multiple of 16")
    _require(x.stride(1) == 1 and (m <= 1 or x.stride(0) % 8 == 0) and _starts_at(x, 16), "x rows must be aligned")
    _require(global_scale.dtype == torch.float32 and global_scale.numel() == 1, "global_scale must be one float32")


def _require_scales(scale: torch.Tensor, rows: int, k: int) -> None:
    padded = -(-rows // 128) * -(-k // 64) * 512
    _require(scale.dtype in _BYTES and scale.is_contiguous(), "scales must be contiguous bytes")
    _require(scale.numel() >= padded and _starts_at(scale, 16), "scales must be padded and aligned")


def _check(what: str, error: int) -> None:
    if error != 0:
        raise RuntimeError(f"launching {what} failed: cudaError_t {error}")


def _starts_at(tensor: torch.Tensor, multiple: int) -> bool:
    return tensor.data_ptr() % multiple == 0


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    if tensor.device.type != "cpu":
        raise ValueError("the emulated kernels take CPU tensors")
    return tensor.data_ptr()
