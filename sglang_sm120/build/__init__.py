"""Compiling the CUDA kernels on the machine that runs them, and finding what was compiled before."""

from __future__ import annotations

from sglang_sm120.build.loader import library_path, load

__all__ = ["library_path", "load"]
