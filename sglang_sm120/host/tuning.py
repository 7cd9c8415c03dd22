"""``sm120_tuned`` in one process: its tuning table, what may be used of it, and the plans of layers as they load.

All tensor-parallel ranks decide the same: they have one table (``agreement.py``), and whatever one of them cannot use,
none uses.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from sglang_sm120 import ops, self_test
from sglang_sm120.backends import BACKENDS, verdict
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.dispatch import Decision, untuned
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.host import ranks
from sglang_sm120.probing.record import FAILED
from sglang_sm120.tuning import backend, table
from sglang_sm120.tuning.cases import padded
from sglang_sm120.tuning.first_calls import first_calls
from sglang_sm120.tuning.table import TuningTable

logger = logging.getLogger("sglang_sm120")

VALUE = "sm120_tuned"


@dataclass
class Tuning:
    """The state of ``sm120_tuned`` in this process.

    Attributes:
        facts: of this machine.
        table: ``None`` if there is none for this card and these versions; then every layer is untuned.
        problem: why there is none.
        untuned: serves the layers that the table says nothing about.
        retired: values that are not used in this server, with the reason.
    """

    facts: HostFacts
    table: TuningTable | None
    problem: str
    untuned: Decision
    retired: dict[str, str] = field(default_factory=dict)
    _agreed: bool = False
    _unplanned: set[backend.Key] = field(default_factory=set)

    @property
    def flashinfer_name(self) -> str:
        """What FlashInfer calls the backend of the layers that go SGLang's own way."""
        value = self.untuned.backend
        assert value is not None
        return BACKENDS[value].flashinfer_name or value

    @property
    def reason(self) -> str:
        """For the log of the start."""
        if self.table is None:
            return f"no tuning table, every layer is served by {self.untuned.backend}"
        return f"tuning table of {self.table.created}, {len(self.table.shapes)} shapes, else {self.untuned.backend}"

    def agree(self) -> None:
        """Retire on each rank, once, what another one cannot use."""
        if self._agreed:
            return
        self._agreed = True
        self._retire(retired_together(self.retired))

    def plan_layer(
        self, name: str, sizes: list[int], k: int, dtype: torch.dtype, *, one_alpha: bool, quantizer: str | None,
        device: torch.device,
    ) -> bool:  # fmt: skip
        """Make what is needed to serve a layer by the table; return whether it can be.

        Args:
            name: of the layer.
            sizes: N of each call that the layer makes.
            k: input features.
            dtype: of activations and result.
            one_alpha: all columns of a call share one global scale; else only exact backends are right.
            quantizer: the backend of ours that quantizes for FlashInfer's kernels, ``None`` for FlashInfer's own.
            device: where the weights lie.
        """
        keys: list[backend.Key] = [(n, k, dtype, one_alpha) for n in dict.fromkeys(sizes)]
        return all(self._has_plan(name, key, quantizer, device) for key in keys)

    def _has_plan(self, name: str, key: backend.Key, quantizer: str | None, device: torch.device) -> bool:
        known = backend.plan_of(key)
        if known is not None and name not in known.layers:
            known.layers.append(name)
        if known is not None or self.table is None or key in self._unplanned:
            return known is not None
        n, k, dtype, one_alpha = key
        type_name = str(dtype).removeprefix("torch.")
        usable = {
            value for value in self.table.backends if self._may_serve(value, n, k, type_name, exact=not one_alpha)
        }
        while choices := self.table.choices(padded(n), padded(k), type_name, usable):
            plan = backend.make_plan(choices, quantizer, self.facts)
            plan.layers.append(name)
            told = ranks.gather(first_calls(plan, key, device))
            refused = {value: reason for theirs in told for value, reason in theirs.items()}
            if not refused:
                backend.add_plan(key, plan)
                _log(logging.INFO, "%s", describe(key, choices))
                return True
            usable -= refused.keys()
            for value, reason in refused.items():
                _log(logging.WARNING, "%s does not serve N=%d K=%d %s: %s", value, n, k, type_name, reason)
        self._unplanned.add(key)
        _log(logging.INFO, "%s has no entry for N=%d K=%d %s: what auto takes serves it.", VALUE, n, k, type_name)
        return False

    def _may_serve(self, value: str, n: int, k: int, dtype: str, *, exact: bool) -> bool:
        if value in self.retired or (exact and not BACKENDS[value].exact_fused_scales):
            return False
        return verdict(value, self.facts, n=n, k=k, out_dtype=dtype).status == "ok"

    def _retire(self, reasons: dict[str, str]) -> None:
        for value, reason in reasons.items():
            _log(logging.WARNING, "%s is not used by %s in this server: %s", value, VALUE, reason)
        self.retired.update(reasons)


def retired_together(retired: dict[str, str]) -> dict[str, str]:
    """Return what any of the tensor-parallel ranks cannot use, with the reason.

    Args:
        retired: what this rank cannot use. All ranks have the same table (``agreement.py``).
    """
    return {value: reason for theirs in ranks.gather(retired) for value, reason in theirs.items()}


def start(facts: HostFacts, device: torch.device, *, allow_unsafe: bool) -> Tuning:
    """Find the table, load the code of ours that it names, and check it.

    Plans of an earlier decision of this process, which may have had another table, are dropped.

    Raises:
        ConfigError: the table that a variable names cannot be used.
        UnsupportedError: the backend for layers without an entry cannot be loaded.
        SelfTestError: code of ours is wrong on this device.
    """
    backend.forget_plans()
    found, problem = table.find(facts)
    tuning = Tuning(facts, found, problem, untuned(facts, allow_unsafe=allow_unsafe))
    for value in sorted(found.backends if found is not None else ()):
        judged, probed = verdict(value, facts), facts.probed.get(value)
        if judged.status != "ok" or probed in FAILED:
            tuning.retired[value] = judged.reason if judged.status != "ok" else f"probe says {probed}"
        elif BACKENDS[value].implementation is not None:
            try:
                ops.start(value, device)
            except UnsupportedError as error:
                tuning.retired[value] = str(error)
            else:
                self_test.run(value, device)
    fallback = tuning.untuned.backend
    if fallback is not None and BACKENDS[fallback].implementation is not None:
        ops.start(fallback, device)
        self_test.run(fallback, device)
    return tuning


def describe(key: backend.Key, choices: dict[int, str]) -> str:
    """Say which M of a kind of layer goes where, and whether a token's result depends on M therefore."""
    n, k, dtype, one_alpha = key
    exactly = "" if one_alpha else ", shards of different scales"
    return f"N={n} K={k} {str(dtype).removeprefix('torch.')}{exactly}: {table.spans(choices)}"


def _log(level: int, text: str, *values: object) -> None:
    logger.log(level if ranks.is_first() else logging.DEBUG, text, *values)
