"""Seams of the MoE runner: the two rules of SGLang that choose it, the scheduler's start, and the expert layers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from sglang_sm120.backends.moe_record import Quantization
from sglang_sm120.host import moe_choice, moe_layers, moe_resolution, moe_scales, moe_tuning
from sglang_sm120.host.conventions import ExpertConvention
from sglang_sm120.host.patching import Patcher, mark


def choose_runner(module: ModuleType, patcher: Patcher) -> None:
    """Add our rule to SGLang's own for the runner of the target model."""
    _extend_rule(module, patcher, "_moe_runner_backend_quant_constraints", "moe runner", moe_resolution.choose_runner)


def choose_draft_runner(module: ModuleType, patcher: Patcher) -> None:
    """Add our rule to SGLang's own for what a draft model inherits."""
    _extend_rule(
        module, patcher, "_speculative_moe_runner_default", "moe draft runner", moe_resolution.choose_draft_runner
    )


def note_runners(module: ModuleType, patcher: Patcher) -> None:
    """Look at the runners of target and draft when the scheduler has set them."""
    original = module.initialize_moe_config

    def initialize_moe_config(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        moe_tuning.forget()  # another server of this process may have had another table
        scheduler = sys._getframe(1).f_locals.get("self")
        arguments = getattr(scheduler, "server_args", None)
        moe_choice.RUNNERS.two_streams = bool(getattr(arguments, "enable_pdmux", False))
        moe_resolution.note_runners(
            module.get_moe_runner_backend().value,
            module.get_speculative_moe_runner_backend().value,
            getattr(scheduler, "model_config", None),
        )

    patcher.set_everywhere(
        module, "initialize_moe_config", original, mark("moe start", initialize_moe_config, original)
    )


def follow_draft(module: ModuleType, patcher: Patcher) -> None:
    """Know when the layers that are made belong to a draft model."""
    original = module.speculative_moe_backend_context

    @contextmanager
    def speculative_moe_backend_context() -> Iterator[None]:
        runners = moe_choice.RUNNERS
        with original():
            before, runners.making_draft = runners.making_draft, True
            try:
                yield
            finally:
                runners.making_draft = before

    patcher.set_everywhere(
        module,
        "speculative_moe_backend_context",
        original,
        mark("moe draft", speculative_moe_backend_context, original),
    )


def take_values(module: ModuleType, patcher: Patcher) -> None:
    """Replace a runner of ours in the arguments of a SGLang that has no rules for it (up to 0.5.14)."""
    cls = module.ServerArgs
    original = cls._handle_moe_kernel_config

    def _handle_moe_kernel_config(self: Any) -> None:
        for name, value in moe_resolution.take_own_runners(self).items():
            setattr(self, name, value)
        original(self)

    patcher.set(cls, "_handle_moe_kernel_config", mark("moe value", _handle_moe_kernel_config, original))


def guard_layers(module: ModuleType, patcher: Patcher, *, cls: str, quantization: Quantization, seam: str) -> None:
    """Judge the runner whenever an expert layer of this class is made.

    Subclasses are left alone: each of them is a path of its own that the table knows nothing about.
    """
    owner = getattr(module, cls)
    original = owner.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is owner:
            value = _value_in_force()
            if moe_choice.RUNNERS.own is not None:
                moe_resolution.warn_of_stand_in(moe_choice.RUNNERS.own, owner, value)
            moe_resolution.check_layer(value, quantization)
        original(self, *args, **kwargs)

    patcher.set(owner, "__init__", mark(seam, __init__, original))


def serve_layers(module: ModuleType, patcher: Patcher, *, convention: ExpertConvention, seam: str) -> None:
    """Judge the runner of NVFP4 experts, and serve them where it is ours.

    Subclasses are left alone, as above; under a runner of ours they run its stand-in.
    """
    owner = getattr(module, convention.cls)
    init, create, set_runner = owner.__init__, owner.create_weights, owner.create_moe_runner
    process, apply = owner.process_weights_after_loading, getattr(owner, convention.apply)
    create_signature = inspect.signature(create)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        own = moe_choice.RUNNERS.own
        if type(self) is not owner:
            if own is not None:
                moe_resolution.warn_of_stand_in(own, type(self), _value_in_force())
            init(self, *args, **kwargs)
            return
        moe_resolution.check_layer(own or _value_in_force(), convention.quantization)
        if own is None:
            init(self, *args, **kwargs)
            return
        moe_resolution.check_stand_in(own, _value_in_force(), convention.quantization)
        with moe_layers.as_on_blackwell(module):
            init(self, *args, **kwargs)
        self.sm120_experts = moe_layers.Experts(own, convention)

    def create_weights(self: Any, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if hasattr(self, "sm120_experts"):
            given = create_signature.bind(self, layer, *args, **kwargs).arguments
            inner = given["intermediate_size_per_partition"]
            self.sm120_experts.dtype = given["params_dtype"]
            moe_layers.check_preparation(layer, self.sm120_experts, inner)
            with moe_layers.or_left_to_sglang(layer, self.sm120_experts):
                sizes = given["hidden_size"], inner, given["num_experts"]
                moe_layers.check_sizes(layer, self.sm120_experts, *sizes)
        create(self, layer, *args, **kwargs)

    def create_moe_runner(self: Any, layer: Any, moe_runner_config: Any) -> None:
        set_runner(self, layer, moe_runner_config)
        if hasattr(self, "sm120_experts"):
            with moe_layers.or_left_to_sglang(layer, self.sm120_experts):
                moe_layers.check_config(self, layer, moe_runner_config, self.sm120_experts)
        if type(self) is owner and layer.moe_ep_size > 1 and not _is_ours(self):
            moe_resolution.check_layer(_value_in_force(), convention.quantization, expert_parallel=True)

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if type(self) is owner:
            moe_scales.warn_of_two_scales(layer, convention)
        process(self, layer)
        if hasattr(self, "sm120_experts"):
            moe_layers.make_ready(layer, self.sm120_experts)

    def forward(self: Any, layer: Any, dispatch_output: Any) -> Any:
        experts: moe_layers.Experts | None = getattr(self, "sm120_experts", None)
        if experts is None or (runner := moe_layers.runner_of(layer, experts, dispatch_output)) is None:
            return apply(self, layer, dispatch_output)
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        return StandardCombineInput(hidden_states=moe_layers.forward(layer, experts, dispatch_output, runner))

    for name, replacement, original in (
        ("__init__", __init__, init),
        ("create_weights", create_weights, create),
        ("create_moe_runner", create_moe_runner, set_runner),
        ("process_weights_after_loading", process_weights_after_loading, process),
        (convention.apply, forward, apply),
    ):
        patcher.set(owner, name, mark(seam, replacement, original))


def _is_ours(method: Any) -> bool:
    """Whether a runner of ours serves the layer of an expert method."""
    experts: moe_layers.Experts | None = getattr(method, "sm120_experts", None)
    return experts is not None and not experts.left


def _value_in_force() -> str:
    """SGLang's value of the runner for the model that is being made."""
    from sglang.srt.layers.moe.utils import get_moe_runner_backend

    value: str = get_moe_runner_backend().value
    return value


def _extend_rule(
    module: ModuleType,
    patcher: Patcher,
    name: str,
    seam: str,
    ours: Callable[[Any, dict[str, Any]], dict[str, Any]],
) -> None:
    original = getattr(module, name)

    def rule(view: Any) -> dict[str, Any]:
        return ours(view, original(view))

    patcher.set_everywhere(module, name, original, mark(seam, rule, original))
