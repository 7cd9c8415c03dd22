"""After weights are loaded: say so when the dense backend that was chosen has no layer to serve.

In several exports only the routed experts are FP4. There every value of ``--fp4-gemm-backend`` does the same, which
is nothing, and people have spent days on comparing them.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import torch

from sglang_sm120.dispatch import PRECEDENCE, Decision
from sglang_sm120.host import moe_choice, moe_resolution, ranks
from sglang_sm120.host.conventions import CONVENTIONS
from sglang_sm120.host.patching import Patcher, mark
from sglang_sm120.host.state import STATE

logger = logging.getLogger("sglang_sm120")

SEAM = "loaded"
_DENSE = frozenset(convention.cls for convention in CONVENTIONS)
_EXPERTS = frozenset({"ModelOptNvFp4FusedMoEMethod", "CompressedTensorsW4A4Nvfp4MoE"})


def wrap_load(module: ModuleType, patcher: Patcher) -> None:
    """Look at the model after SGLang's default loader has filled it."""
    loader = module.DefaultModelLoader
    original = loader.load_weights_and_postprocess

    def load_weights_and_postprocess(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        if STATE.decision is not None:
            report(model, STATE.decision)
        report_experts(model)

    replacement = mark(SEAM, load_weights_and_postprocess, original)
    patcher.set(loader, "load_weights_and_postprocess", staticmethod(replacement))


def report(model: torch.nn.Module, decision: Decision) -> None:
    """Log one line if ``decision`` names a backend and ``model`` has no dense FP4 layer.

    A warning if the user named the value. Under ``auto`` a piece of information, and only if the experts are FP4: for
    a model without FP4 nobody expects anything.
    """
    dense, experts = fp4_layers(model)
    if decision.backend is None or dense or not (decision.explicit or experts):
        return
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    why = (
        f"its FP4 weights are all in {experts} layers of routed experts, which --moe-runner-backend decides"
        if experts
        else "it has no NVFP4 layer at all"
    )
    logger.log(
        logging.WARNING if decision.explicit else logging.INFO,
        "%s=%s has no layer to serve in %s and changes nothing: %s. See: sglang-sm120 explain MODEL.",
        PRECEDENCE[decision.origin],
        decision.backend,
        type(model).__name__,
        why,
    )


def report_experts(model: torch.nn.Module) -> None:
    """Log one line about the runner of ours that was named for this model: what it serves, or that it does nothing."""
    own = moe_choice.RUNNERS.own
    if own is None or not ranks.is_first():
        return
    flag = moe_resolution.DRAFT_FLAG if moe_choice.RUNNERS.making_draft else moe_resolution.FLAG
    methods = (getattr(layer, name, None) for layer in model.modules() for name in ("quant_method", "scheme"))
    found = (getattr(method, "sm120_experts", None) for method in methods)
    served = [experts for experts in found if experts is not None]
    if not served:
        logger.warning(
            "%s %s has no layer to serve in %s and changes nothing: it has no experts in NVFP4. "
            "See: sglang-sm120 explain MODEL.",
            flag,
            own,
            type(model).__name__,
        )
        return
    most = served[0].most_tokens
    beyond = f"; batches of more than {most} tokens go on to SGLang's own kernels" if most is not None else ""
    left = sum(bool(experts.left) for experts in served)
    if left:
        beyond += f"; SGLang's own kernels serve {left} more"
    logger.info("%s %s serves the NVFP4 experts of %d layers%s.", flag, own, len(served) - left, beyond)


def fp4_layers(model: torch.nn.Module) -> tuple[int, int]:
    """Count NVFP4 layers: linear ones, and blocks of routed experts."""
    dense = experts = 0
    for layer in model.modules():
        dense += is_dense(layer)
        experts += has_experts(layer)
    return dense, experts


def is_dense(layer: torch.nn.Module) -> bool:
    """Whether a module of a model is a linear layer with NVFP4 weights."""
    return bool(_owners(layer) & _DENSE)


def has_experts(layer: torch.nn.Module) -> bool:
    """Whether a module of a model is a block of routed experts with NVFP4 weights."""
    return bool(_owners(layer) & _EXPERTS)


def _owners(layer: torch.nn.Module) -> set[str]:
    # ModelOpt's method is the owner of the weights, compressed-tensors' scheme is.
    return {type(getattr(layer, name, None)).__name__ for name in ("quant_method", "scheme")}
