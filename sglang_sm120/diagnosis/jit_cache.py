"""What FlashInfer compiled on this machine, and with which flags: the ``build.ninja`` of each module in its cache."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Without it the kernels are launched before what they read is written, and do not wait (flashinfer#2708).
PDL_DEFINE = "-DCUTLASS_ENABLE_GDC_FOR_SM100=1"
#: Modules of CUTLASS GEMMs on SM12x, which are launched so. FlashInfer names them in jit/gemm and jit/fused_moe.py.
_LAUNCHED_EARLY = re.compile(r"(fp4_gemm_cutlass_sm12\d|fused_moe_12\d)")
_CODE = re.compile(r"code=\[?\"?(?:sm|compute)_(\d+[af]?)")


@dataclass(frozen=True)
class JitModule:
    """One module of the cache: the targets it was compiled for, such as ``120f``, and whether PDL is compiled in."""

    name: str
    folder: Path
    targets: tuple[str, ...]
    has_pdl_define: bool

    @property
    def plain_sm12x(self) -> tuple[str, ...]:
        """Targets of SM12x that have no FP4 instruction: those without a suffix."""
        return tuple(target for target in self.targets if re.fullmatch(r"12\d", target))

    @property
    def may_race(self) -> bool:
        """Whether its kernels may run before what they read is written."""
        on_sm12x = any(target.startswith("12") for target in self.targets)
        return on_sm12x and not self.has_pdl_define and _LAUNCHED_EARLY.match(self.name) is not None


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return FlashInfer's cache folder, as its ``jit/env.py`` does."""
    return Path(environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"


def modules(root: Path, release: str) -> tuple[JitModule, ...]:
    """Return the modules that this FlashInfer release compiled below ``root``, by name.

    A module that cannot be read is left out: FlashInfer will write it anew or fail with a message of its own.
    """
    found = []
    for rules in sorted((root / release).glob("*/cached_ops/*/build.ninja")):
        if os.access(rules, os.R_OK):
            found.append(_module(rules))
    return tuple(found)


def _module(rules: Path) -> JitModule:
    text = rules.read_text(encoding="utf-8", errors="replace").replace("$\n", "")
    flags = " ".join(re.findall(r"^\s*(?:cuda_cflags|cuda_post_cflags|common_cflags)\s*=(.*)$", text, re.MULTILINE))
    targets = tuple(sorted(set(_CODE.findall(flags))))
    return JitModule(rules.parent.name, rules.parent, targets, PDL_DEFINE in flags.split())
