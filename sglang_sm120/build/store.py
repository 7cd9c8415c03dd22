"""The folder of libraries compiled on this machine, ``<cache>/native``.

Code is loaded from it, so it is the user's alone. A library appears in it whole or not at all, and one process
compiles it while the others wait.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_sm120 import env
from sglang_sm120.build import manifest
from sglang_sm120.errors import ConfigError, bad_value

logger = logging.getLogger(__name__)

_NAME = "native"


def folder() -> Path:
    """Return the folder, created with mode 0700 if it was missing.

    Raises:
        ConfigError: it cannot be created, is not a folder, or somebody else owns it or may write to it.
    """
    return env.cache_dir(_NAME)


def exists() -> bool:
    """Whether the folder is there. Touches no file.

    Raises:
        ConfigError: the variable for the cache folder cannot be understood.
    """
    return os.path.isdir(env.cache_path() / _NAME)  # Path.is_dir would raise for a home folder of somebody else


def get_or_make(library: Path, make: Callable[[Path], None]) -> manifest.Manifest:
    """Return the manifest of a library in the folder, made first if it is missing or damaged.

    Args:
        library: where it lies, directly in the folder.
        make: writes a library and its manifest to the path it is given.

    Raises:
        ConfigError: the folder cannot be written to, is full, or lies on a file system without locks.
        Exception: whatever ``make`` raises.
    """
    found, _ = manifest.read(library)
    if found is not None:
        return found
    with _unwritable(library.parent), _lock(library.with_suffix(".lock")):
        found, problem = manifest.read(library)  # another process may have been faster
        if found is None:
            if library.exists():
                logger.warning("%s is made again: %s.", library, problem)
            _make(library, make)
            found, problem = manifest.read(library)
    if found is None:
        raise ConfigError(bad_value(env.CACHE_DIR, str(library.parent), f"what was just written to it, {problem}"))
    return found


def _make(library: Path, make: Callable[[Path], None]) -> None:
    prefix = f"{library.stem}."
    # Left by a process that was killed; whoever holds the lock is the only one who may use them.
    for stale in library.parent.glob(f"{prefix}*.d"):
        shutil.rmtree(stale)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, suffix=".d", dir=library.parent))
    try:
        made = scratch / library.name
        make(made)
        # Between the two a library has the manifest of its predecessor: other bytes, so it does not count.
        os.replace(made, library)
        os.replace(manifest.path_of(made), manifest.path_of(library))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _unwritable(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = f"{reason}; free some space, or name a folder on a local disk that you can write to"
        raise ConfigError(bad_value(env.CACHE_DIR, str(where), remedy)) from error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it should this process die."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Another process compiles the kernels (lock %s); waiting for it.", path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
