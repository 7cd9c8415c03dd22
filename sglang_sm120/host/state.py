"""What this process decided: one decision, made once before weights load, read by every seam."""

from __future__ import annotations

import logging

from sglang_sm120.backends.record import Backend, HostFacts
from sglang_sm120.dispatch import Decision
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.host.tuning import Tuning
from sglang_sm120.sgl_kernel_ops.choice import stand_in
from sglang_sm120.tuning import table
from sglang_sm120.tuning.table import TuningTable

logger = logging.getLogger("sglang_sm120")


class ServingState:
    """The decision of this process and the facts it was made from.

    ``decision`` is ``None`` until SGLang initialises its FP4 configuration; the seams then behave as if the
    package were not installed. ``quantizer`` names the backend of ours that quantizes activations for a foreign GEMM
    where FlashInfer's quantizer cannot, ``quantizer_rejected`` whether ``probe`` found that one wrong here.
    ``operators`` names the backend of ours that implements SGLang's own NVFP4 operators; it is decided here and not per
    call, because ``torch.compile`` may trace the callers. ``tuning`` is what ``sm120_tuned`` goes by, ``None`` under
    any other value.
    """

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self.facts: HostFacts | None = None
        self.backend: Backend | None = None
        self.refusal: UnsupportedError | None = None
        self.tuning: Tuning | None = None
        self._table: tuple[TuningTable | None, str] | None = None
        self.quantizer_rejected = False
        self.quantizer = "torch_reference"
        self.dummy_weights = False
        self.operators: str | None = None
        self._warned: set[str] = set()

    def decide(
        self, decision: Decision, facts: HostFacts, backend: Backend | None, tuning: Tuning | None = None
    ) -> None:
        self.decision, self.facts, self.backend, self.refusal = decision, facts, backend, None
        self.tuning, self._table = tuning, None
        self.operators = stand_in(decision, facts)

    def refuse(self, refusal: UnsupportedError, facts: HostFacts) -> None:
        """Keep a refusal for the first NVFP4 layer; a model without one is none of our business."""
        self.decision, self.facts, self.backend, self.refusal = None, facts, None, refusal
        self.tuning = self._table = None
        self.operators = None

    def tuning_table(self) -> tuple[TuningTable | None, str]:
        """Return the table of this server, for dense layers and experts, or why there is none.

        Read once for each decision: the table that the ranks compare is the one that they use.

        Raises:
            ConfigError: nothing was decided yet, or the table that a variable names cannot be used.
        """
        if self.tuning is not None:
            return self.tuning.table, self.tuning.problem
        if self.facts is None:
            raise ConfigError("The tuning table was asked for before the scheduler had started. Report this.")
        if self._table is None:
            self._table = table.find(self.facts)
        return self._table

    @property
    def chosen(self) -> str | None:
        """Name of the backend that we chose or accepted; ``None`` while everything is left to SGLang."""
        return self.decision.backend if self.decision is not None else None

    @property
    def quantizing_backend(self) -> str:
        """The backend of ours that quantizes activations where ours is to: the chosen one, or its substitute."""
        return self.backend.value if self.backend is not None and self.backend.quantizes_itself else self.quantizer

    @property
    def replaces_quantizer(self) -> bool:
        """Whether ours quantizes although there is another one.

        The backend is ours, ``probe`` found the other one wrong on this card, or the card is below compute capability
        10.0, where FlashInfer's does not run.
        """
        if self.quantizer_rejected or (self.backend is not None and self.backend.quantizes_itself):
            return True
        return self.facts is not None and (self.facts.capability is None or self.facts.capability < (10, 0))

    @property
    def quantizer_of_ours(self) -> str | None:
        """The backend of ours that quantizes for FlashInfer's kernels, ``None`` where FlashInfer's quantizer does."""
        return self.quantizing_backend if self.replaces_quantizer else None

    @property
    def repacks_weights(self) -> bool:
        """Whether SGLang repacks weights for a weight-only kernel, which uses no input scales."""
        return self.chosen == "marlin"

    def warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


STATE = ServingState()
