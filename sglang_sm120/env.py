"""Every environment variable of the package: one table, typed readers, and the cache folder.

Stdlib only. A value that cannot be understood is a :class:`ConfigError`, never a silent default; an empty
value counts as not set.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang_sm120.errors import ConfigError, bad_value

DISABLE = "SGLANG_SM120_DISABLE"
AUTO = "SGLANG_SM120_AUTO"
ALLOW_UNSAFE = "SGLANG_SM120_ALLOW_UNSAFE"
FP4_GEMM_BACKEND = "SGLANG_SM120_FP4_GEMM_BACKEND"
CACHE_DIR = "SGLANG_SM120_CACHE_DIR"
JIT = "SGLANG_SM120_JIT"
VERIFY = "SGLANG_SM120_VERIFY"
REPORT = "SGLANG_SM120_REPORT"
TUNING_TABLE = "SGLANG_SM120_TUNING_TABLE"
DEPRECATED_BACKEND = "SGLANG_FLASHINFER_FP4_GEMM_BACKEND"

#: Of so many steps at least one is checked where any are.
MAX_STEPS = 1_000_000


@dataclass(frozen=True)
class Variable:
    """One row of the table of environment variables; the documentation is generated from it."""

    name: str
    kind: Literal["switch", "backend", "path", "number"]
    default: str
    meaning: str


VARIABLES: tuple[Variable, ...] = (
    Variable(
        DISABLE,
        "switch",
        "0",
        "`1` switches the whole package off, whichever way it was loaded; SGLang runs unchanged.",
    ),
    Variable(AUTO, "switch", "1", "`0` leaves `--fp4-gemm-backend auto` and `--moe-runner-backend auto` to SGLang."),
    Variable(
        ALLOW_UNSAFE,
        "switch",
        "0",
        "`1` starts a backend that the capability table refuses; each refusal becomes a warning. Layers whose N, K or "
        "type the kernels of this package do not take are refused all the same.",
    ),
    Variable(
        FP4_GEMM_BACKEND,
        "backend",
        "not set",
        "Backend for dense FP4 layers where the command line leaves `auto`; any value of the table, or `auto`.",
    ),
    Variable(
        CACHE_DIR,
        "path",
        "`$XDG_CACHE_HOME/sglang-sm120`, else `~/.cache/sglang-sm120`",
        "Folder for everything that the package writes. Must belong to the user and be writable by nobody else.",
    ),
    Variable(
        JIT,
        "switch",
        "1",
        "`0` never starts the CUDA compiler: kernels come with the wheel, or were compiled into the cache folder.",
    ),
    Variable(
        TUNING_TABLE,
        "path",
        "`tuning/` in the cache folder",
        "File of `sglang-sm120 tune --output` that `sm120_tuned` reads instead of the one for this card and these "
        "versions in the cache folder. A link is followed, as Kubernetes mounts ConfigMaps; link and file must belong "
        "to the user or to root, and nobody else may write to the file.",
    ),
    Variable(
        VERIFY,
        "number",
        "0",
        "`N` checks the results of FP4 layers, dense ones and experts, against the float64 oracle: each layer once for "
        "every M before a CUDA graph is captured, and all layers in every N-th step, which then runs without a graph. "
        "Slow; the first wrong result ends the server ([verifying.md](verifying.md)). The same on every node. "
        "SGLang's own parser takes no flag for it.",
    ),
    Variable(
        REPORT,
        "path",
        "not set",
        "File for what served which layer: layer class, sizes, M, backend, number of calls, as JSON; the same as one "
        "block in the log after eight steps ([verifying.md](verifying.md#what-served-what)).",
    ),
    Variable(
        DEPRECATED_BACKEND,
        "backend",
        "not set",
        "Deprecated variable of SGLang 0.5.9, understood on every release: the value with or without `flashinfer_`. "
        f"Use `{FP4_GEMM_BACKEND}` or the flag instead.",
    ),
)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def disabled() -> bool:
    """Return whether ``SGLANG_SM120_DISABLE`` switches the package off."""
    return _switch(DISABLE)


def take_auto() -> bool:
    """Return whether ``auto`` is resolved by this package (``SGLANG_SM120_AUTO``)."""
    return _switch(AUTO)


def allow_unsafe() -> bool:
    """Return whether refusals are turned into warnings (``SGLANG_SM120_ALLOW_UNSAFE``)."""
    return _switch(ALLOW_UNSAFE)


def jit() -> bool:
    """Return whether kernels may be compiled on this machine (``SGLANG_SM120_JIT``)."""
    return _switch(JIT)


def verify_every() -> int:
    """Return of how many steps one is checked (``SGLANG_SM120_VERIFY``); 0 checks none."""
    text = _text(VERIFY) or "0"
    digits = len(str(MAX_STEPS))  # int() refuses thousands of them
    if not (text.isascii() and text.isdigit() and len(text) <= digits and int(text) <= MAX_STEPS):
        remedy = f"write a whole number from 0 to {MAX_STEPS}: of how many steps one is to be checked"
        raise ConfigError(bad_value(VERIFY, text, remedy))
    return int(text)


def report_path() -> Path | None:
    """Return the file for what served which layer (``SGLANG_SM120_REPORT``), ``None`` if nobody asked for it."""
    return _absolute(REPORT)


def fp4_gemm_backend() -> str | None:
    """Return ``SGLANG_SM120_FP4_GEMM_BACKEND`` as written, ``None`` if it is not set."""
    return _text(FP4_GEMM_BACKEND)


def deprecated_backend() -> str | None:
    """Return ``SGLANG_FLASHINFER_FP4_GEMM_BACKEND`` as written, ``None`` if it is not set."""
    return _text(DEPRECATED_BACKEND)


def tuning_table() -> Path | None:
    """Return the file that ``SGLANG_SM120_TUNING_TABLE`` names, ``None`` if it is not set. Touches no file.

    Raises:
        ConfigError: a relative path.
    """
    return _absolute(TUNING_TABLE)


def readings() -> Iterator[tuple[Variable, object, str]]:
    """Yield every variable in the order of the table, its value, and what is wrong with it, empty if nothing is.

    Of a variable that cannot be understood the value is its text. Touches no file.
    """
    readers: dict[str, Callable[[], object]] = {
        DISABLE: disabled,
        AUTO: take_auto,
        ALLOW_UNSAFE: allow_unsafe,
        FP4_GEMM_BACKEND: fp4_gemm_backend,
        CACHE_DIR: cache_path,
        JIT: jit,
        TUNING_TABLE: tuning_table,
        VERIFY: verify_every,
        REPORT: report_path,
        DEPRECATED_BACKEND: deprecated_backend,
    }
    for variable in VARIABLES:
        try:
            yield variable, readers[variable.name](), ""
        except ConfigError as error:
            yield variable, _text(variable.name), str(error)


def require_readable() -> None:
    """Check every variable that is set, before anything depends on one.

    Raises:
        ConfigError: one of them cannot be understood; the text names all of those.
    """
    problems = [problem for variable, _, problem in readings() if problem and _text(variable.name) is not None]
    if problems:
        raise ConfigError(" ".join(problems))


@contextmanager
def without_deprecated_backend() -> Iterator[None]:
    """Hide ``SGLANG_FLASHINFER_FP4_GEMM_BACKEND`` from code that would misread a value we understand."""
    saved = os.environ.pop(DEPRECATED_BACKEND, None)
    try:
        yield
    finally:
        if saved is not None:
            os.environ[DEPRECATED_BACKEND] = saved


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return names that look like ours and are not: a misspelt switch would otherwise just do nothing."""
    known = {variable.name for variable in VARIABLES}
    return sorted(name for name in environ if name.startswith("SGLANG_SM120_") and name not in known)


def cache_path() -> Path:
    """Return where the cache folder is or would be. Touches no file.

    Raises:
        ConfigError: the variable holds a relative path, or no home folder can be found.
    """
    path = _absolute(CACHE_DIR)
    if path is not None:
        return path
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if os.path.isabs(base):
        return Path(base) / "sglang-sm120"
    try:
        return Path.home() / ".cache" / "sglang-sm120"
    except RuntimeError as error:
        raise ConfigError(f"There is no home folder for the cache ({error}): set {CACHE_DIR}.") from error


def cache_dir(subfolder: str = "") -> Path:
    """Return the cache folder, or one in it, created with mode 0700 if it was missing.

    Code that was compiled on this machine is loaded from it, so a folder that another user owns or may write
    to is refused.

    Raises:
        ConfigError: it cannot be created, is not a folder, or is not safe.
    """
    path = cache_path()
    _make_private(path)
    replaceable = next((p for p in path.resolve().parents if _others_may_replace(p)), None)
    if replaceable is not None:
        remedy = f"other users may replace what lies in {replaceable}; name a folder below one of your own"
        raise ConfigError(bad_value(CACHE_DIR, str(path), remedy))
    if subfolder:
        path /= subfolder
        _make_private(path)
    return path


def _make_private(path: Path) -> None:
    """Create a folder and those above it, and check that it is the user's own."""
    try:
        for folder in [*reversed(path.parents), path]:
            folder.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(
            bad_value(CACHE_DIR, str(path), f"{error.strerror or error}; name a folder that you can write to")
        ) from error
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(bad_value(CACHE_DIR, str(path), "it is a link; name the folder itself"))
    if status.st_uid != os.geteuid():
        raise ConfigError(bad_value(CACHE_DIR, str(path), "it belongs to another user; name a folder of your own"))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(bad_value(CACHE_DIR, str(path), "other users may write to it; run chmod go-w on it"))


def _others_may_replace(folder: Path) -> bool:
    status = folder.stat()
    return bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX


def _text(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None


def _absolute(name: str) -> Path | None:
    text = _text(name)
    if text is None:
        return None
    path = Path(os.path.expanduser(text))  # leaves ~nobody as it is, where Path raises
    if not path.is_absolute():
        raise ConfigError(bad_value(name, text, "give an absolute path"))
    return path


def _switch(name: str) -> bool:
    text = _text(name) or next(v.default for v in VARIABLES if v.name == name)
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ConfigError(bad_value(name, text, f"write one of {', '.join(_TRUE)} or {', '.join(_FALSE)}"))
