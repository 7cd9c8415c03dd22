"""The compiled CUDA kernels: those of the wheel, or compiled on the machine that runs them.

``setup.py`` compiles with the same code, from a checkout where nothing is installed: the standard library only.
"""

from __future__ import annotations

from sglang_sm120.build.loader import cuda_version, library_path, load

__all__ = ["cuda_version", "library_path", "load"]
