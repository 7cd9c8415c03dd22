"""Probe everything that this machine may run, each subject in a child process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from sglang_sm120.backends import BACKENDS, verdict
from sglang_sm120.backends.moe_table import CALLABLE_RUNNERS, MOE_RUNNERS
from sglang_sm120.backends.record import QUANTIZER, HostFacts
from sglang_sm120.backends.verdict import judge
from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.probing import children
from sglang_sm120.probing.children import Job
from sglang_sm120.probing.expert_plan import expert_plan_for
from sglang_sm120.probing.plan import plan_for
from sglang_sm120.probing.record import FAILED, Outcome

RUNNER_FACTORY = "sglang_sm120.probing.expert_operations:of_runner"
EXPERT_STEPS = "sglang_sm120.probing.expert_steps:planned"
#: What a child can call; SGLang's own kernels live in a server only.
PROBEABLE = tuple(b.value for b in BACKENDS.values() if b.can_be_added and not b.per_call)
WHAT_CAN_BE_PROBED = (
    f"name one of {', '.join(dict.fromkeys((*PROBEABLE, *CALLABLE_RUNNERS)))}; SGLang's own kernels can be called by a "
    "server only"
)


def subjects(wanted: Sequence[str]) -> list[str]:
    """Return the quantizer and what is to be probed; everything that can be, if nothing is named.

    Raises:
        ConfigError: a name that cannot be probed.
    """
    for value in wanted:
        if value not in PROBEABLE:
            raise ConfigError(bad_value("BACKEND", value, WHAT_CAN_BE_PROBED))
    return [QUANTIZER, *(dict.fromkeys(wanted) or PROBEABLE)]


def runners(wanted: Sequence[str]) -> list[str]:
    """Return the MoE runners to probe among ``wanted``; all that a child can call, if nothing is named."""
    return [value for value in CALLABLE_RUNNERS if not wanted or value in wanted]


def probe_experts(
    names: Sequence[str],
    facts: HostFacts,
    timeout: float,
    *,
    run: Callable[[Job, float], Outcome] = children.run,
) -> Iterator[tuple[str, Outcome]]:
    """Judge each runner of NVFP4 experts and yield its name with the verdict; arguments as of :func:`probe`."""
    for name in names:
        judged = judge(MOE_RUNNERS[name], facts)
        if judged.status != "ok":
            yield name, Outcome("unsupported", judged.reason)
            continue
        device = "cpu" if facts.capability is None else "cuda"
        yield name, run(Job(name, expert_plan_for(facts, name), device, RUNNER_FACTORY, EXPERT_STEPS), timeout)


def probe(
    names: Sequence[str],
    facts: HostFacts,
    timeout: float,
    *,
    run: Callable[[Job, float], Outcome] = children.run,
) -> Iterator[tuple[str, Outcome]]:
    """Judge each subject, the quantizer first, and yield its name with the verdict.

    A FlashInfer backend is tried behind FlashInfer's quantizer only if that one passed: what the quantizer does must
    not be blamed on the product.

    Args:
        names: from :func:`subjects`.
        facts: of this machine.
        timeout: seconds for each child.
        run: runs a job; a process of its own unless a test says otherwise.
    """
    quantizer_right = True
    for name in names:
        outcome = _quantizer(facts, timeout, run) if name == QUANTIZER else None
        if outcome is None:
            outcome = _backend(name, facts, timeout, run, quantizer_right=quantizer_right)
        elif outcome.status in FAILED:
            quantizer_right = False
        yield name, outcome


def _quantizer(facts: HostFacts, timeout: float, run: Callable[[Job, float], Outcome]) -> Outcome:
    if facts.capability is None or facts.capability < (10, 0):
        return Outcome("unsupported", "FlashInfer's quantizer needs compute capability 10.0 or more; ours is used")
    if "flashinfer" not in facts.versions:
        return Outcome("unsupported", "FlashInfer is not installed; ours is used")
    return run(Job(QUANTIZER, plan_for(facts), "cuda"), timeout)


def _backend(
    name: str, facts: HostFacts, timeout: float, run: Callable[[Job, float], Outcome], *, quantizer_right: bool
) -> Outcome:
    record = BACKENDS[name]
    judged = verdict(name, facts)
    if judged.status != "ok":
        return Outcome("unsupported", judged.reason)
    plan = plan_for(facts, record)
    if record.flashinfer_name == "trtllm":
        return Outcome("unsupported", "its weights are shuffled for it alone; a probe does not do that")
    if record.flashinfer_name is not None and not quantizer_right:
        plan = replace(plan, burst=0)
    return run(Job(name, plan, "cpu" if facts.capability is None else "cuda"), timeout)
