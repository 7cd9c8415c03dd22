"""Which backend serves: pure functions from facts to a decision. No torch, no sglang, no look-ups."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from sglang_sm120 import env
from sglang_sm120.backends import AUTO_ORDER, BACKENDS, verdict
from sglang_sm120.backends.record import CAPABILITIES, Backend, HostFacts, Verdict
from sglang_sm120.backends.verdict import automatic_choice, is_native, misfit
from sglang_sm120.errors import ConfigError, Sm120Error, UnsupportedError, bad_value

Origin = Literal["command line", "environment", "deprecated variable", "default"]

AUTO = "auto"
FLAG = "--fp4-gemm-backend"

logger = logging.getLogger("sglang_sm120.dispatch")

#: Where a value may come from, the strongest first, and what the user writes there.
PRECEDENCE: dict[Origin, str] = {
    "command line": FLAG,
    "environment": env.FP4_GEMM_BACKEND,
    "deprecated variable": env.DEPRECATED_BACKEND,
    "default": FLAG,
}


@dataclass(frozen=True)
class Request:
    """What the user asked for, before any decision.

    Attributes:
        server_value: the value in SGLang's server arguments (its default if the flag was not given).
        env_value: ``SGLANG_SM120_FP4_GEMM_BACKEND`` or ``None``.
        deprecated_value: ``SGLANG_FLASHINFER_FP4_GEMM_BACKEND`` or ``None``.
        take_auto: ``False`` when ``SGLANG_SM120_AUTO=0`` leaves ``auto`` to SGLang.
        allow_unsafe: ``SGLANG_SM120_ALLOW_UNSAFE=1``.
    """

    server_value: str
    env_value: str | None = None
    deprecated_value: str | None = None
    take_auto: bool = True
    allow_unsafe: bool = False


@dataclass(frozen=True)
class Decision:
    """The backend that serves the dense FP4 layers of this process.

    ``explicit`` is true when the user named a backend: then no layer may fall back to another one.
    ``backend`` is ``None`` when the choice is left to SGLang (another card, ``SGLANG_SM120_AUTO=0``, or a value
    of another plugin): then the package does nothing in this process.
    """

    backend: str | None
    origin: Origin
    explicit: bool
    reason: str
    warnings: tuple[str, ...] = ()
    allow_unsafe: bool = False


def resolve(request: Request, facts: HostFacts) -> Decision:
    """Decide which backend serves this process.

    Precedence: command line, ``SGLANG_SM120_FP4_GEMM_BACKEND``, the deprecated variable, SGLang's default. The
    first that is given decides, even if it says ``auto``. SGLang 0.5.9 puts ``flashinfer_cutlass`` where others
    put ``auto``; it cannot be told from the flag, so there it counts as the command line.

    Raises:
        ConfigError: a variable names a value that does not exist.
        UnsupportedError: the value cannot run here and ``allow_unsafe`` is off, or nothing can.
    """
    value, origin, warnings = _asked(request, facts)
    if value == AUTO:
        return _resolve_auto(request, facts, origin, warnings)
    record = BACKENDS.get(value)
    if record is None:
        return Decision(None, origin, True, f"{value} is not a value of this package", warnings)
    if not _is_ours_to_judge(record, facts):
        # From the command line SGLang has the value already; from a variable of ours nobody else would set it.
        taken = None if origin == "command line" else value
        return Decision(
            taken, origin, True, f"{value} is SGLang's own value, on a card that is not ours to judge", warnings
        )
    judged = verdict(value, facts)
    if judged.status == "ok":
        return Decision(value, origin, True, "asked for by name", (*warnings, *judged.warnings), request.allow_unsafe)
    # What the installed SGLang does not accept and nobody adds cannot be forced either.
    exists = is_native(record, facts) or record.can_be_added
    text = _refusal(PRECEDENCE[origin], judged, facts, can_be_forced=exists)
    if not (request.allow_unsafe and exists):
        raise UnsupportedError(text)
    return Decision(value, origin, True, f"forced by {env.ALLOW_UNSAFE}", (*warnings, text), True)


def layer_backend(
    decision: Decision,
    facts: HostFacts,
    *,
    name: str,
    n: int,
    k: int,
    out_dtype: str,
    fused_scales_differ: bool,
    weight_only: bool = False,
) -> str:
    """Decide which backend serves one layer.

    Args:
        decision: of this process.
        facts: the ones that the decision was made from.
        name: of the layer, for messages.
        n: output features as they reach the kernel, after SGLang's padding if it pads for this backend.
        k: input features, likewise.
        out_dtype: ``bfloat16`` or ``float16``.
        fused_scales_differ: the layer is a fused projection whose shards have different global scales. Only a
            backend with ``exact_fused_scales`` multiplies it right.
        weight_only: the activations of the layer are not quantized (W4A16).

    Returns:
        A value of ``BACKENDS``, or ``auto`` when the decision leaves everything to SGLang. A layer that ``auto``
        routes to another backend is logged as a warning.

    Raises:
        ConfigError: the named backend would multiply differing global scales wrongly.
        UnsupportedError: the named backend cannot run the layer. Kernels of ours refuse sizes and types that are not
            theirs on every call, so ``allow_unsafe`` does not let such a layer through.
    """
    if decision.backend is None:
        return AUTO
    record = BACKENDS[decision.backend]
    if not _is_ours_to_judge(record, facts):
        return record.value
    objection = _objection(record, facts, n, k, out_dtype, fused_scales_differ, weight_only)
    if objection is None:
        return record.value
    error, why = objection
    other = substitute(facts, exact=fused_scales_differ, weight_only=weight_only, n=n, k=k, out_dtype=out_dtype)
    if not decision.explicit:
        slow = ", which is much slower" if BACKENDS[other].any_device else ""
        logger.warning("Layer %s is served by %s%s, instead of %s: %s.", name, other, slow, record.value, why)
        return other
    # Kernels of ours refuse these on every call: forced, the layer would end the server at its first forward.
    limit = misfit(record, n, k, out_dtype) if record.implementation is not None else None
    force = "" if limit else f", or set {env.ALLOW_UNSAFE}=1 to go on all the same"
    remedy = f"{limit or why} (layer {name}); use {FLAG} {other} or auto instead{force}"
    text = bad_value(PRECEDENCE[decision.origin], record.value, remedy)
    if limit or not decision.allow_unsafe:
        raise error(text)
    if why != verdict(record.value, facts).reason:  # else every layer would repeat the warning of the start
        logger.warning("%s", text)
    return record.value


def untuned(facts: HostFacts, *, allow_unsafe: bool) -> Decision:
    """Decide what serves, under ``sm120_tuned``, the layers that the tuning table says nothing about.

    It is what ``auto`` takes on this machine; where that is left to SGLang, a backend of this package.
    """
    try:
        decision = _resolve_auto(Request(AUTO, allow_unsafe=allow_unsafe), facts, "default", ())
    except UnsupportedError:
        decision = None
    if decision is None or decision.backend is None:
        value = substitute(facts, exact=True)
        return Decision(value, "default", False, "auto leaves the choice to SGLang here", (), allow_unsafe)
    return decision


def _objection(
    record: Backend,
    facts: HostFacts,
    n: int,
    k: int,
    out_dtype: str,
    fused_scales_differ: bool,
    weight_only: bool,
) -> tuple[type[Sm120Error], str] | None:
    """Return why a backend must not serve a layer, and the error to raise if the user named it."""
    judged = verdict(record.value, facts, n=n, k=k, out_dtype=out_dtype)
    if judged.status != "ok":
        return UnsupportedError, judged.reason
    if fused_scales_differ and not record.exact_fused_scales:
        return ConfigError, "its fused shards have different global scales, and this backend applies one to all of them"
    if fused_scales_differ and weight_only and not record.serves_weight_only:
        return ConfigError, (
            "its activations are not quantized (W4A16) and its fused shards have different global scales; this backend "
            "multiplies quantized ones, and SGLang's weight-only path applies one scale to all shards"
        )
    return None


def _asked(request: Request, facts: HostFacts) -> tuple[str, Origin, tuple[str, ...]]:
    """Return the value that counts, where it comes from, and warnings about what it overrides."""
    leftover = request.deprecated_value is not None and not _deprecated_counts(request.deprecated_value, facts)
    sources: dict[Origin, str | None] = {
        "command line": None if request.server_value == AUTO else request.server_value,
        "environment": request.env_value,
        "deprecated variable": None if leftover else request.deprecated_value,
    }
    given = [(value, origin) for origin in PRECEDENCE if (value := sources.get(origin)) is not None]
    if not given:
        return AUTO, "default", ()
    (value, origin), *overridden = given
    warnings = [
        f"{PRECEDENCE[loser]}={other!r} is ignored: {PRECEDENCE[origin]}={value!r} comes first{_hint(request, facts)}."
        for other, loser in overridden
        if other != value
    ]
    if origin == "environment" and value != AUTO and value not in BACKENDS:
        raise ConfigError(bad_value(env.FP4_GEMM_BACKEND, value, f"write one of {', '.join((AUTO, *BACKENDS))}"))
    if origin == "deprecated variable":
        old, value = value, _translate_deprecated(value)
        warnings.append(f"{env.DEPRECATED_BACKEND}={old!r} is deprecated: write {FLAG} {value} instead.")
    return value, origin, tuple(warnings)


def _deprecated_counts(value: str, facts: HostFacts) -> bool:
    """Return whether the deprecated variable is ours to read: on SM12x, or where it names what only we provide.

    SGLang stopped reading it with 0.5.10. A variable left over on another card must change nothing there.
    """
    record = BACKENDS.get(_deprecated_names().get(value, ""))
    return facts.is_sm12x or (record is not None and not is_native(record, facts))


def sglang_default(facts: HostFacts) -> str:
    """Return what the installed SGLang's server arguments hold when the flag is not given."""
    release = facts.versions.get("sglang", "").partition("+")[0].split(".")[:3]
    return "flashinfer_cutlass" if release == ["0", "5", "9"] else AUTO


def _hint(request: Request, facts: HostFacts) -> str:
    if request.server_value == sglang_default(facts) != AUTO:
        return f" (it is the default of SGLang 0.5.9; add {FLAG} auto to let a variable decide)"
    return ""


def _deprecated_names() -> dict[str, str]:
    """Map every spelling that the deprecated variable may hold (FlashInfer's names, with or without prefix)."""
    names = {AUTO: AUTO}
    for record in BACKENDS.values():
        if record.flashinfer_name is None:
            continue
        names[record.value] = record.value
        for spelling in (record.flashinfer_name, record.value.removeprefix("flashinfer_")):
            names.setdefault(spelling, record.value)
            names.setdefault(f"flashinfer_{spelling}", record.value)
    return names


def _translate_deprecated(old: str) -> str:
    names = _deprecated_names()
    if old not in names:
        raise ConfigError(bad_value(env.DEPRECATED_BACKEND, old, f"write one of {', '.join(sorted(names))}"))
    return names[old]


def _resolve_auto(request: Request, facts: HostFacts, origin: Origin, warnings: tuple[str, ...]) -> Decision:
    if not request.take_auto:
        return Decision(None, origin, False, f"{env.AUTO}=0 leaves auto to SGLang", warnings)
    if not facts.is_sm12x or facts.capability not in CAPABILITIES:
        return Decision(None, origin, False, "this is not an SM12x GPU that the table knows", warnings)
    choice = automatic_choice(facts)
    if choice is not None:
        judged, reason = choice
        return Decision(judged.backend, origin, False, reason, (*warnings, *judged.warnings), request.allow_unsafe)
    probed = _passed_probe(facts)
    if probed is not None:
        reason = "no FlashInfer backend runs here, and sglang-sm120 probe found this one right on this card"
        return Decision(probed, origin, False, reason, warnings, request.allow_unsafe)
    refusals = [verdict(value, facts) for value in dict.fromkeys(p.value for p in AUTO_ORDER)]
    text = bad_value(
        PRECEDENCE[origin],
        AUTO,
        f"no backend that auto may take runs here ({'; '.join(f'{v.backend} {v.reason}' for v in refusals)}); "
        f"{refusals[0].remedy}, or name another value: {_others(facts)}",
    )
    if not request.allow_unsafe:
        raise UnsupportedError(text)
    return Decision(None, origin, False, f"left to SGLang by {env.ALLOW_UNSAFE}", (*warnings, text), True)


def _passed_probe(facts: HostFacts) -> str | None:
    """Return code of ours that was checked on this very card and these versions; unchecked code is never chosen."""
    for record in BACKENDS.values():
        if record.needs_probe and facts.passed_probe(record.value) and verdict(record.value, facts).status == "ok":
            return record.value
    return None


def _is_ours_to_judge(record: Backend, facts: HostFacts) -> bool:
    """On other cards than SM12x the package judges only values that SGLang does not have itself."""
    known_sm12x = facts.is_sm12x and facts.capability in CAPABILITIES
    return known_sm12x or not is_native(record, facts)


def _refusal(argument: str, judged: Verdict, facts: HostFacts, *, can_be_forced: bool) -> str:
    source = f" ({judged.source.ref})" if judged.source is not None else ""
    others = _others(facts)
    remedy = f"{judged.remedy}, or " if judged.remedy and others not in judged.remedy else ""
    force = f"; {env.ALLOW_UNSAFE}=1 starts it all the same" if can_be_forced else ""
    return bad_value(
        argument,
        judged.backend,
        f"{judged.reason}{source}; {remedy}use {FLAG} {others} instead{force}",
    )


def _others(facts: HostFacts) -> str:
    """Name what the user can take instead: what auto would take, else what runs anywhere."""
    choice = automatic_choice(facts) if facts.is_sm12x else None
    return choice[0].backend if choice is not None else substitute(facts, exact=True)


def substitute(
    facts: HostFacts,
    *,
    exact: bool,
    weight_only: bool = False,
    n: int | None = None,
    k: int | None = None,
    out_dtype: str | None = None,
) -> str:
    """Return the backend that takes over a layer which the chosen one cannot serve, or a quantizer that is wrong.

    Only one that is reached per layer (it quantizes itself) qualifies, and one that needs a check on the card only if
    it passed.
    """
    for record in BACKENDS.values():
        right = (record.exact_fused_scales or not exact) and (record.serves_weight_only or not weight_only)
        checked = not record.needs_probe or facts.passed_probe(record.value)
        if not (record.quantizes_itself and right and checked):
            continue
        if verdict(record.value, facts, n=n, k=k, out_dtype=out_dtype).status == "ok":
            return record.value
    raise UnsupportedError("No backend of this package runs here: reinstall sglang-sm120.")
