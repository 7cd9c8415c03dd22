"""Facts about the GPU and the installed packages. torch and FlashInfer are imported inside functions only."""

from __future__ import annotations

import ast
import importlib
import re
from importlib import metadata, util
from pathlib import Path
from typing import Any

from sglang_sm120.backends.record import Capability, HostFacts
from sglang_sm120.backends.table import FLASHINFER_NAMES

#: Where the version of a package key is found, without importing the package.
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "sglang": ("sglang",),
    "flashinfer": ("flashinfer-python",),
    "torch": ("torch",),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cutlass_dsl": ("nvidia-cutlass-dsl",),
}
NO_DEVICE = "no CUDA device"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def installed_versions() -> dict[str, str]:
    """Return installed versions by package key. Imports none of the packages and never touches a GPU."""
    found = {key: _distribution_version(names) for key, names in DISTRIBUTIONS.items()}
    found["cuda"] = _cuda_of_torch()
    found["driver"] = _driver_version()
    return {key: version for key, version in found.items() if version is not None}


def collect_facts(device: int | None = None) -> HostFacts:
    """Collect everything that a decision may depend on. Initialises CUDA: call it where a GPU is used anyway.

    Args:
        device: CUDA device index; ``None`` for the current device.

    Never raises for a broken installation: what cannot be imported counts as missing, with the reason in
    ``HostFacts.problems``.
    """
    versions = installed_versions()
    problems: dict[str, str] = {}
    capability, name = _ask_torch(device, versions, problems)
    support = _ask_flashinfer(capability, versions, problems)
    if "cuda" in versions:
        versions.setdefault("cuda_toolkit", versions["cuda"])
    return HostFacts(
        capability=capability, versions=versions, flashinfer_support=support, device_name=name, problems=problems
    )


def normalise_cudnn(number: int) -> str:
    """Turn cuDNN's integer version into text: 91002 is 9.10.2, and 8905 (before cuDNN 9) is 8.9.5."""
    major_unit = 10000 if number >= 90000 else 1000
    major, rest = divmod(number, major_unit)
    return f"{major}.{rest // 100}.{rest % 100}"


def _distribution_version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            # A half-removed distribution has a folder and no version: None, whatever the type says.
            version: str | None = metadata.version(name)
        except (metadata.PackageNotFoundError, KeyError):
            continue
        if version:
            return version
    return None


def _cuda_of_torch() -> str | None:
    """Read ``torch/version.py``; importing torch would cost seconds, and its wheel's name has no CUDA version."""
    try:
        spec = util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            return str(node.value.value) if isinstance(node.value, ast.Constant) and node.value.value else None
    return None


def _driver_version() -> str | None:
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match.group(1) if match else None


def _ask_torch(device: int | None, versions: dict[str, str], problems: dict[str, str]) -> tuple[Capability | None, str]:
    torch = _import("torch", "torch", versions, problems)
    if torch is None:
        return None, NO_DEVICE
    try:
        if torch.version.cuda is not None:
            versions["cuda"] = str(torch.version.cuda)
        number = torch.backends.cudnn.version()
        if number is not None:
            versions["cudnn"] = normalise_cudnn(int(number))
        if not torch.cuda.is_available():
            return None, NO_DEVICE
        major, minor = torch.cuda.get_device_capability(device)
        return (int(major), int(minor)), str(torch.cuda.get_device_name(device))
    except Exception as error:  # a driver that does not fit raises half a dozen different types
        problems["torch"] = f"it cannot use the GPU: {_reason(error)}"
        return None, NO_DEVICE


def _ask_flashinfer(
    capability: Capability | None, versions: dict[str, str], problems: dict[str, str]
) -> dict[str, bool]:
    """Ask the installed FlashInfer which backends it admits here, and which CUDA toolkit it compiles with."""
    if capability is None or "flashinfer" not in versions:
        return {}
    flashinfer = _import("flashinfer", "flashinfer", versions, problems)
    if flashinfer is None:
        return {}
    compute_capability = 10 * capability[0] + capability[1]
    try:
        toolkit = importlib.import_module("flashinfer.jit.cpp_ext").get_cuda_version()
        versions["cuda_toolkit"] = str(toolkit)
    except Exception as error:
        problems["cuda_toolkit"] = _reason(error)
    try:
        asked = flashinfer.mm_fp4.is_backend_supported
        return {name: bool(asked(name, compute_capability)) for name in FLASHINFER_NAMES}
    except Exception as error:
        problems["flashinfer"] = f"its mm_fp4 cannot be asked what it supports ({_reason(error)})"
        return {}


def _import(module: str, key: str, versions: dict[str, str], problems: dict[str, str]) -> Any | None:
    """Import a package that may be broken in any way: native libraries fail with more than ImportError."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        if key in versions:
            problems[key] = f"installed ({versions.pop(key)}), but importing it fails: {_reason(error)}"
        return None


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
