"""One call of NVFP4 experts: the operands and how a runner is asked for it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.formats import BLOCK_SIZE
from sglang_sm120.layout import padded_scale_shape
from sglang_sm120.probing.expert_operations import ExpertOperations, Layer
from sglang_sm120.reference import Activation, ExpertWeights
from sglang_sm120.verification.served import Sizes

#: Operands of a call, in the order of the operator's arguments.
EXPERT_OPERANDS = (
    "hidden",
    "ids",
    "router_weights",
    "w13",
    "w13_scale",
    "w13_alpha",
    "w13_input_scale",
    "w2",
    "w2_scale",
    "w2_alpha",
    "w2_input_scale",
)


@dataclass(frozen=True)
class ExpertCall:
    """What a runner of experts was asked to compute.

    Attributes:
        operands: by the names of :data:`EXPERT_OPERANDS`:

            - ``hidden`` bf16/fp16 [M, H];
            - ``ids`` int32 [M, top_k], numbers of experts in the stacks below; any other number is an expert that is
              not here;
            - ``router_weights`` float32 [M, top_k];
            - ``w13`` packed e2m1 uint8 [E, 2 * I, H/2] (``relu2``: [E, I, H/2]), ``w2`` [E, H, I/2];
            - their block scales uint8 [E, rows, blocks], in the 128x4 swizzle and of its padded shape;
            - their alphas float32 [E], and the encode scales of their inputs float32 [] or [E].
        activation: ``silu`` or ``relu2``.
        gate_first: order of the halves of ``w13``; nothing for ``relu2``.
        experts: of all ranks of the server.
        local: of the rank that was asked.
    """

    operands: Mapping[str, torch.Tensor]
    activation: Activation
    gate_first: bool
    experts: int
    local: int

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        router_weights: torch.Tensor,
        w13: ExpertWeights,
        w2: ExpertWeights,
        *,
        activation: Activation,
        gate_first: bool,
        first_expert: int,
        experts: int,
    ) -> ExpertCall:
        """The call ``ops.nvfp4_moe`` with these arguments, without copies of the weights."""
        ids = ids.to(torch.int32) - first_expert
        named = {"hidden": hidden, "ids": ids, "router_weights": router_weights.to(torch.float32)}
        for name, stack in (("w13", w13), ("w2", w2)):
            local, rows, half = stack.packed.shape
            padded = padded_scale_shape(rows, 2 * half // BLOCK_SIZE)
            scale = stack.input_global_scale
            named[name] = stack.packed.view(torch.uint8)
            named[f"{name}_scale"] = stack.scales.view(torch.uint8).reshape(local, *padded)
            named[f"{name}_alpha"] = stack.alpha.reshape(local)
            named[f"{name}_input_scale"] = scale.reshape(()) if scale.numel() == 1 else scale.reshape(local)
        operands = {name: tensor.detach() for name, tensor in named.items()}
        return cls(operands, activation, gate_first, experts, w13.packed.shape[0])

    @property
    def operation(self) -> Literal["moe"]:
        """The operation, as files and messages name it."""
        return "moe"

    @property
    def out_dtype(self) -> torch.dtype:
        """Type of the result, which is that of ``hidden``."""
        return self.operands["hidden"].dtype

    @property
    def m(self) -> int:
        """Tokens."""
        return self.operands["hidden"].shape[0]

    @property
    def sizes(self) -> Sizes:
        """Geometry of the layer that was asked."""
        top_k, (_, hidden, half) = self.operands["ids"].shape[1], self.operands["w2"].shape
        return expert_sizes(self.experts, self.local, top_k, hidden, 2 * half)

    def stack(self, name: Literal["w13", "w2"]) -> ExpertWeights:
        """One of the two weight stacks."""
        named = self.operands
        return ExpertWeights(named[name], named[f"{name}_scale"], named[f"{name}_alpha"], named[f"{name}_input_scale"])

    def kept(self) -> ExpertCall:
        """A copy on the CPU with those experts alone that have a token, in new numbers; absent ones are -1.

        Copies one expert at a time, so the GPU needs no memory for it.
        """
        local, ids = self.operands["w13"].shape[0], self.operands["ids"].cpu()
        here = (ids >= 0) & (ids < local)
        active = torch.unique(ids[here]).tolist() or [0]  # kernels take no stack without experts
        numbers = torch.full((local,), -1, dtype=torch.int32)
        numbers[active] = torch.arange(len(active), dtype=torch.int32)
        moved = {
            name: torch.stack([tensor[expert].cpu() for expert in active])
            if name.startswith("w") and tensor.dim() > 0
            else tensor.cpu()
            for name, tensor in self.operands.items()
        }
        moved["ids"] = torch.where(here, numbers[torch.where(here, ids, 0).long()], -1).to(torch.int32)
        return replace(self, operands=moved)

    def to(self, device: torch.device) -> ExpertCall:
        """The same call with operands on ``device``."""
        return replace(self, operands={name: tensor.to(device) for name, tensor in self.operands.items()})

    def run(self, operations: ExpertOperations) -> torch.Tensor:
        """Let a runner compute this and return its result, [M, H].

        Raises:
            UnsupportedError: the halves of ``w13`` lie in an order that the runner does not read.
        """
        gated = self.activation == "silu"
        if gated and self.gate_first and operations.up_first_only:
            raise UnsupportedError("this runner reads the up projection first, and these experts have the gate first")
        experts = self.operands["w13"].shape[0]
        layer = Layer(
            self.stack("w13"), self.stack("w2"), self.activation, experts, gate_first=gated and self.gate_first
        )
        named = self.operands
        return operations.moe(named["hidden"], named["ids"], named["router_weights"], layer)


def expert_sizes(experts: int, local: int, top_k: int, hidden: int, inner: int) -> Sizes:
    """Name the geometry of experts: of all ranks, of this one, of a token, H, and I as it reaches the kernels."""
    return (("E", experts), ("local", local), ("top_k", top_k), ("H", hidden), ("I", inner))
