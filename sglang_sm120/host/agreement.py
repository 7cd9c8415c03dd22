"""Before weights load: settings that must be the same on every rank of a server, and are read on each node."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from sglang_sm120 import env
from sglang_sm120.dispatch import FLAG
from sglang_sm120.errors import ConfigError
from sglang_sm120.host import ranks, tuning
from sglang_sm120.host.patching import Patcher, mark
from sglang_sm120.host.state import STATE

SEAM = "ranks"
_TABLE = "tuning table"
#: What to do where the ranks differ in a setting.
_REMEDIES = {
    env.VERIFY: f"Set {env.VERIFY} to the same number on every node, or on none: a step that one rank runs without its "
    "CUDA graph must have none on the others.",
    _TABLE: f"{FLAG} {tuning.VALUE} needs one table, so cards and versions must be equal. Copy one file of "
    f"sglang-sm120 tune --output to every node and name it in {env.TUNING_TABLE}, or take another value.",
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
        ConfigError: the settings differ, or a rank does not answer.
    """
    settings = _settings()
    users = [env.VERIFY] if env.verify_every() else []
    users += [f"{FLAG} {tuning.VALUE}"] if STATE.tuning is not None else []
    if not users:
        ranks.tell("settings", settings)
        return
    told = ranks.hear("settings", settings, needed_by=" and ".join(users))
    problems = [_difference(name, [theirs[name] for theirs in told]) for name in settings]
    if any(problems):
        raise ConfigError("The ranks of this server do not agree. " + " ".join(filter(None, problems)))


def _settings() -> dict[str, str]:
    tuned = STATE.tuning
    if tuned is None:
        table = "not used"
    else:
        digest = f"table {tuned.table.digest}" if tuned.table is not None else "no table"
        table = f"{digest} for {tuned.facts.device_name}"
    return {env.VERIFY: str(env.verify_every()), _TABLE: table}


def _difference(name: str, values: list[str]) -> str:
    if len(set(values)) == 1:
        return ""
    by_value = {value: [rank for rank, theirs in enumerate(values) if theirs == value] for value in values}
    listing = ", ".join(f"{value} on {ranks.spell(where)}" for value, where in by_value.items())
    return f"{name}: {listing}. {_REMEDIES[name]}"
