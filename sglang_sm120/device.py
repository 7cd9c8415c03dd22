"""Facts about the GPU and the installed packages. torch and FlashInfer are imported inside functions only."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any, TypeVar

from sglang_sm120 import build
from sglang_sm120.backends.operator_table import calls_the_wheel
from sglang_sm120.backends.record import Capability, HostFacts
from sglang_sm120.backends.table import FLASHINFER_NAMES
from sglang_sm120.errors import Sm120Error

#: Where the version of a package key is found, without importing the package.
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "sglang": ("sglang",),
    "flashinfer": ("flashinfer-python",),
    "torch": ("torch",),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cutlass_dsl": ("nvidia-cutlass-dsl",),
    "tvm_ffi": ("apache-tvm-ffi",),
}
T = TypeVar("T")

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
    _ask_our_kernels(capability, versions, problems)
    if "cuda" in versions:
        versions.setdefault("cuda_toolkit", versions["cuda"])
    return HostFacts(
        capability=capability,
        versions=versions,
        flashinfer_support=support,
        device_name=name,
        problems=problems,
        wheel_code=_read_sgl_kernel(capability, versions, problems),
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
    torch = _import("torch", versions, problems)
    if torch is None:
        return None, NO_DEVICE

    def ask() -> tuple[Capability | None, str]:
        if torch.version.cuda is not None:
            versions["cuda"] = str(torch.version.cuda)
        number = torch.backends.cudnn.version()
        if number is not None:
            versions["cudnn"] = normalise_cudnn(int(number))
        # ROCm builds answer through torch.cuda as well, and some AMD GPUs call themselves 12.0.
        if torch.version.cuda is None or not torch.cuda.is_available():
            return None, NO_DEVICE
        major, minor = torch.cuda.get_device_capability(device)
        return (int(major), int(minor)), str(torch.cuda.get_device_name(device))

    answer, problem = _attempt(ask)
    if problem is not None:
        problems["torch"] = f"it cannot use the GPU: {problem}"
    return answer or (None, NO_DEVICE)


def _ask_flashinfer(
    capability: Capability | None, versions: dict[str, str], problems: dict[str, str]
) -> dict[str, bool]:
    """Ask the installed FlashInfer which backends it admits here, and which CUDA toolkit it compiles with."""
    if capability is None or "flashinfer" not in versions:
        return {}
    flashinfer = _import("flashinfer", versions, problems)
    if flashinfer is None:
        return {}
    compute_capability = 10 * capability[0] + capability[1]
    toolkit, problem = _attempt(lambda: importlib.import_module("flashinfer.jit.cpp_ext").get_cuda_version())
    if problem is not None:
        problems["cuda_toolkit"] = problem
    else:
        versions["cuda_toolkit"] = str(toolkit)
    support, problem = _attempt(
        lambda: {n: bool(flashinfer.mm_fp4.is_backend_supported(n, compute_capability)) for n in FLASHINFER_NAMES}
    )
    if problem is not None:
        problems["flashinfer"] = f"its mm_fp4 cannot be asked what it supports ({problem})"
    return support or {}


def _ask_our_kernels(capability: Capability | None, versions: dict[str, str], problems: dict[str, str]) -> None:
    """Find the CUDA version that our kernels are, or would be, compiled with; without a GPU nobody needs them."""
    if capability is None:
        return
    try:
        versions["kernels_cuda"] = "{}.{}".format(*build.cuda_version(capability))
    except Sm120Error as error:
        problems["kernels_cuda"] = str(error)


def _read_sgl_kernel(capability: Capability | None, versions: dict[str, str], problems: dict[str, str]) -> bool | None:
    """Read from the library of the sgl-kernel wheel whether it has code for the card, where SGLang's operators are its.

    A file that cannot be read is a problem and no answer: the table then decides.
    """
    if capability is None or not calls_the_wheel(HostFacts(capability, versions)):
        return None
    from sglang_sm120.diagnosis.compiled import library_of

    library, problem = _attempt(lambda: library_of("sgl_kernel", capability, "common_ops*.so"))
    problem = problem or (", ".join(library.problems) if library is not None else None)
    if problem:
        problems["sgl_kernel"] = f"its library cannot be read ({problem})"
        return None
    return library.running(capability) > 0 if library is not None else None


def _import(key: str, versions: dict[str, str], problems: dict[str, str]) -> Any | None:
    """Import the package behind ``key``; one that is installed and broken becomes missing, with a problem."""
    module, problem = _attempt(lambda: importlib.import_module(key))
    if problem is not None and key in versions:
        problems[key] = f"{versions.pop(key)} is installed, but importing it fails ({problem})"
    return module


def _attempt(ask: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the answer, or why there is none. Half-broken native packages raise any type of exception."""
    try:
        return ask(), None
    except Exception as error:  # noqa: BLE001 - see above; the caller records the reason
        first_line = str(error).strip().partition("\n")[0]
        return None, f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
