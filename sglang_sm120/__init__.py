"""NVFP4 GEMM backends for the SM12x GPUs, plugged into an unchanged SGLang.

Importing this module loads no other module, let alone torch or sglang: ``sglang_sm120_boot.pth`` does it at the
start of every interpreter. The names below are resolved on first use.
"""

__version__ = "0.1.0"

# Not typing's constant and no __future__ import: this file runs at the start of every Python interpreter.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from sglang_sm120.host.installer import install, verify

__all__ = ["__version__", "install", "verify"]


def __getattr__(name: str) -> object:
    if name in ("install", "verify"):
        from sglang_sm120.host import installer

        return getattr(installer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
