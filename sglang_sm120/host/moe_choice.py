"""A MoE runner of ours: taken from the arguments, carried to the scheduler, found again when a layer is made.

SGLang asks its ``MoeRunnerBackend`` in dozens of places which runner it has, to lay out weights and to number experts.
A new member would answer no to all of them, so there is none: the value that was named is replaced by the one whose
weights our kernels read (the *stand-in*), and what was named is remembered here.

The arguments are resolved in the process that was started, the layers are made in its children. An environment variable
carries the names there: children inherit it, whatever SGLang does with its arguments on the way.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection
from dataclasses import dataclass

from sglang_sm120.backends import moe_table
from sglang_sm120.backends.moe_record import Quantization

RUNNER, DRAFT_RUNNER = "moe_runner_backend", "speculative_moe_runner_backend"

#: Values of our table that SGLang itself has: those are its own.
_SGLANGS: set[str] = set()

#: Not one of the user's variables (``env.py``): written and read by this module alone.
CARRIER = "_SGLANG_SM120_MOE_RUNNERS"
_STAND_INS = ("flashinfer_cutlass", "auto")
#: Id of the process that wrote the variable last, as far as this one knows; a child's copy is not its own.
_WRITER: dict[str, int] = {}


@dataclass
class Runners:
    """What the scheduler of this process starts with; written before its model is made.

    Attributes:
        target, draft: SGLang's values for the target and for the draft model.
        own_target, own_draft: values of ours that these stand for.
        quantization: how the target stores its experts.
        making_draft: whether SGLang is about to make the draft model.
        two_streams: whether prefill and decode run at the same time (``--enable-pdmux``).
    """

    target: str | None = None
    draft: str | None = None
    quantization: Quantization | None = None
    own_target: str | None = None
    own_draft: str | None = None
    making_draft: bool = False
    two_streams: bool = False

    @property
    def own(self) -> str | None:
        """The runner of ours for the model that is being made."""
        return self.own_draft if self.making_draft else self.own_target

    @property
    def target_as_named(self) -> str | None:
        return self.own_target or self.target

    @property
    def draft_as_named(self) -> str | None:
        return self.own_draft or self.draft


RUNNERS = Runners()


def leave_to_sglang(values: Collection[str]) -> None:
    """Say which values of our table the installed SGLang serves itself, as a later release may; all others are ours."""
    _SGLANGS.clear()
    _SGLANGS.update(values)


def is_ours(value: str | None) -> bool:
    """Whether a value of ``--moe-runner-backend`` is one that SGLang has from us."""
    return value in moe_table.OUR_RUNNERS and value not in _SGLANGS


def is_sglangs(value: str | None) -> bool:
    """Whether SGLang serves a value of our table itself: nothing that the table says of ours holds for it."""
    return value in _SGLANGS


def stand_in(quantization: str | None) -> str:
    """Return SGLang's value whose weights our runners read, for how the experts are stored.

    The compressed-tensors scheme prepares the same weights whatever the value is, and SGLang refuses
    ``flashinfer_cutlass`` where that quantization is on the command line. Experts that are no NVFP4 at all keep
    SGLang's own choice.
    """
    return "flashinfer_cutlass" if quantization in ("modelopt_fp4", "modelopt_mixed") else "auto"


def replace(target: str, draft: str | None, quantization: str | None) -> dict[str, str]:
    """Remember which runners of ours were named, and say what SGLang is to read instead.

    Args:
        target: value of ``--moe-runner-backend``.
        draft: value of ``--speculative-moe-runner-backend``; ``None`` inherits the target's, ours included.
        quantization: how the target stores its experts, ``None`` if unknown.

    Returns:
        Fields of SGLang's arguments with their new values; empty if nothing of ours was named.
    """
    own_target = target if is_ours(target) else ""
    own_draft = own_target if draft is None else draft if is_ours(draft) else ""
    if own_target or own_draft:
        os.environ[CARRIER] = f"{own_target},{own_draft}"
        _WRITER[CARRIER] = os.getpid()
    elif multiprocessing.parent_process() is None or _WRITER.get(CARRIER) == os.getpid():
        os.environ.pop(CARRIER, None)  # of an engine that this process started before
    fields = {RUNNER: own_target, DRAFT_RUNNER: draft if is_ours(draft) else ""}
    return {name: stand_in(quantization) for name, value in fields.items() if value}


def named() -> tuple[str, str]:
    """Return the runners of ours that target and draft were given, each empty if it was none."""
    own_target, _, own_draft = os.environ.get(CARRIER, "").partition(",")
    return own_target, own_draft


def note(target: str, draft: str, quantization: Quantization | None) -> None:
    """Remember what the scheduler starts with."""
    own_target, own_draft = named()
    RUNNERS.target, RUNNERS.draft, RUNNERS.quantization = target, draft, quantization
    # SGLang overrides a runner for some models, and says so; what is not the stand-in is not ours any more.
    RUNNERS.own_target = own_target if own_target and target in _STAND_INS else None
    RUNNERS.own_draft = own_draft if own_draft and draft in _STAND_INS else None
