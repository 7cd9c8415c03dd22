"""Whether the packages around FlashInfer and cuDNN go together, by their metadata; imports none of them."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from sglang_sm120.backends.package_table import (
    CUDNN_LOADED_BY_NAME,
    CUDNN_LOADS_BY_NAME,
    CUDNN_WHEELS,
    CUDNN_WHEELS_SOURCE,
    DSL_WHEELS,
    DSL_WHEELS_SOURCE,
    FLASHINFER_COMPANIONS,
    FLASHINFER_NEEDS,
    PACKAGE_FAULTS,
)
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.backends.verdict import holds
from sglang_sm120.diagnosis.finding import Finding

#: Where the dynamic loader looks beside ``LD_LIBRARY_PATH``, as distributions and NVIDIA's packages install.
_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
)


@dataclass(frozen=True)
class Packages:
    """What metadata and library folders say.

    Attributes:
        installed: versions of the distributions that the table of packages names; missing key = not installed.
        asked: what the installed FlashInfer's metadata asks for, one requirement for each of :data:`FLASHINFER_NEEDS`.
        other_cudnn: a part of cuDNN outside of this Python, which the loader may take, its links followed; empty if
            there is none.
        overwritten: a file of the CuTe DSL for CUDA 13 in whose place another wheel's lies; empty if there is none.
    """

    installed: Mapping[str, str] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    other_cudnn: str = ""
    overwritten: str = ""


def collect(environ: Mapping[str, str]) -> Packages:
    """Look at this Python's metadata, and for another cuDNN where the loader would find it."""
    names = (*FLASHINFER_COMPANIONS, *FLASHINFER_NEEDS, *CUDNN_WHEELS.values(), *DSL_WHEELS)
    versions = {name: _version(name) for name in names}
    return Packages(
        installed={name: version for name, version in versions.items() if version},
        asked=tuple(_asked_by_flashinfer()),
        other_cudnn=_other_cudnn(environ),
        overwritten=_overwritten(),
    )


def package_findings(packages: Packages, facts: HostFacts) -> Iterator[Finding]:
    """Yield what does not go together."""
    flashinfer = facts.versions.get("flashinfer")
    if flashinfer is not None:
        yield from _companions(packages, flashinfer)
        yield from _needs(packages, flashinfer)
    yield from _cudnn(packages, facts)
    yield from _dsl(packages, facts)
    for fault in PACKAGE_FAULTS:
        if all(holds(bound, facts) for bound in fault.when):
            message = f"{fault.effect[0].upper()}{fault.effect[1:]} ({fault.source.ref})."
            yield Finding("versions-conflict", "warning", message, f"Run: {fault.remedy}.")


def _companions(packages: Packages, flashinfer: str) -> Iterator[Finding]:
    for name, source in FLASHINFER_COMPANIONS.items():
        installed = packages.installed.get(name)
        if installed is None or installed.partition("+")[0] == flashinfer.partition("+")[0]:
            continue
        message = (
            f"{name} {installed} is not of FlashInfer {flashinfer}: importing FlashInfer fails, or with "
            f"FLASHINFER_DISABLE_VERSION_CHECK=1 kernels of another release run ({source.ref})."
        )
        fix = (
            f"Remove it, FlashInfer then compiles or downloads what it needs (pip uninstall {name}), or install {name}"
        )
        yield Finding("flashinfer-companion", "stop", message, f"{fix} {flashinfer}.")


def _needs(packages: Packages, flashinfer: str) -> Iterator[Finding]:
    for text in packages.asked:
        asked = Requirement(text)
        installed = packages.installed.get(asked.name)
        if installed is not None and _satisfies(installed, asked):
            continue
        state = f"{asked.name} is {installed}" if installed is not None else f"{asked.name} is not installed"
        message = (
            f"{state}, and FlashInfer {flashinfer} asks for {text}: what needs it fails when its first kernel is "
            f"compiled ({FLASHINFER_NEEDS[asked.name].ref})."
        )
        yield Finding("flashinfer-needs", "warning", message, f'Run: pip install "{text}".')


def _cudnn(packages: Packages, facts: HostFacts) -> Iterator[Finding]:
    wheels = {major: name for major, name in CUDNN_WHEELS.items() if name in packages.installed}
    cuda = _major(facts.versions.get("cuda", ""))
    wrong = [name for major, name in wheels.items() if major != cuda]
    if cuda is not None and wrong:
        right = CUDNN_WHEELS.get(cuda, "the wheel of cuDNN that torch asks for")
        message = (
            f"{' and '.join(wrong)} is installed beside torch for CUDA {cuda}: cuDNN's wheels write to one folder, and "
            f"the one installed last is loaded ({CUDNN_WHEELS_SOURCE.ref})."
        )
        fix = f"Run: pip uninstall {' '.join(wrong)}, then pip install --force-reinstall --no-deps {right}"
        kept = packages.installed.get(right)
        yield Finding("cudnn-wheels", "warning", message, f"{fix}=={kept}." if kept else f"{fix}.")
    differs = packages.other_cudnn and not packages.other_cudnn.endswith(f".so.{facts.versions.get('cudnn')}")
    if differs and wheels and holds(CUDNN_LOADS_BY_NAME, facts):
        message = (
            f"cuDNN {facts.versions['cudnn']} of this Python loads {CUDNN_LOADED_BY_NAME} by its name and does not "
            f"bring it, so it takes {packages.other_cudnn} of another version and ends with "
            f"CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH ({CUDNN_LOADS_BY_NAME.source.ref})."
        )
        fix = "Remove that cuDNN or its folder from LD_LIBRARY_PATH, or install one of its version into this Python."
        yield Finding("cudnn-mixed", "warning", message, fix)


def _dsl(packages: Packages, facts: HostFacts) -> Iterator[Finding]:
    if not packages.overwritten or _major(facts.versions.get("cuda", "")) != 13:
        return
    base, cuda_13 = DSL_WHEELS
    message = (
        f"{packages.overwritten} is the file of {base}, which was installed after {cuda_13}: kernels of the CuTe DSL "
        f"(flashinfer_b12x, flashinfer_cutedsl) may not compile ({DSL_WHEELS_SOURCE.ref})."
    )
    version = packages.installed[cuda_13]
    fix = f"Run: pip install --force-reinstall --no-deps {cuda_13}=={version}."
    yield Finding("cutlass-dsl-wheels", "warning", message, fix)


def _overwritten() -> str:
    """Compare one of the files that both wheels record with what lies there."""
    try:
        base, cuda_13 = ({file: file for file in metadata.distribution(name).files or ()} for name in DSL_WHEELS)
    except metadata.PackageNotFoundError:
        return ""
    for file in sorted(base.keys() & cuda_13.keys()):
        theirs, ours = base[file].hash, cuda_13[file].hash
        if theirs is None or ours is None or theirs.value == ours.value:
            continue
        digest = hashlib.sha256(Path(file.locate()).read_bytes()).digest()
        found = base64.urlsafe_b64encode(digest).decode().rstrip("=")  # as RECORD has it
        return str(file) if found == theirs.value else ""
    return ""


def _asked_by_flashinfer() -> Iterator[str]:
    try:
        texts = metadata.requires("flashinfer-python") or []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        try:
            asked = Requirement(text)
        except InvalidRequirement:
            continue  # of a newer packaging; pip itself would say so
        if asked.name in FLASHINFER_NEEDS and asked.marker is None:
            yield text


def _other_cudnn(environ: Mapping[str, str]) -> str:
    folders = [*filter(os.path.isabs, environ.get("LD_LIBRARY_PATH", "").split(":")), *_LIBRARY_FOLDERS]
    places = (Path(folder, CUDNN_LOADED_BY_NAME) for folder in folders)
    # What the links end at has the whole version in its name.
    return next((os.path.realpath(place) for place in places if os.path.exists(place)), "")


def _version(name: str) -> str | None:
    try:
        found: str | None = metadata.version(name)  # a half-removed distribution has none
    except metadata.PackageNotFoundError:
        return None
    return found


def _satisfies(installed: str, asked: Requirement) -> bool:
    return asked.specifier.contains(installed, prereleases=True)


def _major(version: str) -> int | None:
    try:
        return Version(version).major
    except InvalidVersion:
        return None
