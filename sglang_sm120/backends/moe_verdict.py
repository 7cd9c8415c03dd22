"""Can a MoE runner serve NVFP4 experts here, and which one should? Pure functions from facts to a verdict."""

from __future__ import annotations

from dataclasses import replace

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sglang_sm120.backends.moe_record import Quantization, Recommendation, Route
from sglang_sm120.backends.moe_table import MOE_AUTO, MOE_RUNNERS, ROUTES
from sglang_sm120.backends.operator_table import has_no_kernels_here
from sglang_sm120.backends.record import CAPABILITIES, HostFacts, Verdict
from sglang_sm120.backends.verdict import holds, judge

AUTO = "auto"

#: The runner whose kernels are SGLang's own operators (``operator_table.py``).
_CALLS_OPERATORS = "cutlass"

#: Stands for a release that cannot be told.
_NEWEST = Version("999")


def route_of(
    value: str, quantization: Quantization, facts: HostFacts, *, expert_parallel: bool = False
) -> Route | None:
    """Return what the installed SGLang runs for a value, ``None`` if the table does not know.

    A SGLang whose version cannot be told counts as the newest one.
    """
    release = _release(facts)
    for route in ROUTES:
        named = route.values is None or value in route.values
        if route.expert_parallel and not expert_parallel:
            continue
        if quantization in route.quantizations and named and SpecifierSet(route.releases).contains(release):
            return route
    return None


def moe_verdict(
    value: str, quantization: Quantization, facts: HostFacts, *, expert_parallel: bool = False
) -> Verdict | None:
    """Judge ``--moe-runner-backend VALUE`` for one kind of experts.

    Args:
        value: any value of SGLang's list, ``auto`` included.
        quantization: how the experts are stored.
        facts: the machine and the installed packages; ``facts.versions["sglang"]`` is the release.
        expert_parallel: whether a rank holds a part of the experts.

    Returns:
        The verdict of the runner that SGLang really takes, under the name ``value``; ``None`` if the table has no
        facts about it (a value of another plugin, say), which is no objection.
    """
    route = route_of(value, quantization, facts, expert_parallel=expert_parallel)
    if route is None:
        return None
    if route.runner is None:
        return Verdict(value, "unsupported", route.effect, "", route.source)
    judged = _judge(route.runner, facts)
    # "take another value" is what the callers of this function say better: they name one.
    remedy = "" if judged.remedy.startswith("take ") else judged.remedy
    reason = judged.reason
    if route.runner != value:
        what = "runs here" if judged.status == "ok" else reason
        reason = f"{_release_name(facts)} serves these experts with {route.runner}, which {what}"
    warnings = (*judged.warnings, *_failed_probe(route.runner, facts))
    return replace(judged, backend=value, reason=reason, remedy=remedy, warnings=warnings)


def recommend_moe_runner(
    facts: HostFacts, quantization: Quantization, *, expert_parallel: bool = False
) -> Recommendation | None:
    """Return the runner to start with on SM12x: what ``auto`` should end in.

    Args:
        facts: capability and installed versions; ``facts.versions["sglang"]`` is the release.
        quantization: how the experts are stored.
        expert_parallel: whether a rank holds a part of the experts.

    Returns:
        The first entry of ``MOE_AUTO`` that runs here; ``None`` if there is none, or if this is no SM12x card that
        the table knows.
    """
    if not is_ours_to_judge(facts):
        return None
    for preference in MOE_AUTO.get(quantization, ()):
        route = route_of(preference.value, quantization, facts, expert_parallel=expert_parallel)
        judged = moe_verdict(preference.value, quantization, facts, expert_parallel=expert_parallel)
        if route is None or route.runner is None or judged is None or judged.status != "ok":
            continue
        if all(holds(bound, facts) for bound in preference.when):
            return Recommendation(preference.value, route.runner, preference.reason, preference.source, judged)
    return None


def working_runners(quantization: Quantization, facts: HostFacts) -> list[str]:
    """Return the values that serve these experts here with the kernels they name, in the table's order."""
    found = []
    for value, record in MOE_RUNNERS.items():
        route, judged = route_of(value, quantization, facts), moe_verdict(value, quantization, facts)
        serves_itself = route is not None and route.runner == value
        exists = record.native_since is not None and _release(facts) >= Version(record.native_since)
        if serves_itself and exists and judged is not None and judged.status == "ok":
            found.append(value)
    return found


def is_ours_to_judge(facts: HostFacts) -> bool:
    """Whether the card is an SM12x that the table has rows for; on every other card SGLang is left alone."""
    return facts.is_sm12x and facts.capability in CAPABILITIES


def _judge(runner: str, facts: HostFacts) -> Verdict:
    """Judge a runner by its record; the one that calls SGLang's own operators also by what was installed for them."""
    judged = judge(MOE_RUNNERS[runner], facts)
    missing = has_no_kernels_here(facts) if runner == _CALLS_OPERATORS and judged.status == "ok" else None
    if missing is None:
        return judged
    # Callers name another value, or say that there is none.
    return replace(judged, status="unsupported", reason=f"needs SGLang's own operators, whose code {missing}")


def _failed_probe(runner: str, facts: HostFacts) -> tuple[str, ...]:
    """Warn of a runner that was tried on this card and did not pass; as with dense values, a name given counts more."""
    status = facts.probed_experts.get(runner, "ok")
    if status in ("ok", "unsupported"):
        return ()
    return (f"{runner} failed sglang-sm120 probe of experts on this card ({status}); take another runner.",)


def _release(facts: HostFacts) -> Version:
    try:
        return Version(Version(facts.versions.get("sglang", "")).base_version)
    except InvalidVersion:
        return _NEWEST


def _release_name(facts: HostFacts) -> str:
    release = _release(facts)
    return "the newest SGLang" if release == _NEWEST else f"SGLang {release}"
