"""What is installed here: which SGLang, which copies of this package, what was asked for. No torch, no SGLang."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

from sglang_sm120 import __version__, env
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.moe_table import MOE_RUNNERS
from sglang_sm120.nvml import compute_capabilities

ENTRY_POINT_NAME = "sm120"
FLAG = "--fp4-gemm-backend"
MOE_FLAGS = ("--moe-runner-backend", "--speculative-moe-runner-backend")


def sglang_version(root: Path) -> Version | None:
    """Version of the SGLang below ``root``, from the metadata beside it; ``None`` if it cannot be told.

    The metadata beside the package is asked first: another SGLang may be installed further down the path.
    """
    for folder in root.parent.glob("sglang-*.dist-info"):
        return _parse(folder.name.removeprefix("sglang-").removesuffix(".dist-info"))
    for name in ("_version.py", "version.py"):
        file = root / name
        found = re.search(r"^__version__\b.*?=\s*['\"]([^'\"]+)", file.read_text(), re.M) if file.is_file() else None
        if found:
            return _parse(found.group(1))
    try:
        return _parse(metadata.version("sglang"))
    except metadata.PackageNotFoundError:
        return None


def conflicting_copy() -> str | None:
    """Describe a second, different version of this package on the path, or ``None``."""
    versions = {d.version for d in metadata.distributions(name="sglang-sm120") if d.version}
    others = sorted(versions - {__version__})
    if not others:
        return None
    return (
        f"two versions of sglang-sm120 are on the path: {__version__} (imported) and {', '.join(others)}. "
        "Which one runs would depend on the process; uninstall one (pip uninstall sglang-sm120, repeat until none "
        "is left, then install the one you want)"
    )


def excluded_by_whitelist() -> bool:
    """Whether ``SGLANG_PLUGINS`` names plugins and not this one."""
    names = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    return bool(names) and ENTRY_POINT_NAME not in names


def asked_value() -> str | None:
    """The backend that the command line or our variable asks for, ``None`` if neither names one."""
    return _argument(FLAG) or env.fp4_gemm_backend()


def named() -> str | None:
    """Why this process depends on the package, else ``None``.

    It names a value that only the package provides, or is to be checked, and a server that nobody checks looks like
    one that passed.
    """
    if env.verify_every():
        return f"{env.VERIFY}={env.verify_every()} asks for a checked server"
    asked = {FLAG: (asked_value(), BACKENDS), **{flag: (_argument(flag), MOE_RUNNERS) for flag in MOE_FLAGS}}
    for flag, (value, table) in asked.items():
        record = table.get(value) if value is not None else None
        if record is not None and record.native_since is None:
            return f"{flag} {value} is provided by it"
    return None


def _argument(flag: str) -> str | None:
    """What follows ``flag`` on the command line, ``None`` if it is not there.

    SGLang has not parsed its arguments yet, so the words are read as they are.
    """
    words = sys.argv[1:]
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == flag:
            found = following
        elif word.startswith(flag + "="):
            found = word.split("=", 1)[1]
    return found  # of several flags argparse takes the last


def automatic(release: Version | None) -> str | None:
    """Why a server that starts here without naming a value depends on the package: ``auto`` on SM12x."""
    value = asked_value()
    if value is None and release is not None and release.base_version == "0.5.9":
        return None  # its default is not auto
    if value in (None, "auto") and env.take_auto() and any(major == 12 for major, _ in compute_capabilities()):
        return f"{FLAG} auto on an SM12x GPU is resolved by it (SGLANG_SM120_AUTO=0 leaves it to SGLang)"
    return None


def _parse(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
