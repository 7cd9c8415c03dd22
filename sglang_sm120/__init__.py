"""NVFP4 GEMM backends for the SM12x GPUs, plugged into an unchanged SGLang.

Importing this module loads neither torch nor sglang; the names below are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sglang_sm120.host.installer import install, verify

__all__ = ["__version__", "install", "verify"]


def __getattr__(name: str) -> Any:
    if name in ("install", "verify"):
        from sglang_sm120.host import installer

        return getattr(installer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
