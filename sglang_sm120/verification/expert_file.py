"""What the files of a wrong call of experts hold beside those of a dense layer, read strictly."""

from __future__ import annotations

from typing import Any

import torch

from sglang_sm120.formats import BLOCK_SIZE
from sglang_sm120.layout import padded_scale_shape
from sglang_sm120.records import Fields
from sglang_sm120.verification.expert_call import EXPERT_OPERANDS, ExpertCall


def description(call: ExpertCall) -> dict[str, Any]:
    """The fields that say what the tensors do not."""
    return {
        "activation": call.activation,
        "gate_first": call.gate_first,
        "experts": call.experts,
        "local": call.local,
    }


def read_call(fields: Fields, out_dtype: torch.dtype, tensors: dict[str, torch.Tensor]) -> ExpertCall:
    """Return the call that the fields and tensors of a file describe.

    Raises:
        RecordError: they do not fit each other.
    """
    activation: Any = fields.text("activation", ("silu", "relu2"))
    gate_first = fields.flag("gate_first")
    experts, local = fields.integer("experts", 1), fields.integer("local", 1)
    if {*tensors} != {*EXPERT_OPERANDS}:
        fields.fail(f"comes with tensors other than {', '.join((*EXPERT_OPERANDS, 'result'))}")
    for name, dims in (("hidden", 2), ("ids", 2), ("w13", 3), ("w2", 3)):
        if tensors[name].dim() != dims:
            fields.fail(f"comes with {name} of shape {tuple(tensors[name].shape)}")
    (m, hidden), top_k = tensors["hidden"].shape, tensors["ids"].shape[1]
    held, inner = tensors["w2"].shape[0], 2 * tensors["w2"].shape[2]
    if m == 0 or held == 0 or top_k == 0:
        fields.fail(f"is about M={m}, {held} experts, top_k={top_k}, of which a server checks nothing")
    if not hidden or not inner or hidden % BLOCK_SIZE or inner % BLOCK_SIZE:
        fields.fail(f"is about H={hidden} I={inner}, which are not multiples of {BLOCK_SIZE}")
    right: dict[str, tuple[torch.dtype, list[tuple[int, ...]]]] = {
        "hidden": (out_dtype, [(m, hidden)]),
        "ids": (torch.int32, [(m, top_k)]),
        "router_weights": (torch.float32, [(m, top_k)]),
    }
    for name, rows, k in (("w13", (2 if activation == "silu" else 1) * inner, hidden), ("w2", hidden, inner)):
        right[name] = torch.uint8, [(held, rows, k // 2)]
        right[f"{name}_scale"] = torch.uint8, [(held, *padded_scale_shape(rows, k // BLOCK_SIZE))]
        right[f"{name}_alpha"] = torch.float32, [(held,)]
        right[f"{name}_input_scale"] = torch.float32, [(), (held,)]
    for name, tensor in tensors.items():
        dtype, shapes = right[name]
        if tensor.dtype != dtype or tuple(tensor.shape) not in shapes:
            fields.fail(f"comes with {name} of type {tensor.dtype} and shape {tuple(tensor.shape)}")
    return ExpertCall(tensors, activation, gate_first, experts, local)
