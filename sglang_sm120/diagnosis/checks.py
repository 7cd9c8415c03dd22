"""What follows from compiled code for the card of this machine. Pure, so that every machine can be tested as data."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from sglang_sm120.backends.record import HostFacts
from sglang_sm120.backends.table import DRIVER_FLOOR
from sglang_sm120.diagnosis.compiled import Compiled
from sglang_sm120.diagnosis.finding import Finding
from sglang_sm120.diagnosis.jit_cache import PDL_DEFINE

GIB = 2**30
#: What one compiler of FlashInfer's CUTLASS sources may need; reports say 3 to 8 GiB (flashinfer#3634).
_COMPILER_MEMORY = 8 * GIB
#: What the system and the server itself need while it compiles; on DGX Spark the same memory is the GPU's.
_SERVER_MEMORY = 16 * GIB
#: Sources, objects and libraries of the modules that a model needs; nvcc's scratch files beside them.
_COMPILER_DISK = 4 * GIB


def compiled_findings(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """Yield what is wrong with libraries, FlashInfer's cache, versions of CUDA, and room for compiling."""
    yield from _images(compiled, facts)
    yield from _jit_modules(compiled)
    yield from _versions(facts)
    yield from _room(compiled, facts)


def talk_finding(problem: str) -> Finding:
    """Return the finding about two GPUs that cannot talk to each other, see :mod:`.two_ranks`."""
    message = (
        f"Two processes on GPUs 0 and 1 cannot add numbers with NCCL: {problem}. A server on several GPUs hangs so."
    )
    fix = "Set NCCL_P2P_DISABLE=1; if that helps, IOMMU and ACS in the host's firmware are what usually breaks P2P."
    return Finding("ranks-cannot-talk", "stop", message, fix)


def _images(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    for library in compiled.libraries:
        for problem in library.problems:
            message = f"A library of {library.owner} cannot be read: {problem}."
            yield Finding("library-unreadable", "warning", message, f"Reinstall {library.owner}.")
        if facts.capability is None or not library.units or library.running(facts.capability):
            continue
        name = "{}.{}".format(*facts.capability)
        message = (
            f"{library.owner} has no code for compute capability {name}, only for {', '.join(library.targets)}: its "
            "first kernel fails with “no kernel image is available”."
        )
        family = " or sm_120f" if facts.capability[0] == 12 else ""
        fix = f"Install a build of {library.owner} with sm_{name.replace('.', '')}{family}."
        yield Finding("no-kernel-image", "stop", message, fix)


def _jit_modules(compiled: Compiled) -> Iterator[Finding]:
    for module in compiled.jit_modules:
        again = f"Remove {module.folder}; FlashInfer then compiles it again"
        if module.plain_sm12x:
            message = (
                f"FlashInfer's module {module.name} was compiled for sm_{', sm_'.join(module.plain_sm12x)}, which has "
                "no FP4 instructions."
            )
            yield Finding(
                "jit-plain-target", "warning", message, f"{again}. Set FLASHINFER_CUDA_ARCH_LIST=12.0f first."
            )
        if module.may_race:
            message = (
                f"FlashInfer's module {module.name} was compiled without {PDL_DEFINE}: its kernels do not wait "
                "for what they read, and leave tiles unwritten under load (flashinfer#2708)."
            )
            yield Finding("jit-pdl-define", "stop", message, f"{again} with the flag from flashinfer-python 0.6.8 on.")


def _versions(facts: HostFacts) -> Iterator[Finding]:
    torch_cuda, toolkit, driver = (_version(facts, key) for key in ("cuda", "cuda_toolkit", "driver"))
    if torch_cuda is None:
        return
    floor = DRIVER_FLOOR.get(torch_cuda.major)
    if driver is not None and floor is not None and driver.major < floor:
        message = f"torch is built with CUDA {torch_cuda}, and the driver {driver} is older than {floor}."
        fix = (
            f"Install an NVIDIA driver >= {floor}, its compatibility package, or torch for CUDA {torch_cuda.major - 1}."
        )
        yield Finding("driver-old", "warning", message, fix)
    if toolkit is not None and toolkit.major != torch_cuda.major:
        message = (
            f"The CUDA toolkit is {toolkit} and torch is built with CUDA {torch_cuda}: what FlashInfer compiles here "
            "loads another CUDA run time than torch."
        )
        fix = f"Install a toolkit of CUDA {torch_cuda.major}, and point CUDA_HOME to it."
        yield Finding("toolkit-differs", "warning", message, fix)


def _room(compiled: Compiled, facts: HostFacts) -> Iterator[Finding]:
    """FlashInfer compiles on the first start; only where it would."""
    if "flashinfer" not in facts.versions or facts.capability is None or facts.capability[0] != 12:
        return
    fitting = max((compiled.memory_available - _SERVER_MEMORY) // _COMPILER_MEMORY, 1)
    if compiled.memory_available and compiled.jobs > fitting:
        message = (
            f"FlashInfer's first start runs {compiled.jobs} compilers at once, of up to {_COMPILER_MEMORY // GIB} GiB "
            f"each, and {compiled.memory_available / GIB:.0f} GiB of memory are available: the system may end them, or "
            "freeze (flashinfer#3634)."
        )
        yield Finding("jit-memory", "warning", message, f"Set MAX_JOBS={fitting} for the first start.")
    if compiled.disk_free and compiled.disk_free < _COMPILER_DISK:
        message = f"{compiled.disk_free / GIB:.1f} GiB are free where FlashInfer keeps what it compiles."
        yield Finding("jit-disk", "warning", message, "Make room, or set FLASHINFER_WORKSPACE_BASE to another disk.")


def _version(facts: HostFacts, key: str) -> Version | None:
    try:
        return Version(facts.versions[key])
    except (KeyError, InvalidVersion):
        return None
