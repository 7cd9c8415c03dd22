"""Fixtures of the kernel tests."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import emulated


@pytest.fixture(scope="session")
def build_folder() -> Path:
    """Folder for compiled test programs, kept between runs; file names are hashes of what they were made from."""
    folder = Path(tempfile.gettempdir()) / "sglang-sm120-emulated"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def compiled(source: str, folder: Path) -> Path:
    """A program of the emulation, or a skip where there is no C++ compiler."""
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    return emulated.build(source, folder)


@pytest.fixture(scope="session")
def emulated_gemm(build_folder: Path) -> Path:
    """The skinny GEMM compiled for the CPU with address and undefined-behaviour sanitizers."""
    return compiled("tests/kernels/emulated_gemm.cc", build_folder)


@pytest.fixture(scope="session")
def emulated_tiled(build_folder: Path) -> Path:
    """The tiled GEMM compiled likewise."""
    return compiled("tests/kernels/emulated_gemm_tiled.cc", build_folder)


@pytest.fixture(scope="session")
def emulated_quantizer(build_folder: Path) -> Path:
    """The quantizer compiled likewise."""
    return compiled("tests/kernels/emulated_quantize.cc", build_folder)


@pytest.fixture(scope="session")
def emulated_quantizing(build_folder: Path) -> Path:
    """The skinny GEMM that quantizes its activations itself, compiled likewise."""
    return compiled("tests/kernels/emulated_quantizing_gemm.cc", build_folder)
