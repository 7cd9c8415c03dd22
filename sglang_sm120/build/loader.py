"""From a GPU to the loaded kernels: the library of the wheel, one compiled here before, or one compiled now."""

from __future__ import annotations

import logging
import platform
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_sm120 import env
from sglang_sm120.build import driver, manifest, spec, store
from sglang_sm120.build.compiler import compile_library
from sglang_sm120.build.toolchain import find_toolchain
from sglang_sm120.errors import UnsupportedError

logger = logging.getLogger(__name__)

#: Where a compiled wheel has its library.
PREBUILT = Path(__file__).resolve().parents[1] / "prebuilt" / "libsm120_kernels.so"


@cache
def load(capability: tuple[int, int] | None = None) -> Any:
    """Return the loaded native library for a GPU.

    Args:
        capability: compute capability; ``None`` for the current CUDA device.

    Raises:
        UnsupportedError: no library and no way to compile one, no ``apache-tvm-ffi``, the driver is too old, or the
            library cannot be loaded. The message names what is missing.
        ConfigError: the cache folder is not safe or cannot be written to.
    """
    ffi = _tvm_ffi()
    library, facts = _find(capability or _current_capability())
    driver.require(facts.cuda)
    try:
        return ffi.load_module(str(library))
    except (OSError, RuntimeError) as error:
        raise UnsupportedError(f"The compiled kernels {library} cannot be loaded: {error}") from error


def library_path(capability: tuple[int, int] | None = None) -> Path:
    """Return the path of the library that :func:`load` would load, compiled now if need be. Needs no driver."""
    return _find(capability or _current_capability())[0]


def cuda_version(capability: tuple[int, int]) -> tuple[int, int]:
    """Return the CUDA version of the library that :func:`load` would load, or would compile. Writes nothing.

    Raises:
        UnsupportedError: there is no library and no way to compile one.
        ConfigError: the cache folder is not safe.
    """
    sources = spec.digest(spec.source_root())
    facts, _ = _prebuilt(sources, capability)
    # Every server on a GPU asks this: no folder is made for it.
    if facts is None and store.exists():
        facts, _ = manifest.read(_compiled_here(sources, capability))
    if facts is not None:
        return facts.cuda
    _require_jit()
    return find_toolchain().version


def _find(capability: tuple[int, int]) -> tuple[Path, manifest.Manifest]:
    target = spec.target_for(capability)
    root = spec.source_root()
    sources = spec.digest(root)
    facts, missing = _prebuilt(sources, capability)
    if facts is not None:
        return PREBUILT, facts
    if PREBUILT.exists():
        logger.warning("The compiled kernels that came with the package are %s.", missing)
    library = _compiled_here(sources, capability)
    try:
        return library, store.get_or_make(library, lambda path: _compile(root, target, path))
    except UnsupportedError as error:
        raise UnsupportedError(
            f"No compiled kernels for compute capability {capability[0]}.{capability[1]}. "
            f"In the installed package: {missing}. Compiled on this machine: {error}"
        ) from error


def _prebuilt(sources: str, capability: tuple[int, int]) -> tuple[manifest.Manifest | None, str]:
    """The manifest of the wheel's library if it is the right one, else why it is not."""
    if not PREBUILT.exists():
        return None, "none, it was installed from sources or for every platform"
    facts, problem = manifest.read(PREBUILT)
    refusal = problem if facts is None else facts.refusal(sources, capability)
    if facts is None or refusal is not None:
        return None, f"not usable, {refusal}"
    return facts, ""


def _compiled_here(sources: str, capability: tuple[int, int]) -> Path:
    """Where a library compiled on this machine lies. The compiler is not in its name: once made, none is needed."""
    target = spec.target_for(capability)
    return store.folder() / f"sm{target.name}-{platform.machine()}-{_tvm_ffi().__version__}-{sources[:24]}.so"


def _require_jit() -> None:
    if not env.jit():
        raise UnsupportedError(f"not allowed, {env.JIT}=0.")


def _compile(root: Path, target: spec.Target, library: Path) -> None:
    _require_jit()
    toolchain = find_toolchain()
    logger.info("Compiling the kernels for sm_%s with CUDA %s, once on this machine.", target.name, toolchain.text)
    compile_library(root, [target], toolchain, library)


def _current_capability() -> tuple[int, int]:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("There is no CUDA device to load the kernels for.")
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def _tvm_ffi() -> ModuleType:
    from packaging.specifiers import SpecifierSet  # here: setup.py imports this package where it is not installed

    remedy = f"pip install 'apache-tvm-ffi{spec.TVM_FFI}'."
    try:
        module = import_module("tvm_ffi")
    except ImportError as error:
        raise UnsupportedError(f"The kernels are called through apache-tvm-ffi, which is missing: {remedy}") from error
    if not SpecifierSet(spec.TVM_FFI).contains(module.__version__, prereleases=True):
        raise UnsupportedError(f"apache-tvm-ffi {module.__version__} does not fit the kernels: {remedy}")
    return module
