"""Check and count the NVFP4 experts of a running server, whichever runner serves them (see ``watch.py``).

Watched is the method's forward, between the dispatch of tokens and the reduction over ranks: hidden states, numbers of
experts and router weights go in, the sum over this rank's experts comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_sm120.backends.moe_table import KERNEL_RUNNERS
from sglang_sm120.backends.moe_verdict import route_of
from sglang_sm120.host import moe_layers
from sglang_sm120.host.conventions import ExpertConvention
from sglang_sm120.host.moe_resolution import kind_of
from sglang_sm120.host.state import STATE
from sglang_sm120.host.watch import LayerCall, Watcher
from sglang_sm120.reference import ExpertWeights
from sglang_sm120.verification.expert_call import ExpertCall, expert_sizes
from sglang_sm120.verification.served import Sizes

#: Runners of SGLang's that keep the weights as the oracle reads them.
_READABLE = ("flashinfer_cutlass", "cutlass")


@dataclass(frozen=True)
class WatchedExperts:
    """What is known of a layer when its runner is made; the runner in force may be another one later.

    Attributes:
        convention: names of its tensors.
        runner: who multiplies where it is not ours: a record of the table, else SGLang's value.
        gate_first: order of the halves of w13.
        obstacle: why no call of SGLang's own method can be checked; empty if it can.
    """

    convention: ExpertConvention
    runner: str
    gate_first: bool
    obstacle: str


def look_at(method: Any, layer: Any, convention: ExpertConvention, *, own_path: bool) -> WatchedExperts:
    """Look at a layer whose runner has been made.

    Args:
        method: SGLang's expert method.
        layer: the layer it serves; its weights need not be there yet.
        convention: of the class that the seam is in.
        own_path: the method is of a subclass, whose computation nobody here knows.
    """
    from sglang.srt.layers.moe.utils import get_moe_runner_backend

    value: str = get_moe_runner_backend().value
    kind = kind_of(convention.quantization)
    route = None
    if STATE.facts is not None:
        route = route_of(value, kind, STATE.facts, expert_parallel=layer.moe_ep_size > 1)
    runner = (route.runner if route is not None else None) or value
    if own_path:
        obstacle = f"{type(method).__name__} computes in its own way"
    elif runner not in _READABLE:
        obstacle = "its weights are laid out for it alone"
    else:
        obstacle = moe_layers.unsupported(method, layer, layer.moe_runner_config, convention)
    gate_first = not getattr(method, "load_up_proj_weight_first", False)
    return WatchedExperts(convention, runner, gate_first, obstacle)


def run(watch: Watcher, inner: Callable[..., Any], method: Any, layer: Any, dispatched: Any) -> Any:
    """Run one layer of experts, and check or count it.

    Raises:
        VerificationError: the result is wrong.
    """
    watched: WatchedExperts = layer.sm120_watched
    hidden = dispatched.hidden_states
    rows: torch.Tensor = hidden[0] if isinstance(hidden, tuple) else hidden

    def look(call: LayerCall, combined: Any) -> None:
        experts: moe_layers.Experts | None = getattr(method, "sm120_experts", None)
        ours = None if experts is None else moe_layers.runner_of(layer, experts, dispatched)
        call.backend = ours or watched.runner
        if not call.due:
            return
        call.why_not = "" if ours else watched.obstacle or _odd_batch(dispatched, combined)
        if not call.why_not:
            made = _call(layer, watched, dispatched)
            rounds = ours not in KERNEL_RUNNERS  # kernels of others do, called by SGLang or by us
            watch.check_experts(made, combined.hidden_states, call.backend, rounds_between=rounds)

    return watch.watched(layer, sizes_of(layer), rows, lambda: inner(method, layer, dispatched), look, experts=True)


def sizes_of(layer: Any) -> Sizes:
    """Geometry of a layer of experts, as its weights are prepared; without the padding of I where it is hidden."""
    config = layer.moe_runner_config
    local, hidden, inner = layer.num_local_experts, config.hidden_size, config.intermediate_size_per_partition
    return expert_sizes(layer.num_experts, local, config.top_k, hidden, inner)


def _odd_batch(dispatched: Any, combined: Any) -> str:
    """Why a call of SGLang's own method cannot be checked, as far as only its operands tell; empty if it can."""
    hidden = dispatched.hidden_states
    if getattr(dispatched, "hidden_states_scale", None) is not None:
        return "its input is quantized"
    if combined.hidden_states.dtype != hidden.dtype:
        return f"its result is {combined.hidden_states.dtype} for an input of {hidden.dtype}"
    return ""


def _call(layer: Any, watched: WatchedExperts, dispatched: Any) -> ExpertCall:
    names, topk = watched.convention, dispatched.topk_output
    return ExpertCall.of(
        dispatched.hidden_states,
        topk.topk_ids,
        topk.topk_weights,
        ExpertWeights(layer.w13_weight, getattr(layer, names.w13_scale), layer.g1_alphas, layer.w13_input_scale_quant),
        ExpertWeights(layer.w2_weight, getattr(layer, names.w2_scale), layer.g2_alphas, layer.w2_input_scale_quant),
        activation=layer.moe_runner_config.activation,
        gate_first=watched.gate_first,
        first_expert=moe_layers.first_expert(layer),
        experts=layer.num_experts,
    )
