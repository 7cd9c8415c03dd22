"""Seams of the start: the choices list, the enum, and the function that resolves the choice."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from types import ModuleType
from typing import Any

from sglang_sm120.backends import offered_backends
from sglang_sm120.backends.record import Backend
from sglang_sm120.host.enum_extension import add_members, remove_members
from sglang_sm120.host.patching import Patcher, mark
from sglang_sm120.host.resolution import resolve_for_host


def extend_choices(module: ModuleType, patcher: Patcher) -> None:
    """Append our values to the list that argparse refers to (the same object in every release)."""
    choices: list[str] = module.FP4_GEMM_RUNNER_BACKEND_CHOICES
    added = [b.value for b in offered_backends(set(choices))]
    choices.extend(added)

    def remove() -> None:
        for value in added:
            choices.remove(value)

    patcher.changed(remove, lambda: set(added) <= set(choices))


def extend_enum(module: ModuleType, patcher: Patcher) -> None:
    """Give SGLang's enum our members and let its methods answer for them."""
    cls = module.Fp4GemmRunnerBackend
    ours = offered_backends(set(cls._value2member_map_))
    added = add_members(cls, {b.enum_name: b.value for b in ours})
    patcher.changed(partial(remove_members, cls, added), lambda: set(added) <= set(cls.__members__))
    records = {b.value: b for b in ours}
    _wrap_flashinfer_name(cls, records, patcher)
    _wrap_predicate(cls, "is_flashinfer_cutlass", _autotuned(records), patcher)
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


def _wrap_predicate(cls: Any, name: str, also: set[str], patcher: Patcher) -> None:
    original = getattr(cls, name)

    def predicate(self: Any) -> bool:
        return self.value in also or bool(original(self))

    patcher.set(cls, name, mark("enum", predicate, original))


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
