"""Where our operators stand in for SGLang's. Pure: needs neither torch nor SGLang, so that ``doctor`` can ask it."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.operator_table import OPERATORS, has_no_kernels_here, how_it_is_known, provider_of
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.dispatch import Decision, substitute


def stand_in(decision: Decision | None, facts: HostFacts | None) -> str | None:
    """Return the backend of ours that implements the operators in this process, ``None`` where SGLang's own count.

    Ours count where this package serves (an SM12x card, or a value of ours was named) and SGLang's own have no code
    for the card. The backend is the chosen one where it quantizes itself, else what quantizes for a foreign GEMM:
    a checked one, or ``torch_reference``.
    """
    if decision is None or facts is None or decision.backend is None or has_no_kernels_here(facts) is None:
        return None
    chosen = BACKENDS.get(decision.backend)
    if chosen is not None and chosen.quantizes_itself:
        return chosen.value
    return substitute(facts, exact=False)


def implementations(decision: Decision | None, facts: HostFacts) -> dict[str, str]:
    """Say for every operator that the installed SGLang has which code implements it in a server started now.

    Returns:
        Operator name to text; empty for a SGLang without such operators.
    """
    provider = provider_of(facts)
    if provider is None:
        return {}
    reason, ours = has_no_kernels_here(facts), stand_in(decision, facts)
    if ours is not None:
        text = f"{ours} of this package ({provider.value} {reason})"
    elif reason is not None:
        text = f"none that runs here: {provider.value} {reason}"
    else:
        text = f"{provider.value}, SGLang's own"
    known = how_it_is_known(facts)
    text += f"; {known}" if known else ""
    release = _release(facts)
    return {operator.name: text for operator in OPERATORS if release >= Version(operator.since)}


def _release(facts: HostFacts) -> Version:
    try:
        return Version(facts.versions.get("sglang", ""))
    except InvalidVersion:
        return Version("0")
