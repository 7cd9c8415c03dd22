"""``--moe-runner-backend sm120_tuned`` in one process: which runner serves which number of tokens of a kind of experts.

The stand-in (``moe_choice.py``) keeps its weights in the layout that our kernels read, so the choice can be made for
each batch: ours, or SGLang's own method with the kernels of FlashInfer that it means.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from sglang_sm120 import native_moe, ops, self_test
from sglang_sm120.backends.moe_record import Quantization
from sglang_sm120.backends.moe_table import CALLED_RUNNERS, KERNEL_RUNNERS, MOE_RUNNERS
from sglang_sm120.backends.moe_verdict import moe_verdict, route_of
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.host import moe_choice, ranks
from sglang_sm120.host.moe_resolution import FLAG
from sglang_sm120.host.state import STATE
from sglang_sm120.host.tuning import retired_together
from sglang_sm120.probing.record import FAILED
from sglang_sm120.tuning import table
from sglang_sm120.tuning.expert_cases import ExpertKey, ExpertShape
from sglang_sm120.tuning.table import TuningTable, by_rows

logger = logging.getLogger("sglang_sm120")

VALUE = "sm120_tuned"
#: What stands in a plan for SGLang's own method.
SGLANG = None
#: The runner of a batch of M tokens; the last entry serves any larger M.
Plan = tuple[str | None, ...]


@dataclass
class ExpertTuning:
    """The state of ``sm120_tuned`` for experts in this process.

    Attributes:
        facts: of this machine.
        table: ``None`` if there is none for this card and these versions; then every layer is untuned.
        own: the runner of ours for batches that SGLang's kernels cannot take.
        retired: runners that are not used in this server, with the reason.
    """

    facts: HostFacts
    table: TuningTable | None
    own: str
    retired: dict[str, str] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)
    _plans: dict[tuple[ExpertKey, str, Quantization, bool], Plan] = field(default_factory=dict)

    def plan(self, shape: ExpertShape, dtype: str, kind: Quantization, *, gate_first: bool) -> Plan:
        """Return which runner serves which number of tokens; one log line says it for each kind of experts.

        Args:
            shape: of the layer, as its weights are prepared.
            dtype: of the activations, such as ``bfloat16``.
            kind: how the layer stores its experts; it decides what SGLang's own method runs.
            gate_first: order of the halves of w13; ``tune`` measures the other one.
        """
        key = shape.key, dtype, kind, gate_first
        if key not in self._plans:  # it has an entry for every M up to the largest measured one
            self._plans[key] = self._make_plan(shape, dtype, kind, gate_first=gate_first)
        return self._plans[key]

    def _make_plan(self, shape: ExpertShape, dtype: str, kind: Quantization, *, gate_first: bool) -> Plan:
        theirs = sglangs_kernels(kind, self.facts, expert_parallel=shape.local < shape.experts)
        theirs = None if theirs in self.retired else theirs
        usable = self._usable(kind, theirs)
        if gate_first and shape.activation == "silu":
            usable = {value for value in usable if value not in CALLED_RUNNERS or not ops.wants_up_first(value)}
        if moe_choice.RUNNERS.two_streams:
            usable = {value for value in usable if value not in CALLED_RUNNERS or not ops.wants_one_stream(value)}
        choices = self.table.runners_by_rows(shape.key, dtype, usable) if self.table is not None else {}
        if not choices:
            self._say(f"{VALUE} has no entry for {shape.label} {dtype}: {theirs or self.own} serves these experts.")
            return (SGLANG if theirs is not None else self.own,)
        plan: list[str | None] = [value if value in CALLED_RUNNERS else SGLANG for value in by_rows(choices)]
        beyond = ""
        if theirs is not None and theirs not in self._measured(shape, dtype) & usable:
            # Nobody measured where they win: the limit of the runner sm120 holds.
            plan = [*plan[: native_moe.MOST_TOKENS + 1], SGLANG]
            beyond = f"; it has no time for {theirs}, which takes batches of more than {len(plan) - 2} tokens"
        self._say(f"{shape.label} {dtype}: {table.spans(choices)}{beyond}")
        return tuple(plan)

    def _measured(self, shape: ExpertShape, dtype: str) -> set[str]:
        entries = self.table.experts.values() if self.table is not None else ()
        return {
            value
            for entry in entries
            if (entry.shape.key, entry.dtype) == (shape.key, dtype)
            for value in entry.timings
        }

    def _usable(self, kind: Quantization, theirs: str | None) -> set[str]:
        usable = set()
        for value in self.table.runners - self.retired.keys() if self.table is not None else ():
            judged = moe_verdict(value, kind, self.facts)
            runs = value == theirs or (value in CALLED_RUNNERS and judged is not None and judged.status == "ok")
            usable |= {value} if runs else set()
        return usable

    def _say(self, text: str) -> None:
        if text not in self._said and ranks.is_first():
            logger.info("%s", text)
        self._said.add(text)


def sglangs_kernels(kind: Quantization, facts: HostFacts, *, expert_parallel: bool) -> str | None:
    """Return the runner behind SGLang's own method under the stand-in, ``None`` if it does not run here."""
    value = moe_choice.stand_in(kind)
    route = route_of(value, kind, facts, expert_parallel=expert_parallel)
    judged = moe_verdict(value, kind, facts, expert_parallel=expert_parallel)
    return route.runner if route is not None and judged is not None and judged.status == "ok" else None


def start(device: torch.device) -> ExpertTuning:
    """Load the runners of ours that may serve, check them, and agree with the other ranks; once.

    Raises:
        ConfigError: the table that a variable names cannot be used, or nothing was decided in this process yet.
        SelfTestError: kernels of ours are wrong on this device.
        UnsupportedError: not even the runner for experts without an entry can be loaded.
    """
    if device not in _STARTED:
        _STARTED[device] = _start(device)
    return _STARTED[device]


_STARTED: dict[torch.device, ExpertTuning] = {}


def forget() -> None:
    """Drop what was found; for a process that makes its decision anew."""
    _STARTED.clear()


def _start(device: torch.device) -> ExpertTuning:
    facts = STATE.facts
    if facts is None:
        raise ConfigError(f"{FLAG} {VALUE} was asked for experts before the scheduler had started. Report this.")
    found, problem = STATE.tuning_table()
    retired: dict[str, str] = {}
    for value in sorted(found.runners if found is not None else ()):
        probed = facts.probed_experts.get(value)
        if probed in FAILED:
            retired[value] = f"probe says {probed} of its experts"
        elif value in CALLED_RUNNERS:
            _load(value, device, retired)
    own = _own(facts, retired)
    if found is None or own not in found.runners:
        _load(own, device, retired)
    retired = retired_together(retired)
    own = _own_of_all_ranks(facts, retired)
    if problem and ranks.is_first():
        logger.warning("%s Until then SGLang's own kernels serve experts where they run here, else %s.", problem, own)
    for value, reason in retired.items():
        if ranks.is_first():
            logger.warning("%s is not used by %s %s in this server: %s", value, FLAG, VALUE, reason)
    if own in retired:
        raise UnsupportedError(f"{FLAG} {VALUE} has no runner to fall back to: {own}: {retired[own]}")
    return ExpertTuning(facts, found, own, retired)


def _own_of_all_ranks(facts: HostFacts, retired: dict[str, str]) -> str:
    """The kernels that passed their probe on every rank: a record that one node lacks counts for none."""
    told: list[str] = ranks.gather(_own(facts, retired))
    return max(told, key=KERNEL_RUNNERS.index)


def _own(facts: HostFacts, retired: dict[str, str]) -> str:
    """Kernels of ours only after they passed a probe on this card, else the oracle."""
    for value in KERNEL_RUNNERS:
        judged = moe_verdict(value, "modelopt_fp4", facts)
        checked = not MOE_RUNNERS[value].needs_probe or facts.probed_experts.get(value) == "ok"
        if checked and value not in retired and judged is not None and judged.status == "ok":
            return value
    return KERNEL_RUNNERS[-1]


def _load(value: str, device: torch.device, retired: dict[str, str]) -> None:
    try:
        ops.start_moe(value, device)
        self_test.run_moe(value, device)
    except UnsupportedError as error:
        retired[value] = str(error)
