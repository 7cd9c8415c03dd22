"""From SGLang's arguments to one decision: read the request, collect facts, resolve, refuse or set."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sglang_sm120 import __version__, env, ops, self_test
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import QUANTIZER, HostFacts
from sglang_sm120.device import collect_facts
from sglang_sm120.dispatch import FLAG, PRECEDENCE, Decision, Request, resolve, substitute
from sglang_sm120.errors import UnsupportedError, bad_value
from sglang_sm120.host import installer, operators, registration, tuning
from sglang_sm120.host.state import STATE
from sglang_sm120.probing.record import FAILED, with_probe

logger = logging.getLogger("sglang_sm120")


def read_request(server_args: Any | None) -> Request:
    """Collect what the user asked for from server arguments and environment.

    Args:
        server_args: SGLang's ``ServerArgs`` (up to 0.5.18), or ``None`` where the published runtime
            configuration holds the value (0.5.19 and later).
    """
    if server_args is not None:
        value = server_args.fp4_gemm_runner_backend
    else:
        from sglang.srt.runtime_context import get_exec

        value = get_exec().kernel.fp4_gemm_runner_backend
    return Request(
        server_value=value,
        env_value=env.fp4_gemm_backend(),
        deprecated_value=env.deprecated_backend(),
        take_auto=env.take_auto(),
        allow_unsafe=env.allow_unsafe(),
    )


def resolve_for_host(fp4_utils: Any, server_args: Any | None, original: Callable[[], None], *, scheduler: Any) -> None:
    """Run SGLang's own resolution, then ours, before any weight is loaded.

    Raises:
        ConfigError: a variable holds something that cannot be understood. (A backend that cannot run here is
            refused by the first NVFP4 layer that is created, which is still before weights load.)
        SelfTestError: the chosen backend of ours is wrong on this device.
        SeamError: a seam that this process needs is not in place.
    """
    request = read_request(server_args)
    gpu = _gpu(scheduler)
    facts, stale = with_probe(collect_facts(gpu))
    STATE.dummy_weights = _load_format(server_args, scheduler) == "dummy"
    device = torch.device("cpu" if facts.capability is None else f"cuda:{gpu or 0}")
    tuned = None
    try:
        decision = resolve(request, facts)
        if decision.backend == tuning.VALUE:
            tuned = tuning.start(facts, device, allow_unsafe=request.allow_unsafe)
            decision = replace(
                decision, reason=tuned.reason, warnings=_tuning_warnings(decision, tuned, _rank(scheduler))
            )
        else:
            _start(decision, device)
    except UnsupportedError as refusal:
        # Every model comes through here, and most have no FP4 layer: the first that does raises this.
        original()
        STATE.refuse(refusal, facts)
        return
    _initialize_original(request, decision, original)
    for warning in decision.warnings:
        logger.warning(warning)
    record = BACKENDS.get(decision.backend) if decision.backend is not None else None
    STATE.decide(decision, facts, record, tuned)
    STATE.quantizer_rejected = decision.backend is not None and facts.probed.get(QUANTIZER) in FAILED
    if decision.backend is None:
        if env.verify_every():
            installer.require_live()  # SGLang's own choice is to be checked too
        return
    _use_record(facts, stale, scheduler)
    if STATE.replaces_quantizer and STATE.quantizing_backend != decision.backend:
        try:
            ops.start(STATE.quantizing_backend, device)  # or its first call would, inside the first forward
        except UnsupportedError as refusal:
            STATE.refuse(refusal, facts)
            return
    fp4_utils.FP4_GEMM_RUNNER_BACKEND = registration.member_for(fp4_utils.Fp4GemmRunnerBackend, decision.backend)
    installer.require_live()
    operators.start(device, rank=_rank(scheduler))
    if record is not None and record.implementation is not None and tuned is None:
        self_test.run(record.value, device)
    _report(decision, facts, scheduler)


def _tuning_warnings(decision: Decision, tuned: tuning.Tuning, rank: int) -> tuple[str, ...]:
    """What the user must know about the choice for single layers: no table, once, and what holds for the others."""
    warnings = [*decision.warnings, *tuned.untuned.warnings]
    if tuned.problem and rank == 0:
        warnings.append(f"{tuned.problem} Until then {tuned.untuned.backend} serves every layer.")
    return tuple(warnings)


def _use_record(facts: HostFacts, stale: str, scheduler: Any) -> None:
    """Say why a probe record is not used, or what it changes about the quantizer."""
    STATE.quantizer = substitute(facts, exact=False)
    warnings = [stale] if stale else []
    if STATE.quantizer_rejected:
        slow = ", which is very slow" if BACKENDS[STATE.quantizer].any_device else ""
        warnings.append(
            f"FlashInfer's activation quantizer failed sglang-sm120 probe on this card ({facts.probed[QUANTIZER]}): "
            f"{STATE.quantizer} quantizes instead{slow}. Another version of FlashInfer may help."
        )
    for warning in warnings if _rank(scheduler) == 0 else []:
        logger.warning(warning)


def _start(decision: Decision, device: torch.device) -> None:
    """Load the code of a backend of ours, which may mean to compile it.

    Raises:
        UnsupportedError: it cannot be had here; the text names what asked for it.
    """
    record = BACKENDS.get(decision.backend) if decision.backend is not None else None
    if record is None or record.implementation is None:
        return
    try:
        ops.start(record.value, device)
    except UnsupportedError as error:
        text = f"{error} Use {FLAG} torch_reference or auto instead"
        raise UnsupportedError(bad_value(PRECEDENCE[decision.origin], record.value, text)) from error


def _initialize_original(request: Request, decision: Decision, original: Callable[[], None]) -> None:
    """Call SGLang's own function without letting it read a variable that we have already validated.

    SGLang 0.5.9 prefixes any value of the deprecated variable and looks it up in its enum, so a value that
    we understand ("cute-dsl") would end in its ValueError.
    """
    if decision.backend is None or request.deprecated_value is None:
        original()
        return
    with env.without_deprecated_backend():
        original()


def _report(decision: Decision, facts: HostFacts, scheduler: Any) -> None:
    level = logging.INFO if _rank(scheduler) == 0 else logging.DEBUG
    logger.log(
        level,
        "sglang-sm120 %s: fp4 GEMM backend %s (%s: %s) on %s, SGLang %s, FlashInfer %s, %d seams live.",
        __version__,
        decision.backend,
        decision.origin,
        decision.reason,
        facts.device_name,
        facts.versions.get("sglang", "unknown"),
        facts.versions.get("flashinfer", "not installed"),
        sum(status.state == "live" for status in installer.verify()),
    )


def _gpu(scheduler: Any) -> int | None:
    """Index of the GPU that this process will use; ``None`` for the current one.

    SGLang selects the device only after this point, so asking for the current one would describe GPU 0 in
    every process and put a CUDA context on it.
    """
    gpu = getattr(scheduler, "gpu_id", None)
    if gpu is None and scheduler is not None:
        try:
            from sglang.srt.runtime_context import get_device

            gpu = get_device().gpu_id
        except (ImportError, AttributeError, ValueError):
            return None  # an older release, or the caller is no scheduler and has published nothing
    return gpu if isinstance(gpu, int) else None


def _load_format(server_args: Any | None, scheduler: Any) -> str:
    holder = server_args if server_args is not None else getattr(scheduler, "server_args", None)
    return str(getattr(holder, "load_format", "auto")).rpartition(".")[2].lower()


def _rank(scheduler: Any) -> int:
    """Rank of the scheduler that is starting; 0 if unknown (it only picks a log level).

    Where torch.distributed is not initialised yet, the scheduler has the rank; later releases keep it in ``ps``.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    holder = getattr(scheduler, "ps", scheduler)
    rank = getattr(holder, "tp_rank", 0)
    return rank if isinstance(rank, int) else 0
