"""From SGLang's arguments to one decision: read the request, collect facts, resolve, refuse or set."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_sm120 import __version__, env
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.device import collect_facts
from sglang_sm120.dispatch import Decision, Request, resolve
from sglang_sm120.host.state import STATE

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
        ConfigError, UnsupportedError: the request cannot be served; the text names the alternative.
        SelfTestError: the chosen backend of ours is wrong on this device.
        SeamError: a seam that this process needs is not in place.
    """
    from sglang_sm120.host import installer

    request = read_request(server_args)
    facts = collect_facts()
    decision = resolve(request, facts)
    _initialize_original(fp4_utils, request, decision, original)
    for warning in decision.warnings:
        logger.warning(warning)
    record = BACKENDS.get(decision.backend) if decision.backend is not None else None
    STATE.decide(decision, facts, record)
    if decision.backend is None:
        return
    fp4_utils.FP4_GEMM_RUNNER_BACKEND = fp4_utils.Fp4GemmRunnerBackend(decision.backend)
    installer.require_live()
    if record is not None and record.implementation is not None:
        from sglang_sm120 import self_test

        self_test.run(record.value, "cpu" if facts.capability is None else "cuda")
    _report(decision, facts, scheduler)


def _initialize_original(fp4_utils: Any, request: Request, decision: Decision, original: Callable[[], None]) -> None:
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
    from sglang_sm120.host import installer

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


def _rank(scheduler: Any) -> int:
    """Tensor-parallel rank of the scheduler that is starting; 0 if unknown (it only picks a log level).

    torch.distributed is not initialised yet. The attribute moved into ``ps`` in later releases.
    """
    holder = getattr(scheduler, "ps", scheduler)
    rank = getattr(holder, "tp_rank", 0)
    return rank if isinstance(rank, int) else 0
