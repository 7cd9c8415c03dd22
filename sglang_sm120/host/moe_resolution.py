"""From SGLang's arguments to a MoE runner that works, and from an expert layer to a refusal.

Two places, because two things are known at different times. While the arguments are resolved, in the process that was
started, ``auto`` can still become another runner: everything that depends on the runner is decided afterwards. Whether
a model has NVFP4 experts at all is known only when its layers are made, in the scheduler, before weights load: there a
runner that cannot serve them is refused.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from sglang_sm120 import env
from sglang_sm120.backends.moe_record import NVFP4_QUANTIZATIONS, Quantization
from sglang_sm120.backends.moe_table import CUTLASS_QUANTIZATIONS
from sglang_sm120.backends.moe_verdict import (
    AUTO,
    is_ours_to_judge,
    moe_verdict,
    recommend_moe_runner,
    route_of,
    working_runners,
)
from sglang_sm120.backends.record import HostFacts, Verdict
from sglang_sm120.device import installed_versions
from sglang_sm120.errors import ConfigError, UnsupportedError, bad_value
from sglang_sm120.host import installer, moe_choice
from sglang_sm120.host.moe_choice import DRAFT_RUNNER, RUNNER
from sglang_sm120.host.state import STATE
from sglang_sm120.nvml import compute_capabilities

logger = logging.getLogger("sglang_sm120")

FLAG, DRAFT_FLAG = "--moe-runner-backend", "--speculative-moe-runner-backend"

#: Any of these in a model's configuration makes it a MoE model for SGLang (Scheduler.init_moe_gemm_config).
_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk")

#: What the target model may be while SGLang makes an expert layer of ModelOpt's class. Any other kind is the target's
#: alone, and the layer belongs to a draft model.
_MODELOPT_KINDS = tuple(kind for kind in NVFP4_QUANTIZATIONS if kind != "compressed-tensors")


def choose_runner(view: Any, declared: dict[str, Any]) -> dict[str, Any]:
    """Let ``auto`` end in a runner that works, where what SGLang makes of it does not.

    Args:
        view: SGLang's read-only view of the arguments, resolved up to this point.
        declared: what SGLang's own rule decided.

    Returns:
        ``declared``, with our choice in it where it replaces ``auto``, and with the stand-in of a runner of ours. Any
        other value that was named, by the user or for the model by SGLang, is never changed.

    Raises:
        ConfigError: SGLang does not start the runner with what else was named.
    """
    declared = {**take_own_runners(view), **declared}
    if declared.get(RUNNER, getattr(view, RUNNER)) != AUTO or not env.take_auto():
        return declared
    facts = facts_of_arguments(view)
    if not is_ours_to_judge(facts):
        return declared
    quantization = quantization_of(model_config_of(view))
    if quantization is None or not _objections(AUTO, (quantization,), facts):
        return declared
    choice = recommend_moe_runner(facts, quantization)
    if choice is None:
        return declared  # the first layer with NVFP4 experts says why
    if choice.value == "flashinfer_cutlass":
        if env.allow_unsafe() and not _admits_cutlass(view):
            return declared
        _require_admission(view, FLAG, AUTO)
    logger.info(
        "%s auto becomes %s for %s: %s (%s).", FLAG, choice.value, quantization, choice.reason, choice.source.ref
    )
    return {**declared, RUNNER: choice.value}


def choose_draft_runner(view: Any, declared: dict[str, Any]) -> dict[str, Any]:
    """Keep a draft model from inheriting a runner that cannot serve it.

    Its experts are stored like the target's or, usually, unquantized; the runner must not be known to fail for either.
    """
    inherited = declared.get(DRAFT_RUNNER)
    if moe_choice.named()[1]:
        return declared  # it inherits a runner of ours, or its stand-in
    if inherited in (None, AUTO) or view.speculative_algorithm is None or not env.take_auto():
        return declared
    facts = facts_of_arguments(view)
    if not is_ours_to_judge(facts):
        return declared
    quantization = quantization_of(model_config_of(view))
    kinds: tuple[Quantization, ...] = ("unquantized",) if quantization is None else ("unquantized", quantization)
    if not _objections(inherited, kinds, facts):
        return declared
    choice = recommend_moe_runner(facts, quantization) if quantization is not None else None
    taken = choice.value if choice is not None else AUTO
    logger.warning(
        "The draft model does not inherit %s %s, which does not run here; it gets %s.", FLAG, inherited, taken
    )
    return {**declared, DRAFT_RUNNER: taken}


def take_own_runners(arguments: Any) -> dict[str, str]:
    """Return the fields of SGLang's arguments that replace runners of ours, and remember those.

    Args:
        arguments: SGLang's arguments, or its view of them.

    Raises:
        ConfigError: the schedulers will be Ray actors, which would serve with the stand-in; or SGLang does not start
            the stand-in with what else was named.
    """
    target, draft = getattr(arguments, RUNNER), getattr(arguments, DRAFT_RUNNER)
    quantization: str | None = None
    if moe_choice.is_ours(target) or moe_choice.is_ours(draft):
        if _starts_ray_actors(arguments):
            flag, value = (FLAG, target) if moe_choice.is_ours(target) else (DRAFT_FLAG, draft)
            remedy = (
                "Ray actors do not inherit which runner was named and would serve with SGLang's own; start without "
                "Ray, or take a runner of SGLang's"
            )
            raise ConfigError(bad_value(flag, value, remedy))
        quantization = _stored_as(model_config_of(arguments))
        if moe_choice.is_ours(target) and moe_choice.stand_in(quantization) == "flashinfer_cutlass":
            _require_admission(arguments, FLAG, target)
    return moe_choice.replace(target, draft, quantization)


def note_runners(target: str, draft: str, model_config: Any | None) -> None:
    """Remember what the scheduler starts with.

    Raises:
        SeamError: a runner of ours was named and a seam that it needs is not in place.
    """
    moe_choice.note(target, draft, quantization_of(model_config) if model_config is not None else None)
    _say_what_was_replaced(target, draft)
    if moe_choice.RUNNERS.own_target or moe_choice.RUNNERS.own_draft:
        installer.require_live()


def _say_what_was_replaced(target: str, draft: str) -> None:
    """Warn of a runner of ours that SGLang replaced after it had been named; of a draft only if it is another story."""
    own_target, own_draft = moe_choice.named()
    replaced = [(FLAG, own_target, target)] if own_target and not moe_choice.RUNNERS.own_target else []
    if own_draft and not moe_choice.RUNNERS.own_draft and draft != target:
        replaced.append((DRAFT_FLAG, own_draft, draft))
    for flag, own, value in replaced:
        text = f"{flag} {own} serves no layer: SGLang replaced it by {value} for this model."
        STATE.warn_once(text, text)


def check_layer(value: str, quantization: Quantization, *, expert_parallel: bool = False) -> None:
    """Judge the runner of one expert layer that is about to be made.

    Args:
        value: the runner in force, of the target or of the draft model, whichever is being made.
        quantization: how the layer stores its experts.
        expert_parallel: whether this rank holds a part of them.

    Raises:
        UnsupportedError: the runner cannot serve it here, and ``SGLANG_SM120_ALLOW_UNSAFE`` is off.
    """
    facts = STATE.facts
    if facts is None or (value == AUTO and not env.take_auto()) or moe_choice.is_sglangs(value):
        return
    if not moe_choice.is_ours(value) and not is_ours_to_judge(facts):
        return
    quantization = kind_of(quantization)
    judged = moe_verdict(value, quantization, facts, expert_parallel=expert_parallel)
    if judged is None or _is_ours_under_its_name(value, quantization, facts, expert_parallel):
        return
    if judged.status == "ok":
        for warning in judged.warnings:
            STATE.warn_once(warning, warning)
        return
    text = refusal(judged, quantization, facts, expert_parallel=expert_parallel)
    if not env.allow_unsafe():
        raise UnsupportedError(text)
    STATE.warn_once(text, text)


def _is_ours_under_its_name(value: str, quantization: Quantization, facts: HostFacts, expert_parallel: bool) -> bool:
    """Whether SGLang takes its own runner, of which ``host/operators.py`` makes ours where it has no code."""
    route = route_of(value, quantization, facts, expert_parallel=expert_parallel)
    return STATE.operators is not None and route is not None and route.runner == "cutlass"


def warn_of_stand_in(own: str, cls: type, value: str) -> None:
    """Say once that experts of a class of SGLang are served by the stand-in ``value`` of a runner of ours."""
    flag = DRAFT_FLAG if moe_choice.RUNNERS.making_draft else FLAG
    text = f"{flag} {own} does not serve the experts of {cls.__name__}; {value} does, as SGLang has it."
    STATE.warn_once(text, text)


def check_stand_in(own: str, value: str, quantization: Quantization) -> None:
    """Refuse a layer whose weights SGLang would prepare for another runner than the one that ours reads.

    Args:
        own: runner of ours that was named for the model.
        value: what SGLang reads instead. It was chosen for the target as its configuration describes it; a draft, or a
            layer that the configuration does not mention, may be stored differently.
        quantization: how the layer stores its experts.

    Raises:
        UnsupportedError: always, also with ``SGLANG_SM120_ALLOW_UNSAFE``: the kernels would read other bytes.
    """
    wanted = moe_choice.stand_in(quantization)
    if wanted in (AUTO, value):  # what is prepared for auto is prepared the same way for every stand-in
        return
    flag = DRAFT_FLAG if moe_choice.RUNNERS.making_draft else FLAG
    remedy = (
        f"its weights are prepared for {value}, because the target's configuration does not say that it has "
        f"{quantization} experts; use {flag} auto"
    )
    raise UnsupportedError(bad_value(flag, own, remedy))


def kind_of(quantization: Quantization) -> Quantization:
    """Return how a layer stores its experts, given what its class is for."""
    if quantization == "modelopt_fp4" and moe_choice.RUNNERS.quantization in _MODELOPT_KINDS:
        return moe_choice.RUNNERS.quantization  # one class of SGLang serves all of ModelOpt's kinds
    return quantization


def refusal(judged: Verdict, quantization: Quantization, facts: HostFacts, *, expert_parallel: bool = False) -> str:
    """Word a refusal: argument, value, reason, and what to do instead."""
    target, draft = moe_choice.RUNNERS.target_as_named, moe_choice.RUNNERS.draft_as_named
    flag = DRAFT_FLAG if judged.backend == draft != target else FLAG
    steps = [judged.remedy] if judged.remedy else []
    instead = _alternative(judged.backend, quantization, facts, expert_parallel)
    if instead is not None:
        steps.append(f"use {flag} {instead} instead")
    steps.append(f"set {env.ALLOW_UNSAFE}=1 to start all the same")
    source = f" ({judged.source.ref})" if judged.source is not None else ""
    return bad_value(
        flag, judged.backend, f"for {quantization} experts: {judged.reason}{source}; {', or '.join(steps)}"
    )


def facts_of_arguments(view: Any) -> HostFacts:
    """Collect what can be known while arguments are resolved, without a CUDA context and without FlashInfer.

    The scheduler judges again, with the facts of its own GPU. On a machine with different cards the one that will be
    used is not known here: CUDA numbers them by speed and NVML by bus. Nothing is chosen there.
    """
    cards = set(compute_capabilities()) if view.device in (None, "cuda") else set()
    return HostFacts(cards.pop() if len(cards) == 1 else None, installed_versions())


def model_config_of(view: Any) -> Any:
    """Return SGLang's ``ModelConfig`` of the target; it has been made and kept before this point."""
    if hasattr(view, "get_model_config"):
        return view.get_model_config()  # up to 0.5.18
    from sglang.srt.arg_groups.model_override_base import model_config_of as look_up

    return look_up(view)


def quantization_of(model_config: Any) -> Quantization | None:
    """Return how a model stores its NVFP4 experts, ``None`` if SGLang's configuration does not say that it has any.

    ``compressed-tensors`` may be another format than NVFP4; its own class decides that when a layer is made.
    """
    if not any(hasattr(model_config.hf_text_config, name) for name in _EXPERTS):
        return None
    name = model_config.quantization
    if name == "modelopt_mixed":
        return _mixed_experts(model_config.hf_config)
    if name == "fp8" and getattr(model_config, "nvfp4_moe_meta", None) is None:
        return None
    return name if name in NVFP4_QUANTIZATIONS else None


def _mixed_experts(hf_config: Any) -> Quantization | None:
    """Read which of its algorithms a mixed ModelOpt checkpoint uses for the experts; NVFP4 if it does not say."""
    described = getattr(hf_config, "quantization_config", None)
    layers = described.get("quantized_layers", {}) if isinstance(described, dict) else {}
    algorithms = {str(layer.get("quant_algo")).upper() for name, layer in layers.items() if ".experts" in name}
    if not algorithms or "NVFP4" in algorithms:
        return "modelopt_mixed"
    return "nvfp4_weight_only" if "W4A16_NVFP4" in algorithms else None


def _starts_ray_actors(arguments: Any) -> bool:
    # RayEngine needs no flag, but nobody else imports its module.
    return bool(getattr(arguments, "use_ray", False)) or "sglang.srt.ray.engine" in sys.modules


def _objections(value: str, kinds: tuple[Quantization, ...], facts: HostFacts) -> list[Verdict]:
    if moe_choice.is_sglangs(value):
        return []
    verdicts = [moe_verdict(value, kind, facts) for kind in kinds]
    return [judged for judged in verdicts if judged is not None and judged.status != "ok"]


def _stored_as(model_config: Any) -> str | None:
    """How the target stores its experts, whatever the format is; ``None`` for 16 bit and where it is not known."""
    name: str | None = model_config.quantization
    if name == "modelopt_mixed":
        return _mixed_experts(model_config.hf_config)
    described = getattr(model_config.hf_config, "quantization_config", None)
    if name == "modelopt" and isinstance(described, dict) and "NVFP4" in str(described.get("quant_algo")).upper():
        return "modelopt_fp4"  # SGLang 0.5.9 finds the name of the method later
    return name


def _admits_cutlass(arguments: Any) -> bool:
    return arguments.quantization is None or arguments.quantization in CUTLASS_QUANTIZATIONS


def _require_admission(arguments: Any, flag: str, value: str) -> None:
    """Refuse what SGLang's assertions for ``flashinfer_cutlass`` would stop without naming the flag."""
    if not _admits_cutlass(arguments):
        names = ", ".join(sorted(CUTLASS_QUANTIZATIONS))
        remedy = (
            f"{flag} {value} needs flashinfer_cutlass's weights, and SGLang starts that with {names} or without the "
            "flag; leave the flag out, SGLang reads it from the checkpoint"
        )
        raise ConfigError(bad_value("--quantization", arguments.quantization, remedy))
    if arguments.ep_size not in (1, arguments.tp_size):
        remedy = f"{flag} {value} takes 1 or all {arguments.tp_size} ranks of --tp-size, as flashinfer_cutlass does"
        raise ConfigError(bad_value("--ep-size", arguments.ep_size, remedy))


def _alternative(value: str, quantization: Quantization, facts: HostFacts, expert_parallel: bool) -> str | None:
    if quantization == "unquantized":
        return "triton"
    choice = recommend_moe_runner(facts, quantization, expert_parallel=expert_parallel)
    named = [choice.value] if choice is not None else working_runners(quantization, facts)
    return next((other for other in named if other != value), None)
