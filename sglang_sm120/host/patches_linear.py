"""Seams of a linear layer: creation and preparation of its weights (W), forward (A), admission (C)."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch

from sglang_sm120 import ops
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import Backend
from sglang_sm120.dispatch import Decision, layer_backend
from sglang_sm120.host import layers, reload, tuning
from sglang_sm120.host.conventions import Convention
from sglang_sm120.host.patching import Patcher, mark
from sglang_sm120.host.state import STATE


def wrap_weights(module: ModuleType, patcher: Patcher, *, convention: Convention) -> None:
    """Prepare layers that a backend of ours serves; check the others before SGLang prepares them."""
    cls = getattr(module, convention.cls)
    create, process = cls.create_weights, cls.process_weights_after_loading
    signature = inspect.signature(create)
    seam = f"weights ({convention.label})"

    def create_weights(self: Any, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if STATE.refusal is not None and not convention.weight_only:
            raise STATE.refusal
        if STATE.tuning is not None:
            STATE.tuning.agree()
        create(self, layer, *args, **kwargs)
        if STATE.chosen is not None:
            given = signature.bind(self, layer, *args, **kwargs).arguments
            layers.remember_dtype(layer, given["params_dtype"])
            layers.mark_unloaded(layer, convention)

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        if STATE.chosen is None:
            process(self, layer)
            return
        layers.complete_scales(layer, convention, dummy=STATE.dummy_weights)
        backend = _backend_for(layer, convention)
        if backend is not None:
            # Under auto a layer may get another backend than the process, which started its own only. Loading one
            # later would mean to do it inside the first forward, perhaps while a graph is captured.
            ops.start(backend, getattr(layer, convention.weight).device)
            one_alpha = BACKENDS[backend].per_call and layers.has_one_alpha(layer, convention)
            layers.prepare(layer, self, convention, backend, one_alpha=one_alpha)
        elif convention.weight_only or STATE.repacks_weights:
            process(self, layer)
        else:
            unpadded = getattr(layer, convention.weight).shape
            process(self, layer)
            reload.refuse_if_padded(layer, convention, unpadded, STATE.chosen)

    patcher.set(cls, "create_weights", mark(seam, create_weights, create))
    patcher.set(cls, "process_weights_after_loading", mark(seam, process_weights_after_loading, process))


def wrap_apply(module: ModuleType, patcher: Patcher, *, convention: Convention) -> None:
    """Send layers that we prepared to our operator, all others to SGLang's own method."""
    cls = getattr(module, convention.cls)
    original = getattr(cls, convention.apply)

    def apply(self: Any, layer: torch.nn.Module, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if hasattr(layer, "sm120_prepared"):
            return layers.forward(layer, x, bias)
        return original(self, layer, x, bias)  # type: ignore[no-any-return]

    patcher.set(cls, convention.apply, mark(f"apply ({convention.label})", apply, original))


def route_lm_head(module: ModuleType, patcher: Patcher) -> None:
    """Let SGLang apply the quantized method of an ``lm_head`` that we prepared.

    It asks for tensors by the names that its own preparations leave; without this it would multiply the packed
    bytes as if they were a weight.
    """
    original = module.should_apply_lm_head_quant_method

    def should_apply_lm_head_quant_method(lm_head: Any, quant_method: Any) -> bool:
        return hasattr(lm_head, "sm120_prepared") or bool(original(lm_head, quant_method))

    replacement = mark("lm_head", should_apply_lm_head_quant_method, original)
    patcher.set_everywhere(module, "should_apply_lm_head_quant_method", original, replacement)


def admit(module: ModuleType, patcher: Patcher, *, cls: str) -> None:
    """Lower SGLang's minimum capability while a backend of ours that runs on this device is chosen."""
    owner = getattr(module, cls)
    original = owner.get_min_capability.__func__

    def get_min_capability(klass: Any) -> int:
        minimum: int = original(klass)
        if STATE.backend is None or STATE.backend.provider != "sglang_sm120":
            return minimum
        if STATE.backend.any_device:
            return 0
        return min([minimum, *(10 * row.capability[0] + row.capability[1] for row in STATE.backend.rows)])

    label = "ModelOpt" if cls == "ModelOptFp4Config" else "compressed-tensors"
    patcher.set(owner, "get_min_capability", classmethod(mark(f"admission ({label})", get_min_capability, original)))


def _backend_for(layer: Any, convention: Convention) -> str | None:
    """Name of the backend of ours that serves ``layer``, or ``None`` for SGLang's own path."""
    decision, backend = STATE.decision, STATE.backend
    assert decision is not None
    assert STATE.facts is not None
    if STATE.tuning is not None:
        if not convention.weight_only and _is_tuned(layer, convention, STATE.tuning):
            return tuning.VALUE
        decision = STATE.tuning.untuned
        backend = BACKENDS[decision.backend] if decision.backend is not None else None
    differ = layers.scales_differ(layer, convention, inputs=not STATE.repacks_weights)
    if convention.weight_only and not differ:
        return _backend_for_weight_only(decision, backend)
    # What we prepare is not padded, and shards whose input scales differ are multiplied one by one.
    unpadded = backend is not None and backend.quantizes_itself
    sizes = layers.group_widths(layer, convention) if unpadded else [sum(layer.logical_widths)]
    pad = 1 if unpadded else convention.pads_to
    for n in dict.fromkeys(sizes):
        chosen = layer_backend(
            decision,
            STATE.facts,
            name=reload.layer_name(layer),
            n=-(-n // pad) * pad,
            k=-(-layer.input_size_per_partition // pad) * pad,
            out_dtype=str(layer.sm120_dtype).removeprefix("torch."),
            fused_scales_differ=differ,
            weight_only=convention.weight_only,
        )
        if chosen != decision.backend:
            break  # one backend serves the whole layer
    record = BACKENDS[chosen]
    # A backend that was forced on weight-only shards of different scales cannot multiply them at all.
    ours = record.quantizes_itself and (record.serves_weight_only or not convention.weight_only)
    return chosen if ours else None


def _is_tuned(layer: Any, convention: Convention, tuned: tuning.Tuning) -> bool:
    """Whether every call that ``layer`` makes has a plan, made now if it can be."""
    layers.require_same_calls(layer, convention)
    return tuned.plan_layer(
        reload.layer_name(layer),
        layers.group_widths(layer, convention),
        layer.input_size_per_partition,
        layer.sm120_dtype,
        one_alpha=layers.has_one_alpha(layer, convention),
        quantizer=STATE.quantizer_of_ours,
        device=getattr(layer, convention.weight).device,
    )


def _backend_for_weight_only(decision: Decision, backend: Backend | None) -> str | None:
    if backend is not None and backend.serves_weight_only:
        return backend.value
    if backend is not None and decision.explicit and not STATE.repacks_weights:
        STATE.warn_once(
            "weight-only",
            f"--fp4-gemm-backend {backend.value} multiplies quantized activations; the weight-only (W4A16) "
            "layers of this checkpoint are served by SGLang's own weight-only path instead.",
        )
    return None
