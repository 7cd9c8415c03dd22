"""Make a failed call again: the steps of a child process, with random operands of the recorded sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_sm120 import reference
from sglang_sm120.probing.expert_operations import ExpertOperations
from sglang_sm120.probing.expert_steps import ExpertData
from sglang_sm120.probing.operations import Operations
from sglang_sm120.probing.record import Outcome
from sglang_sm120.probing.steps import DenseData, Step
from sglang_sm120.verification import failed_file, reproducer
from sglang_sm120.verification.call import Call
from sglang_sm120.verification.expert_call import ExpertCall
from sglang_sm120.verification.failed_file import DenseFacts, ExpertFacts, FailedCall
from sglang_sm120.verification.replay import REPEATS, compute, compute_experts, end_copies


def failed_again(case: FailedCall, outcome: Outcome) -> bool:
    """Whether a replay ended in an error of the call itself.

    A refusal counts if it is of the recorded type. Memory never does: a server tells that error as it is, and here the
    oracle needs some too.
    """
    refused = outcome.status == "unsupported" and f": {case.error}: " in outcome.reason
    crashed = outcome.status == "crash" and ": out of memory: " not in outcome.reason
    return (crashed or refused) and outcome.reason.startswith(_place(case))


def steps(operations: Operations, plan: dict[str, Any], device: torch.device) -> Iterator[Step]:
    """The steps of the child for a dense layer: random operands, then the products of the layer, several times."""
    case = _read(plan)
    calls: list[Call] = []
    yield _operands(case), lambda: calls.extend(_dense(case, device))
    for attempt in range(REPEATS):
        for part in calls:
            yield f"{_place(case)}, call {attempt + 1} of N={part.n}", partial(compute, part, operations)


def expert_steps(operations: ExpertOperations, plan: dict[str, Any], device: torch.device) -> Iterator[Step]:
    """The steps of the child for a layer of experts."""
    case = _read(plan)
    calls: list[ExpertCall] = []
    yield _operands(case), lambda: calls.extend(_experts(case, device))
    for attempt in range(REPEATS):
        for call in calls:
            yield f"{_place(case)}, call {attempt + 1}", partial(compute_experts, call, operations)


def _read(plan: dict[str, Any]) -> FailedCall:
    return failed_file.parse(reproducer.described(Path(plan["path"])))


def _place(case: FailedCall) -> str:
    return f"{case.call.operation} {case.call.text}"


def _operands(case: FailedCall) -> str:
    return f"random operands, seed {case.seed}"


def _dense(case: FailedCall, device: torch.device) -> Iterator[Call]:
    """The products of the layer, which share one input."""
    facts, data = case.call, DenseData(device, case.seed)
    assert isinstance(facts, DenseFacts)
    dtype: torch.dtype = getattr(torch, facts.dtype)
    x, scale = data.activation(facts.m, facts.k, dtype)
    for n in facts.widths:
        weight = data.weight(n, facts.k)
        alpha = weight.alpha if facts.one_alpha else weight.alphas
        bias = weight.bias.to(dtype) if facts.bias else None
        call = Call.linear(x, weight.packed, weight.scales, scale, alpha, bias)
        if facts.operation == "gemm":
            a, a_scale = reference.quantize(x, scale)
            call = Call.gemm(a, weight.packed, a_scale, weight.scales, alpha, bias, dtype)
        yield call.to(device)  # rows of the weight where kernels can read them
    end_copies(device)


def _experts(case: FailedCall, device: torch.device) -> Iterator[ExpertCall]:
    facts = case.call
    assert isinstance(facts, ExpertFacts)
    geometry = facts.experts, facts.local, facts.top_k, facts.hidden, facts.inner, facts.activation
    data = ExpertData(geometry, device, case.seed)
    layer = data.layer
    yield ExpertCall.of(
        *data.tokens(facts.m, getattr(torch, facts.dtype), data.random),
        layer.w13,
        layer.w2,
        activation=facts.activation,
        gate_first=facts.gate_first,
        first_expert=layer.first_expert,
        experts=facts.experts,
    )
    end_copies(device)
