"""Seams of the start: the choices list, the enum, and the function that resolves the choice."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from types import ModuleType
from typing import Any

from sglang_sm120.backends import BACKENDS, offered_backends
from sglang_sm120.backends.moe_table import OUR_RUNNERS
from sglang_sm120.backends.record import Backend
from sglang_sm120.host import moe_choice, registration
from sglang_sm120.host.enum_extension import add_members, remove_members
from sglang_sm120.host.patching import Patcher, mark
from sglang_sm120.host.resolution import resolve_for_host
from sglang_sm120.host.state import STATE
from sglang_sm120.host.tuning import VALUE


def extend_choices(module: ModuleType, patcher: Patcher) -> None:
    """Append our values to the list that argparse refers to (the same object in every release).

    Where SGLang has a registration of its own, that does it.
    """
    choices: list[str] = module.FP4_GEMM_RUNNER_BACKEND_CHOICES
    ours, registry = offered_backends(set(choices)), registration.registry()
    if registry is None:
        choices.extend(b.value for b in ours)
    else:
        for record in ours:
            registry.register_fp4_gemm_backend(record.value, registration.gemm_of(record))
    _watch(choices, [b.value for b in ours], patcher)


def extend_moe_choices(module: ModuleType, patcher: Patcher) -> None:
    """Append our MoE runners to the one list that the flags of target and draft share."""
    choices: list[str] = module.MOE_RUNNER_BACKEND_CHOICES
    added = [value for value in OUR_RUNNERS if value not in choices]
    moe_choice.leave_to_sglang(set(OUR_RUNNERS) - set(added))
    choices.extend(added)
    _watch(choices, added, patcher)


def _watch(choices: list[str], added: list[str], patcher: Patcher) -> None:
    def remove() -> None:
        for value in added:
            choices.remove(value)

    patcher.changed(remove, lambda: set(added) <= set(choices))


def extend_enum(module: ModuleType, patcher: Patcher) -> None:
    """Give SGLang's enum our members and let its methods answer for them, unless our values are registered with it."""
    if registration.registry() is not None:
        patcher.changed(lambda: None, lambda: registration.registry() is not None)
        return
    cls = module.Fp4GemmRunnerBackend
    ours = offered_backends(set(cls._value2member_map_))
    added = add_members(cls, {b.enum_name: b.value for b in ours})
    patcher.changed(partial(remove_members, cls, added), lambda: set(added) <= set(cls.__members__))
    records = {b.value: b for b in ours}
    _wrap_flashinfer_name(cls, records, patcher)
    _wrap_autotuned(cls, _autotuned(records), patcher)
    # The fused SwiGLU weight layout is built by SGLang's own preparation, which our layers do not go through.
    if hasattr(cls, "supports_swiglu_fusion"):
        _refuse_predicate(cls, "supports_swiglu_fusion", set(records), patcher)


def _autotuned(records: dict[str, Backend]) -> set[str]:
    # This predicate is SGLang's only condition for running FlashInfer's autotuner over the dense FP4 GEMM
    # (besides is_flashinfer_cutedsl); nothing else asks it. tests/matrix checks that for every release.
    return {value for value, record in records.items() if record.provider == "flashinfer"}


def _wrap_flashinfer_name(cls: Any, records: dict[str, Backend], patcher: Patcher) -> None:
    original = cls.get_flashinfer_backend

    def get_flashinfer_backend(self: Any) -> str:
        record = records.get(self.value)
        # SGLang before 0.5.12 would turn flashinfer_cutedsl into "cutedsl"; FlashInfer calls it "cute-dsl".
        return original(self) if record is None else (record.flashinfer_name or record.value)

    patcher.set(cls, "get_flashinfer_backend", mark("enum", get_flashinfer_backend, original))


def _wrap_autotuned(cls: Any, also: set[str], patcher: Patcher) -> None:
    original = cls.is_flashinfer_cutlass

    def is_flashinfer_cutlass(self: Any) -> bool:
        # Layers with a plan were tuned while weights loaded; the others go SGLang's own way to FlashInfer.
        untuned = STATE.tuning.untuned.backend if self.value == VALUE and STATE.tuning is not None else None
        if untuned is not None and BACKENDS[untuned].provider == "flashinfer":
            return True
        return self.value in also or bool(original(self))

    patcher.set(cls, "is_flashinfer_cutlass", mark("enum", is_flashinfer_cutlass, original))


def _refuse_predicate(cls: Any, name: str, values: set[str], patcher: Patcher) -> None:
    original = getattr(cls, name)

    def predicate(self: Any) -> bool:
        return self.value not in values and bool(original(self))

    patcher.set(cls, name, mark("enum", predicate, original))


def wrap_resolution(module: ModuleType, patcher: Patcher) -> None:
    """Resolve the request with our rules, after SGLang's own function has accepted the value."""
    original = module.initialize_fp4_gemm_config
    takes_arguments = bool(inspect.signature(original).parameters)

    def initialize_fp4_gemm_config(*args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1).f_locals.get("self")
        server_args = (args[0] if args else kwargs["server_args"]) if takes_arguments else None
        resolve_for_host(module, server_args, lambda: original(*args, **kwargs), scheduler=caller)

    replacement = mark("resolution", initialize_fp4_gemm_config, original)
    patcher.set_everywhere(module, "initialize_fp4_gemm_config", original, replacement)
