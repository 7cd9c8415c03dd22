"""What ``doctor`` concludes from a snapshot. Pure, so that every broken installation can be tested as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from packaging.version import InvalidVersion, Version

from sglang_sm120 import __version__, env
from sglang_sm120.cli.backends_report import SCHEMA, backends_report
from sglang_sm120.cli.snapshot import Snapshot
from sglang_sm120.diagnosis.checks import compiled_findings, talk_finding
from sglang_sm120.diagnosis.finding import Finding
from sglang_sm120.diagnosis.packages import package_findings
from sglang_sm120.sgl_kernel_ops.choice import implementations

REINSTALL = "in a clone of sglang-sm120, pip install --force-reinstall --no-deps ."


def doctor_report(snapshot: Snapshot) -> dict[str, Any]:
    """Return the whole report as plain data."""
    findings = [finding for check in CHECKS for finding in check(snapshot)]
    decision = snapshot.decision
    report = backends_report(snapshot.facts)
    report.update(
        schema=SCHEMA,
        ok=all(finding.severity != "stop" for finding in findings),
        package=__version__,
        python=snapshot.python,
        decision=None
        if decision is None
        else {"backend": decision.backend, "origin": decision.origin, "reason": decision.reason},
        settings=[asdict(setting) for setting in snapshot.settings],
        operators=implementations(decision, snapshot.facts),
        hooks={
            "pth_active": snapshot.pth_active,
            "entry_point": snapshot.entry_point,
            "seams": {name: snapshot.seams.differing.get(name, "matches") for name in snapshot.seams.names},
            "note": snapshot.seams.note,
        },
        libraries=[
            {
                "owner": library.owner,
                "targets": library.targets,
                "units": len(library.units),
                "units_for_this_card": library.running(snapshot.facts.capability)
                if snapshot.facts.capability
                else None,
            }
            for library in snapshot.compiled.libraries
        ],
        paths={
            "package": [f"{copy.folder} ({copy.version})" for copy in snapshot.copies],
            "site_packages": str(snapshot.site_packages),
            "cache": snapshot.cache,
        },
        findings=[asdict(finding) for finding in findings],
    )
    return report


def _check_packages(s: Snapshot) -> Iterator[Finding]:
    for key, install in (("torch", "pip install torch"), ("sglang", "pip install sglang")):
        if key in s.facts.problems and key in s.facts.versions:
            yield Finding(f"{key}-broken", "warning", f"{key}: {s.facts.problems[key]}.", "Check the GPU driver.")
        elif key not in s.facts.versions:
            problem = s.facts.problems.get(key)
            message = f"{key}: {problem}." if problem else f"{key} is not installed."
            yield Finding(f"{key}-missing", "stop", message, f"Install it{' again' if problem else ''}: {install}.")


def _check_flashinfer(s: Snapshot) -> Iterator[Finding]:
    installed, pin = s.facts.versions.get("flashinfer"), s.flashinfer_pin
    wanted = f'pip install "flashinfer-python=={pin}"' if pin else "pip install flashinfer-python"
    if installed is None:
        problem = s.facts.problems.get("flashinfer")
        state = f"FlashInfer: {problem}." if problem else "FlashInfer is not installed."
        message = f"{state} No flashinfer_* value can run; torch_reference can."
        yield Finding("flashinfer-missing", "warning", message, f"Install it: {wanted}.")
    elif pin and _older(installed, pin):
        message = (
            f"FlashInfer {installed} is older than {pin}, which the installed SGLang asks for and checks at start."
        )
        yield Finding("flashinfer-old", "stop", message, f"Install that one: {wanted}.")


def _check_sglang(s: Snapshot) -> Iterator[Finding]:
    installed, tested = s.facts.versions.get("sglang"), s.seams.tested
    if installed is None or tested is None:
        return
    first, last = tested
    if _older(installed, first):
        message = f"SGLang {installed} is older than {first}, the first release that is supported."
        yield Finding("sglang-old", "stop", message, f'Upgrade it: pip install "sglang>={first}".')
    elif _older(last, installed):
        message = f"SGLang {installed} is newer than {last}, the last one this version was tested with."
        yield Finding("sglang-new", "warning", message, "Look for a newer sglang-sm120; it runs while all hooks match.")


def _check_seams(s: Snapshot) -> Iterator[Finding]:
    for name, difference in s.seams.differing.items():
        message = f"The installed SGLang differs where the hook {name!r} goes: {difference}. Nothing is hooked at all."
        fix = "Upgrade sglang-sm120, or install a supported SGLang release unchanged."
        yield Finding("seam-differs", "stop", message, fix)
    if s.seams.note:
        message = f"{s.seams.note[0].upper()}{s.seams.note[1:]}."
        if "sglang" in s.facts.versions:
            yield Finding("seams-unknown", "stop", message, f"Reinstall this package: {REINSTALL}")
        else:
            yield Finding("seams-unknown", "warning", message, "Install SGLang, then run doctor again.")


def _check_copies(s: Snapshot) -> Iterator[Finding]:
    if len(s.copies) < 2:
        return
    listing = ", ".join(f"{copy.version} in {copy.folder}" for copy in s.copies)
    differ = len({copy.version for copy in s.copies}) > 1
    yield Finding(
        "two-copies",
        "stop" if differ else "warning",
        f"Several copies of this package are on the path: {listing}. Which one runs depends on the process.",
        "Run pip uninstall sglang-sm120 until none is left, clear PYTHONPATH of the others, and install one.",
    )


def _check_loading(s: Snapshot) -> Iterator[Finding]:
    """A server must load the package in every process: by the .pth file, or by SGLang's plugins (>= 0.5.11)."""
    if _value_of(s, env.DISABLE) == "1":
        yield Finding("disabled", "warning", f"{env.DISABLE}=1: the package is off.", f"Unset {env.DISABLE}.")
        return
    if s.plugins_whitelist and "sm120" not in [name.strip() for name in s.plugins_whitelist.split(",")]:
        message = "SGLANG_PLUGINS lists other plugins only, so this one stays off."
        yield Finding("plugins-whitelist", "stop", message, "Add sm120 to SGLANG_PLUGINS, or unset it.")
    if s.pth_active:
        return
    installed = s.facts.versions.get("sglang")
    plugins = s.entry_point and installed is not None and not _older(installed, "0.5.11")
    why = f" ({s.pth_note})" if s.pth_note else ""
    message = f"The start-up file sglang_sm120_boot.pth is not active in this Python{why}. " + (
        "SGLang's plugin loader still loads the package, but not in bench_one_batch, Ray and --help."
        if plugins
        else "Nothing else loads the package here."
    )
    fix = f"Install it into site-packages, not with --target or PYTHONPATH: {REINSTALL}"
    if not s.site_packages_writable:
        fix = "Site-packages is read-only: install into a virtual environment of your own, or change the image."
    yield Finding("pth-inactive", "warning" if plugins else "stop", message, fix)


def _check_site_packages(s: Snapshot) -> Iterator[Finding]:
    if not s.site_packages_writable and s.pth_active:
        message = "Site-packages is read-only. The package runs; pip cannot upgrade or remove it there."
        yield Finding("read-only", "warning", message, "For an upgrade, change the image or use a virtual environment.")


def _check_settings(s: Snapshot) -> Iterator[Finding]:
    for setting in s.settings:
        if setting.problem:
            yield Finding("bad-setting", "stop", setting.problem, f"Correct or unset {setting.name}.")
    for name in s.misspelt:
        message = f"{name} is no variable of this package and does nothing."
        known = ", ".join(v.name for v in env.VARIABLES)
        yield Finding("unknown-variable", "warning", message, f"Correct the name: {known}.")


def _check_decision(s: Snapshot) -> Iterator[Finding]:
    if any(setting.problem for setting in s.settings):
        return
    if s.decision is None:
        fix = "Do what the message says; sglang-sm120 backends shows every value."
        yield Finding("start-refused", "stop", f"A server started now is refused. {s.refusal}", fix)
        return
    for warning in s.decision.warnings:
        yield Finding("start-warning", "warning", warning, "Do what the message says, or name another value.")


def _check_cache(s: Snapshot) -> Iterator[Finding]:
    if s.cache_problem:
        fix = f"Set {env.CACHE_DIR} to a folder of yours that only you can write to."
        yield Finding("cache", "warning", f"{s.cache_problem}.".replace("..", "."), fix)


def _check_compiled(s: Snapshot) -> Iterator[Finding]:
    yield from compiled_findings(s.compiled, s.facts)
    if s.compiled_note:
        message = f"Compiled code could not be examined: {s.compiled_note}."
        yield Finding("compiled-unknown", "warning", message, "Repair or reinstall what the message names.")


def _check_versions(s: Snapshot) -> Iterator[Finding]:
    yield from package_findings(s.packages, s.facts)
    if s.packages_note:
        message = f"What goes together with FlashInfer could not be examined: {s.packages_note}."
        yield Finding("packages-unknown", "warning", message, "Repair or reinstall what the message names.")


def _check_ranks(s: Snapshot) -> Iterator[Finding]:
    if s.ranks_problem:
        yield talk_finding(s.ranks_problem)


CHECKS: tuple[Callable[[Snapshot], Iterator[Finding]], ...] = (
    _check_packages,
    _check_sglang,
    _check_flashinfer,
    _check_seams,
    _check_copies,
    _check_loading,
    _check_site_packages,
    _check_settings,
    _check_decision,
    _check_cache,
    _check_compiled,
    _check_versions,
    _check_ranks,
)


def _value_of(s: Snapshot, name: str) -> str:
    return next((setting.value for setting in s.settings if setting.name == name), "")


def _older(left: str, right: str) -> bool:
    try:
        return Version(left) < Version(right)
    except InvalidVersion:
        return False
