"""Seams of the MoE runner: the two rules of SGLang that choose it, the scheduler's start, and the expert layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_sm120.backends.moe_record import Quantization
from sglang_sm120.host import moe_resolution
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
        scheduler = sys._getframe(1).f_locals.get("self")
        moe_resolution.note_runners(
            module.get_moe_runner_backend().value,
            module.get_speculative_moe_runner_backend().value,
            getattr(scheduler, "model_config", None),
        )

    patcher.set_everywhere(
        module, "initialize_moe_config", original, mark("moe start", initialize_moe_config, original)
    )


def guard_layers(module: ModuleType, patcher: Patcher, *, cls: str, quantization: Quantization, seam: str) -> None:
    """Judge the runner whenever an expert layer of this class is made.

    Subclasses are left alone: each of them is a path of its own that the table knows nothing about.
    """
    owner = getattr(module, cls)
    original = owner.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is owner:
            from sglang.srt.layers.moe.utils import get_moe_runner_backend

            moe_resolution.check_layer(get_moe_runner_backend().value, quantization)
        original(self, *args, **kwargs)

    patcher.set(owner, "__init__", mark(seam, __init__, original))


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
