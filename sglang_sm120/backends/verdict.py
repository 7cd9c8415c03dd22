"""Can a backend run here, and if not, why and what instead. Pure functions from facts to a verdict."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sglang_sm120.backends.record import Backend, CapabilityRow, Fault, HostFacts, Requirement, Verdict
from sglang_sm120.backends.table import AUTO_ORDER, BACKENDS, NEWEST_FLASHINFER_READ
from sglang_sm120.errors import ConfigError, bad_value

#: How the user gets the package behind a key of ``HostFacts.versions``; ``{}`` is the version specifier.
_REMEDIES = {
    "sglang": "use SGLang {}",
    "flashinfer": 'pip install "flashinfer-python{}"',
    "torch": 'pip install "torch{}"',
    "cuda": "install a torch that is built with CUDA {}",
    "cuda_toolkit": "install a CUDA toolkit {} and let CUDA_HOME point to it",
    "cudnn": "install cuDNN {} (the nvidia-cudnn wheel for your CUDA)",
    "kernels_cuda": "install a CUDA toolkit {} and let CUDA_HOME point to it",
    "tvm_ffi": 'pip install "apache-tvm-ffi{}"',
    "cutlass_dsl": 'pip install "nvidia-cutlass-dsl{}"',
    "driver": "install an NVIDIA driver {}",
}
_NAMES = {
    "sglang": "SGLang",
    "flashinfer": "FlashInfer",
    "cuda": "torch's CUDA",
    "cuda_toolkit": "the CUDA toolkit",
    "kernels_cuda": "CUDA for the kernels of this package",
    "tvm_ffi": "apache-tvm-ffi",
    "cudnn": "cuDNN",
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "driver": "the NVIDIA driver",
}
_NEWER = (
    "FlashInfer {0} says that it runs {1} on this card; this package was checked up to {2} and has no facts about it."
)


def verdict(
    backend: str, facts: HostFacts, *, n: int | None = None, k: int | None = None, out_dtype: str | None = None
) -> Verdict:
    """Judge one backend by the table.

    Args:
        backend: a value of ``BACKENDS``.
        facts: the machine and the installed packages.
        n: output features as they reach the kernel; ``None`` leaves the shape rules out.
        k: input features, likewise.
        out_dtype: ``bfloat16`` or ``float16``; ``None`` leaves it out.

    Raises:
        ConfigError: ``backend`` is not in the table.
    """
    record = BACKENDS.get(backend)
    if record is None:
        raise ConfigError(bad_value("backend", backend, f"take one of {', '.join(BACKENDS)}"))
    return judge(record, facts, n=n, k=k, out_dtype=out_dtype)


def judge(
    record: Backend, facts: HostFacts, *, n: int | None = None, k: int | None = None, out_dtype: str | None = None
) -> Verdict:
    """Judge one record, whichever table it stands in; the arguments are those of :func:`verdict`."""
    if record.any_device:
        return Verdict(record.value, "ok", "runs on every device", source=record.rows[0].source)
    row = next((row for row in record.rows if row.capability == facts.capability), None)
    warnings = []
    if row is not None:
        refusal = _unmet(record, row, facts) or _misfit(record, row, n, k, out_dtype)
    elif _flashinfer_answer(record, facts) is True and _is_newer_than_read(facts):
        refusal = None
        warnings.append(_NEWER.format(facts.versions["flashinfer"], record.value, NEWEST_FLASHINFER_READ))
    else:
        refusal = _no_row(record, facts)
    if refusal is not None:
        return refusal
    for fault in _active_faults(record, facts):
        if fault.severity == "refuse":
            return Verdict(record.value, "refused", fault.effect + _found(fault, facts), fault.remedy, fault.source)
        warnings.append(f"{record.value}: {fault.effect} ({fault.source.ref}); {fault.remedy}.")
    source = row.source if row is not None else None
    return Verdict(record.value, "ok", "every requirement is met", source=source, warnings=tuple(warnings))


def available_values(facts: HostFacts) -> list[str]:
    """Return the values that the table lets run here, in its order."""
    return [value for value in BACKENDS if verdict(value, facts).status == "ok"]


def misfit(record: Backend, n: int, k: int, out_dtype: str) -> str | None:
    """Return why the kernels of a record do not take these sizes and types, whatever the card; ``None`` if they do."""
    found = (_misfit(record, row, n, k, out_dtype) for row in record.rows)
    return next((judged.reason for judged in found if judged is not None), None)


def offered_backends(native: set[str]) -> list[Backend]:
    """Return the records to add to an SGLang whose own values are ``native``; its own stay in force."""
    return [b for b in BACKENDS.values() if b.can_be_added and b.value not in native]


def offered_values(native: set[str]) -> list[str]:
    """Return the values of ``offered_backends``."""
    return [b.value for b in offered_backends(native)]


def is_native(record: Backend, facts: HostFacts) -> bool:
    """Return whether the installed SGLang has the value itself; an unknown SGLang counts as a new one."""
    installed = _parse(facts.versions.get("sglang", ""))
    if record.native_since is None or installed is None:
        return record.native_since is not None
    removed = any(b.package == "sglang" and not holds(b, facts) for row in record.rows for b in row.requires)
    return installed >= Version(record.native_since) and not removed


def automatic_choice(facts: HostFacts) -> tuple[Verdict, str] | None:
    """Return the verdict of the backend that ``auto`` takes on SM12x and the reason, ``None`` if none can run."""
    for preference in AUTO_ORDER:
        if all(holds(bound, facts) for bound in preference.when):
            judged = verdict(preference.value, facts)
            if judged.status == "ok":
                return judged, f"{preference.reason} ({preference.source.ref})"
    return None


def holds(bound: Requirement, facts: HostFacts) -> bool:
    """Return whether a version bound is met. A missing package or an unreadable version meets none."""
    installed = _parse(_installed(bound.package, facts) or "")
    return installed is not None and SpecifierSet(bound.specifier).contains(installed, prereleases=True)


def _no_row(record: Backend, facts: HostFacts) -> Verdict:
    if facts.capability is None:
        return Verdict(record.value, "unsupported", "needs a CUDA device", "torch_reference runs without one")
    absence = next((a for a in record.absent if facts.capability in a.capabilities), None)
    reason = absence.reason if absence else "the table has no facts about this capability"
    source = absence.source if absence else record.rows[0].source
    major, minor = facts.capability
    return Verdict(
        record.value,
        "unsupported",
        f"does not run on compute capability {major}.{minor}: {reason}",
        "take another value",
        source,
    )


def _unmet(record: Backend, row: CapabilityRow, facts: HostFacts) -> Verdict | None:
    answer = _flashinfer_answer(record, facts)
    for bound in row.requires:
        vouched = bound.package == "flashinfer" and answer is True
        if vouched or holds(bound, facts):
            continue
        installed = _installed(bound.package, facts)
        name = _NAMES.get(bound.package, bound.package)
        state = facts.problems.get(bound.package) or (f"found {installed}" if installed else "it is not installed")
        remedy = _REMEDIES[bound.package].format(bound.specifier)
        reason = f"needs {name} {bound.specifier}: {state}"
        return Verdict(record.value, "unsupported", reason, remedy, bound.source)
    if answer is False:
        version = facts.versions.get("flashinfer", "")
        reason = f"FlashInfer {version} says that it does not support {record.flashinfer_name!r} on this card"
        return Verdict(record.value, "unsupported", reason, "take another value", row.source)
    return None


def _misfit(record: Backend, row: CapabilityRow, n: int | None, k: int | None, out_dtype: str | None) -> Verdict | None:
    if out_dtype is not None and out_dtype not in row.out_dtypes:
        reason = f"gives {' or '.join(row.out_dtypes)} and the layer wants {out_dtype}"
        return Verdict(record.value, "unsupported", reason, f"start with --dtype {row.out_dtypes[0]}", row.source)
    rule = row.shape
    if rule is None:
        return None
    for name, size, multiple in (("N", n, rule.n_multiple), ("K", k, rule.k_multiple)):
        if size is not None and size % multiple:
            reason = f"needs {name} to be a multiple of {multiple} and the layer has {name}={size}"
            return Verdict(record.value, "unsupported", reason, "try another tensor-parallel size", rule.source)
    return None


def _active_faults(record: Backend, facts: HostFacts) -> Iterator[Fault]:
    for fault in record.faults:
        if facts.capability in fault.capabilities and all(holds(bound, facts) for bound in fault.when):
            yield fault


def _found(fault: Fault, facts: HostFacts) -> str:
    """Return the installed versions that a fault depends on, in brackets."""
    found = [f"{_NAMES.get(b.package, b.package)} {_installed(b.package, facts)}" for b in fault.when]
    return f" (found {', '.join(found)})" if found else ""


def _flashinfer_answer(record: Backend, facts: HostFacts) -> bool | None:
    """Return what the installed FlashInfer says about itself; it outranks the release that the table recorded."""
    if record.flashinfer_name is None or "flashinfer" not in facts.versions:
        return None
    return facts.flashinfer_support.get(record.flashinfer_name)


def _is_newer_than_read(facts: HostFacts) -> bool:
    installed = _parse(facts.versions.get("flashinfer", ""))
    return installed is not None and installed > Version(NEWEST_FLASHINFER_READ)


def _installed(package: str, facts: HostFacts) -> str | None:
    installed = facts.versions.get(package)
    # Without nvcc FlashInfer compiles nothing and reports the toolkit of torch.
    if installed is None and package == "cuda_toolkit":
        return facts.versions.get("cuda")
    return installed


def _parse(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
