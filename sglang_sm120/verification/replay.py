"""Run the call of a file alone, in a child process, with the backend it came from or another one.

The file is about a wrong call and has its operands (``reproducer.py``), or about a failed one and has none
(``failed_file.py``); of the latter the steps are in ``failed_replay.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_sm120.backends import BACKENDS, verdict
from sglang_sm120.backends.moe_table import CALLABLE_RUNNERS, MOE_RUNNERS
from sglang_sm120.backends.record import QUANTIZER, HostFacts, Verdict
from sglang_sm120.backends.verdict import judge as judge_record
from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.probing import children
from sglang_sm120.probing.child import WrongResult
from sglang_sm120.probing.children import PRODUCTION_FACTORY, Job
from sglang_sm120.probing.expert_operations import ExpertOperations
from sglang_sm120.probing.operations import Operations
from sglang_sm120.probing.record import Outcome
from sglang_sm120.probing.run import PROBEABLE, RUNNER_FACTORY
from sglang_sm120.probing.steps import Step
from sglang_sm120.verification import failed_file, reproducer
from sglang_sm120.verification.call import Call
from sglang_sm120.verification.expert_call import ExpertCall
from sglang_sm120.verification.expert_judge import judge_experts
from sglang_sm120.verification.failed_file import DenseFacts, ExpertFacts, FailedCall
from sglang_sm120.verification.judge import judge
from sglang_sm120.verification.reproducer import Reproducer
from sglang_sm120.verification.served import spelled

_STEPS = "sglang_sm120.verification.replay:steps"
_EXPERT_STEPS = "sglang_sm120.verification.replay:expert_steps"
_FAILED_STEPS = "sglang_sm120.verification.failed_replay:steps"
_FAILED_EXPERT_STEPS = "sglang_sm120.verification.failed_replay:expert_steps"
#: An error may show only in some of several calls: a race, memory that was not written.
REPEATS = 3


@dataclass(frozen=True)
class _File:
    """What the child has to know."""

    path: Path

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path)}


def read(path: Path) -> Reproducer | FailedCall:
    """Read a case of either kind.

    Raises:
        RecordError: the files are not what a server writes.
    """
    fields = reproducer.described(path)
    if fields.text("kind", (reproducer.KIND, failed_file.KIND)) == failed_file.KIND:
        return failed_file.parse(fields)
    return reproducer.read(path)


def run(path: Path, backend: str | None, facts: HostFacts, timeout: float, *, factory: str | None = None) -> Outcome:
    """Run a case alone and judge it.

    Args:
        path: of the case; either of its files if it has two.
        backend: a value of the table, for experts a runner, or ``quantizer``; the recorded one if ``None``.
        facts: of this machine.
        timeout: seconds for the child, compilation included.
        factory: what makes the operations of the backend in the child, if not the one of a probe; tests plant faults
            through it.

    Raises:
        RecordError: the files are not what a server writes.
        ConfigError: no process but a server can call the backend.
    """
    case = read(path)
    call, name, failed = case.call, backend or case.backend, isinstance(case, FailedCall)
    experts = isinstance(call, (ExpertCall, ExpertFacts))
    known = CALLABLE_RUNNERS if experts else (QUANTIZER, *PROBEABLE)
    if name not in known:
        remedy = f"name one of {', '.join(known)}; SGLang's own kernels can be called by a server only"
        raise ConfigError(bad_value("--backend", name, remedy))
    refusal = _refusal(name, call, facts)
    if refusal is not None:
        return Outcome("unsupported", refusal.reason)
    if experts:
        usual, steps_of = RUNNER_FACTORY, _FAILED_EXPERT_STEPS if failed else _EXPERT_STEPS
    else:
        usual, steps_of = PRODUCTION_FACTORY, _FAILED_STEPS if failed else _STEPS
    device = "cpu" if facts.capability is None else "cuda"
    return children.run(Job(name, _File(path.resolve()), device, factory or usual, steps_of), timeout)


def _refusal(name: str, call: Call | ExpertCall | DenseFacts | ExpertFacts, facts: HostFacts) -> Verdict | None:
    """What the table says against running a call here; ``None`` if nothing."""
    if isinstance(call, (ExpertCall, ExpertFacts)):
        judged = [judge_record(MOE_RUNNERS[name], facts)]
    elif name not in BACKENDS:
        return None
    elif isinstance(call, DenseFacts):
        judged = [verdict(name, facts, n=n, k=call.k) for n in call.widths]
    else:
        judged = [verdict(name, facts, n=call.n or None, k=call.k)]
    return next((one for one in judged if one.status != "ok"), None)


def steps(operations: Operations, plan: dict[str, Any], device: torch.device) -> Iterator[Step]:
    """The steps of the child: the call, several times, its quantizer by itself where the backend has two operations."""
    call = reproducer.read(Path(plan["path"])).call.to(device)
    assert isinstance(call, Call)
    end_copies(device)
    calls = [call]
    if call.operation == "linear" and operations.linear is None:
        calls.insert(0, Call.quantize(call.operands["x"], call.operands["activation_scale"]))
    for attempt in range(REPEATS):
        for part in calls:
            place = f"{part.operation} M={part.m} N={part.n} K={part.k}, call {attempt + 1}"
            yield place, partial(compute, part, operations)


def expert_steps(operations: ExpertOperations, plan: dict[str, Any], device: torch.device) -> Iterator[Step]:
    """The steps of the child for a call of experts: the call, several times."""
    call = reproducer.read(Path(plan["path"])).call.to(device)
    assert isinstance(call, ExpertCall)
    end_copies(device)
    for attempt in range(REPEATS):
        yield f"moe M={call.m} {spelled(call.sizes)}, call {attempt + 1}", partial(compute_experts, call, operations)


def end_copies(device: torch.device) -> None:
    """Wait for operands that were copied to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()  # kernels may read weights before the copies in front of them have ended


def compute_experts(call: ExpertCall, operations: ExpertOperations) -> str:
    """:func:`compute` for a call of experts."""
    with operations.warm_up():
        out = call.run(operations)
    judgement = judge_experts(call, out, rounds_between=operations.rounds_between)
    if judgement.wrong:
        raise WrongResult(judgement.text)
    return judgement.text


def compute(call: Call, operations: Operations) -> str:
    """Let a backend make a call, and return what the oracle says.

    Raises:
        WrongResult: the result is wrong.
    """
    made, results = call.run(operations)
    judgement = judge(made, results, operations.quantize)
    if judgement.wrong:
        raise WrongResult(judgement.text)
    return judgement.text
