"""Before weights load: settings that must be the same on every rank of a server, and are read on each node."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from sglang_sm120 import __version__, env
from sglang_sm120.dispatch import FLAG
from sglang_sm120.errors import ConfigError
from sglang_sm120.host import moe_choice, moe_resolution, ranks, tuning
from sglang_sm120.host.patching import Patcher, mark
from sglang_sm120.host.state import STATE

SEAM = "ranks"
_PACKAGE = "sglang-sm120"
_TABLE = "tuning table"
_SAME_KERNELS = (
    "Ranks with different kernels compute the same layer with different bits. Name the value on the command line and "
    f"set no {env.FP4_GEMM_BACKEND}; where it is named already, run sglang-sm120 probe on every node, with equal cards "
    "and versions."
)
#: What to do where the ranks differ in a setting.
_REMEDIES = {
    _PACKAGE: "Install the same wheel on every node.",
    env.VERIFY: f"Set {env.VERIFY} to the same number on every node, or on none: a step that one rank runs without its "
    "CUDA graph must have none on the others.",
    _TABLE: f"{tuning.VALUE} needs one table, so cards and versions must be equal. Copy one file of "
    f"sglang-sm120 tune --output to every node and name it in {env.TUNING_TABLE}, or take another value.",
    FLAG: _SAME_KERNELS,
    moe_resolution.FLAG: _SAME_KERNELS,
}


def wrap_load_model(module: ModuleType, patcher: Patcher) -> None:
    """Compare in front of the first thing that a model runner loads."""
    cls = module.ModelRunner
    inner = cls.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        compare()
        return inner(self, *args, **kwargs)

    patcher.set(cls, "load_model", mark(SEAM, load_model, inner))


def compare() -> None:
    """Tell the other ranks this one's settings; wait for theirs only if one of the settings is in use here.

    A draft model's runner comes here too, and finds the same answers.

    Raises:
        ConfigError: the settings differ, a rank does not answer, or the named table cannot be used.
    """
    settings = _settings()
    users = [env.VERIFY] if env.verify_every() else []
    users += [f"{FLAG} {tuning.VALUE}"] if STATE.tuning is not None else []
    users += [f"{moe_resolution.FLAG} {tuning.VALUE}"] if _tunes_experts() else []
    users += _kernels_of_ours()
    if not users:
        ranks.tell("settings", settings)
        return
    told = ranks.hear("settings", settings, needed_by=" and ".join(users))
    problems = [_difference(name, [theirs.get(name, "not told") for theirs in told]) for name in settings]
    if any(problems):
        raise ConfigError("The ranks of this server do not agree. " + " ".join(filter(None, problems)))


def _settings() -> dict[str, str]:
    experts = {"": moe_choice.RUNNERS.own_target, "of the draft ": moe_choice.RUNNERS.own_draft}
    return {
        _PACKAGE: __version__,
        env.VERIFY: str(env.verify_every()),
        _TABLE: _table(),
        FLAG: _dense(),
        moe_resolution.FLAG: ", ".join(f"{whose}{own or 'left to SGLang'}" for whose, own in experts.items()),
    }


def _dense() -> str:
    """What multiplies dense layers, and in the releases that call SGLang's own operators, whose those are."""
    if STATE.refusal is not None:
        return "refused (the log of that rank says why)"
    parts = [STATE.chosen or "left to SGLang"]
    parts += [f"{STATE.tuning.untuned.backend} without a table entry"] if STATE.tuning is not None else []
    parts += [f"SGLang's operators by {STATE.operators}"] if STATE.operators is not None else []
    return ", ".join(parts)


def _kernels_of_ours() -> list[str]:
    """Who needs the same kernels on every rank: what this package multiplies with.

    Only these are chosen by a probe record, or named by a variable that another node may not have.
    """
    ours = STATE.backend is not None and STATE.backend.implementation is not None
    users = [f"{FLAG} {STATE.chosen}"] if ours else []
    users += [f"{STATE.operators} in place of SGLang's operators"] if STATE.operators is not None else []
    runners = {moe_choice.RUNNERS.own_target, moe_choice.RUNNERS.own_draft} - {None, tuning.VALUE}
    return users + [f"{moe_resolution.FLAG} {runner}" for runner in sorted(filter(None, runners))]


def _table() -> str:
    """The tuning table of this rank: dense layers and experts go by the same one."""
    facts = STATE.facts
    if facts is None or not (STATE.tuning is not None or _tunes_experts()):
        return "not used"
    found, _ = STATE.tuning_table()
    return f"{f'table {found.digest}' if found is not None else 'no table'} for {facts.device_name}"


def _tunes_experts() -> bool:
    return tuning.VALUE in (moe_choice.RUNNERS.own_target, moe_choice.RUNNERS.own_draft)


def _difference(name: str, values: list[str]) -> str:
    if len(set(values)) == 1:
        return ""
    by_value = {value: [rank for rank, theirs in enumerate(values) if theirs == value] for value in values}
    listing = ", ".join(f"{value} on {ranks.spell(where)}" for value, where in by_value.items())
    return f"{name}: {listing}. {_REMEDIES[name]}"
