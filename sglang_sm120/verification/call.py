"""One call of a backend: the operation, its operands and how a backend is asked for it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from sglang_sm120 import layout
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.formats import BLOCK_SIZE
from sglang_sm120.probing.operations import Operations
from sglang_sm120.verification.served import Sizes

Operation = Literal["linear", "gemm", "quantize"]

#: Operands by operation, in the order of the operator's arguments; ``bias`` may be missing.
OPERANDS: dict[Operation, tuple[str, ...]] = {
    "linear": ("x", "weight", "weight_scale", "activation_scale", "alpha", "bias"),
    "gemm": ("a", "weight", "a_scale", "weight_scale", "alpha", "bias"),
    "quantize": ("x", "activation_scale"),
}


@dataclass(frozen=True)
class Call:
    """What a backend was asked to compute.

    Attributes:
        operation: ``linear`` quantizes ``x`` and multiplies, ``gemm`` multiplies what is quantized, ``quantize`` only
            quantizes.
        operands: by the names of :data:`OPERANDS`:

            - ``x`` bf16/fp16 [M, K]; ``activation_scale`` its float32 encode scale [];
            - ``a`` packed e2m1 uint8 [M, K/2]; ``a_scale`` its block scales;
            - ``weight`` packed e2m1 uint8 [N, K/2]; ``weight_scale`` its block scales;
            - ``alpha`` float32 [] or [N]; ``bias`` [N] of ``out_dtype``.

            Block scales are uint8, in the 128x4 swizzle and of its padded shape.
        out_dtype: of the result; of ``x`` for ``quantize``.
    """

    operation: Operation
    operands: Mapping[str, torch.Tensor]
    out_dtype: torch.dtype

    @classmethod
    def linear(
        cls,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        activation_scale: torch.Tensor,
        alpha: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> Call:
        """The call ``ops.nvfp4_linear`` with these arguments."""
        return cls._of("linear", x.dtype, x, weight, weight_scale, activation_scale, alpha, bias)

    @classmethod
    def gemm(
        cls,
        a: torch.Tensor,
        weight: torch.Tensor,
        a_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        alpha: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> Call:
        """The call ``ops.nvfp4_gemm`` with these arguments."""
        return cls._of("gemm", out_dtype, a, weight, a_scale, weight_scale, alpha, bias)

    @classmethod
    def quantize(cls, x: torch.Tensor, activation_scale: torch.Tensor) -> Call:
        """The call ``ops.nvfp4_quantize(x, activation_scale, swizzled=True)``."""
        return cls._of("quantize", x.dtype, x, activation_scale)

    @classmethod
    def _of(cls, operation: Operation, out_dtype: torch.dtype, *operands: torch.Tensor | None) -> Call:
        named = zip(OPERANDS[operation], operands, strict=True)
        call = cls(operation, {name: tensor.detach() for name, tensor in named if tensor is not None}, out_dtype)
        return cls(operation, {name: call._plain(name) for name in call.operands}, out_dtype)

    def _plain(self, name: str) -> torch.Tensor:
        """Scales of one number without dimensions, block scales as bytes of the padded shape."""
        tensor = self.operands[name]
        if name in ("a_scale", "weight_scale"):
            rows = self.m if name == "a_scale" else self.n
            return tensor.view(torch.uint8).reshape(layout.padded_scale_shape(rows, self.k // BLOCK_SIZE))
        return tensor.reshape(()) if tensor.numel() == 1 and name in ("alpha", "activation_scale") else tensor

    @property
    def m(self) -> int:
        """Rows of the activations."""
        return self.operands["a" if self.operation == "gemm" else "x"].shape[0]

    @property
    def n(self) -> int:
        """Output columns; 0 for ``quantize``."""
        return self.operands["weight"].shape[0] if "weight" in self.operands else 0

    @property
    def k(self) -> int:
        """Inner dimension."""
        return 2 * self.operands["a"].shape[1] if self.operation == "gemm" else self.operands["x"].shape[1]

    @property
    def sizes(self) -> Sizes:
        """N and K; K alone for ``quantize``."""
        return (*((("N", self.n),) if self.n else ()), ("K", self.k))

    def to(self, device: torch.device) -> Call:
        """The same call with operands on ``device``, rows of the weight where kernels can read them."""
        moved = {name: tensor.to(device) for name, tensor in self.operands.items()}
        if "weight" in moved:
            moved["weight"] = layout.align_rows(moved["weight"])
        return Call(self.operation, moved, self.out_dtype)

    def run(self, operations: Operations) -> tuple[Call, tuple[torch.Tensor, ...]]:
        """Let a backend compute this; return the call that it really made, and its results.

        A backend that takes one alpha and no bias is called like a server calls it: the bias is left out, because
        SGLang adds it afterwards. One that does not quantize itself is asked for both steps.

        Raises:
            UnsupportedError: the backend has no such operation, or the columns of the layer have different scales.
        """
        named = self.operands
        if self.operation == "quantize":
            if operations.quantize is None:
                raise UnsupportedError("this backend has no quantizer")
            return self, operations.quantize(named["x"], named["activation_scale"])
        if self.operation == "linear" and operations.linear is not None:
            arguments = [named.get(name) for name in OPERANDS["linear"]]
            # Operators take one alpha for each column.
            arguments[4] = named["alpha"].expand(self.n).contiguous()
            return self, (operations.linear(*arguments),)
        call = self._as_gemm(operations)
        arguments = [call.operands.get(name) for name in OPERANDS["gemm"]]
        if operations.gemm is None:
            raise UnsupportedError("this backend has no product")
        return call, (operations.gemm(*arguments, call.out_dtype),)

    def _as_gemm(self, operations: Operations) -> Call:
        named = dict(self.operands)
        if self.operation == "linear":
            if operations.quantize is None:
                raise UnsupportedError("this backend has no quantizer")
            named["a"], named["a_scale"] = operations.quantize(named.pop("x"), named.pop("activation_scale"))
        if not operations.column_alpha:
            if torch.unique(named["alpha"]).numel() > 1:
                raise UnsupportedError("this backend takes one alpha, and the shards of this layer differ")
            named["alpha"] = named["alpha"].reshape(-1)[0]
            named.pop("bias", None)
        ordered = [named.get(name) for name in OPERANDS["gemm"]]
        return Call._of("gemm", self.out_dtype, *ordered)
