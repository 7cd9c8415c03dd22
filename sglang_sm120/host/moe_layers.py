"""Serve the NVFP4 experts of one SGLang layer with a runner of ours.

SGLang prepares the weights as for the stand-in (``moe_choice.py``): that is the layout our kernels read, and a batch
that is too large for them goes on to the kernels that the stand-in means. So nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from sglang_sm120 import ops, self_test
from sglang_sm120.backends.expert_limits import ExpertSizes, beyond_limits
from sglang_sm120.backends.moe_table import CALLED_RUNNERS
from sglang_sm120.backends.moe_verdict import moe_verdict
from sglang_sm120.errors import BackendError, ConfigError, UnsupportedError, bad_value
from sglang_sm120.failures import failed_call
from sglang_sm120.formats import BLOCK_SIZE
from sglang_sm120.host import moe_choice, moe_tuning, reload
from sglang_sm120.host.conventions import ExpertConvention
from sglang_sm120.host.moe_resolution import DRAFT_FLAG, FLAG, kind_of
from sglang_sm120.host.state import STATE
from sglang_sm120.reference import Activation, ExpertWeights
from sglang_sm120.tuning.expert_cases import ExpertShape, padded
from sglang_sm120.verification.failed_file import ExpertFacts

Stack = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_CLAMPS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")
#: Switches of SGLang, off by default: the first since 0.5.14, the second (Nemotron-H alone) since 0.5.23.
_PER_TOKEN = "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION"
_PHASE_LAYOUT = "SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT"


@dataclass
class Experts:
    """What one expert method needs to know about its layer; kept as ``sm120_experts`` on the method.

    Attributes:
        runner: value of ours that was named.
        convention: names of the layer's tensors.
        activation: ``silu`` or ``relu2``.
        gate_first: order of the halves of w13, as the loader fills it.
        most_tokens: larger batches go to SGLang's own method; ``None`` keeps every batch here.
        plan: under ``sm120_tuned``, the runner of ours for each number of tokens, ``None`` where SGLang's own method
            serves; the last one counts for any larger number.
        own: the runner of ours for batches that SGLang's own method must not get.
        left: why SGLang's own method serves the whole layer; empty if it does not.
        dtype: of the activations.
    """

    runner: str
    convention: ExpertConvention
    activation: Activation = "silu"
    gate_first: bool = True
    most_tokens: int | None = None
    plan: moe_tuning.Plan = ()
    own: str = ""
    left: str = ""
    dtype: torch.dtype = torch.bfloat16

    def runner_for(self, tokens: int) -> str | None:
        """The runner of ours for a batch of so many tokens, ``None`` if SGLang's own method serves it."""
        if self.left:
            return None
        if self.plan:
            if tokens == 0:  # some of SGLang's kernels take no operand without rows
                return self.own
            return self.plan[tokens if tokens < len(self.plan) else -1]
        return self.runner if self.most_tokens is None or tokens <= self.most_tokens else None


@contextmanager
def as_on_blackwell(module: ModuleType) -> Iterator[None]:
    """Let a constructor of SGLang pass its question for Blackwell: the kernels that it asks for will not run."""
    name = "get_platform" if hasattr(module, "get_platform") else "is_blackwell_supported"
    original = getattr(module, name)
    platform = SimpleNamespace(is_blackwell=True)
    setattr(module, name, (lambda: platform) if name == "get_platform" else lambda: True)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def or_left_to_sglang(layer: Any, experts: Experts) -> Iterator[None]:
    """Under ``sm120_tuned``, leave a layer that ours refuse to SGLang's own method, where that runs.

    Raises:
        UnsupportedError: nothing else serves the layer, or one runner of ours was named.
    """
    try:
        yield
    except UnsupportedError as refusal:
        kind = kind_of(experts.convention.quantization)
        if experts.runner != moe_tuning.VALUE or STATE.facts is None:
            raise
        theirs = moe_tuning.sglangs_kernels(kind, STATE.facts, expert_parallel=layer.moe_ep_size > 1)
        if theirs is None:
            raise
        experts.left = str(refusal)
        STATE.warn_once(experts.left, f"{theirs} serves experts that {FLAG} {experts.runner} does not: {refusal}")


def check_preparation(layer: Any, experts: Experts, inner: int) -> None:
    """Refuse a size that SGLang's preparation ends in an assertion for, whoever serves the layer afterwards.

    Args:
        layer: the expert layer; it knows its tensor-parallel size.
        experts: what was named for it.
        inner: intermediate size of this rank.

    Raises:
        UnsupportedError: names the tensor-parallel size, and the nearest one that works.
    """
    if layer.moe_runner_config.is_gated:
        _require_multiple(layer, experts, inner, max(1, experts.convention.row_multiple // 2))


def check_sizes(layer: Any, experts: Experts, hidden: int, inner: int, count: int) -> None:
    """Refuse sizes that the kernels do not take, before memory for the weights is taken.

    Args:
        layer: the expert layer; it knows its tensor-parallel size.
        experts: what serves it.
        hidden: H.
        inner: intermediate size of this rank.
        count: experts of this rank.

    Raises:
        UnsupportedError: names the size and its limit, or the tensor-parallel size and the nearest one that works.
    """
    gated, top_k = layer.moe_runner_config.is_gated, layer.moe_runner_config.top_k or 0
    sizes = ExpertSizes(layer.num_experts, count, top_k, hidden, inner if gated else padded(inner))
    if excess := beyond_limits(_kernels(experts), sizes):
        raise _refusal(experts, excess)
    if hidden % BLOCK_SIZE:
        raise _refusal(experts, f"the hidden size {hidden} is no multiple of {BLOCK_SIZE}")
    _require_multiple(layer, experts, inner, BLOCK_SIZE)


def _require_multiple(layer: Any, experts: Experts, inner: int, multiple: int) -> None:
    if inner % multiple == 0:
        return
    parts = layer.moe_tp_size
    legal = [n for n in range(1, 2 * parts + 1) if inner * parts % n == 0 and inner * parts // n % multiple == 0]
    nearest = min(legal, key=lambda n: (abs(n - parts), n), default=None)
    advice = f"; the nearest size that works is {nearest}" if nearest is not None else "; no size works"
    raise _refusal(
        experts,
        f"tensor parallelism over {parts} leaves {inner} of {inner * parts} intermediate columns, which is no "
        f"multiple of {multiple}{advice}",
    )


def check_config(method: Any, layer: Any, config: Any, experts: Experts) -> None:
    """Refuse what the kernels do not compute, and fill in what the forward needs.

    Raises:
        UnsupportedError: names the feature.
    """
    # A property that looks at the runner in force, which is another one in the forward of a draft.
    experts.gate_first = not getattr(method, "load_up_proj_weight_first", False)
    obstacle = unsupported(method, layer, config, experts.convention) or _foreign_form(experts, config)
    if obstacle:
        raise _refusal(experts, obstacle)
    experts.activation = config.activation
    experts.own = experts.runner
    if experts.runner != moe_tuning.VALUE:
        experts.most_tokens = _crossover(experts)


def unsupported(method: Any, layer: Any, config: Any, convention: ExpertConvention) -> str:
    """Return what a layer asks for that neither our kernels nor the oracle compute; empty if it is nothing."""
    if config.activation not in ("silu", "relu2") or config.is_gated != (config.activation == "silu"):
        shown = f"{config.activation!r} ({'with' if config.is_gated else 'without'} a gate)"
        return f"the kernels know silu with a gate and relu2 without, not {shown}"
    clamp = next((name for name in _CLAMPS if getattr(config, name, None) is not None), None)
    obstacles = (
        (clamp is not None, f"this model's {clamp} clamps or shifts the activation"),
        (
            not config.is_gated and convention.quantization == "compressed-tensors",
            "SGLang gives compressed-tensors experts a gate, and this model's have none",
        ),
        (config.apply_router_weight_on_input, "this model applies router weights to the input"),
        (getattr(config, "no_combine", False), "the layer wants its experts' results apart"),
        (not _standard_dispatch(), "tokens are exchanged between ranks (--moe-a2a-backend)"),
        (_quantized_allgather(), "the input is gathered in FP4; add --disable-flashinfer-cutlass-moe-fp4-allgather"),
        (_scales_per_token(method), f"activations are scaled per token ({_PER_TOKEN}=1)"),
        (_moves_weights(), f"SGLang rewrites the weights between forwards ({_PHASE_LAYOUT}=1)"),
        (
            bool(config.num_fused_shared_experts) and layer.moe_ep_size > 1,
            "under expert parallelism shared experts are not numbered like the routed ones; "
            "add --disable-shared-experts-fusion",
        ),
    )
    return next((what for wanted, what in obstacles if wanted), "")


def make_ready(layer: Any, experts: Experts) -> None:
    """Load and check the kernels after SGLang prepared the weights; its first forward may be captured in a graph."""
    device = layer.w13_weight.device
    if experts.runner == moe_tuning.VALUE:
        tuned = moe_tuning.start(device)
        experts.own = tuned.own
        if not experts.left:
            kind, dtype = kind_of(experts.convention.quantization), str(experts.dtype).removeprefix("torch.")
            experts.plan = tuned.plan(shape_of(layer, experts), dtype, kind, gate_first=experts.gate_first)
    else:
        start(experts.runner, device)
    if experts.left:
        return
    reload.watch_experts(layer)
    _prepare(layer, experts)
    if device.type == "cuda":
        # The kernels fetch weights before the work in front of them has ended, so what writes them must have ended.
        torch.cuda.current_stream(device).synchronize()


def _prepare(layer: Any, experts: Experts) -> None:
    """Let the runners of a layer keep what they derive from its weights, while memory for it is free."""
    w13, w2 = (ExpertWeights(*stack) for stack in _operands(layer, experts))
    for runner in set(CALLED_RUNNERS) & {*experts.plan, experts.runner}:
        if ops.prepare_moe(runner, w13, w2, layer.moe_runner_config.top_k, experts.activation):
            reload.refuse_again(layer, f"{runner} keeps scales of them")


@cache
def start(runner: str, device: torch.device) -> None:
    """Load the code of a runner of ours and check it on the device, once.

    Raises:
        UnsupportedError: the kernels cannot be had here.
        SelfTestError: they are wrong on this device.
    """
    ops.start_moe(runner, device)
    self_test.run_moe(runner, device)


def shape_of(layer: Any, experts: Experts) -> ExpertShape:
    """Return the geometry of a layer that SGLang has prepared; SGLang may have padded I."""
    local, hidden, inner = layer.w2_weight.shape
    top_k = layer.moe_runner_config.top_k
    return ExpertShape(layer.num_experts, local, top_k, hidden, 2 * inner, experts.activation)


def runner_of(layer: Any, experts: Experts, dispatched: Any) -> str | None:
    """Return the runner of ours that serves a batch, ``None`` if SGLang's own method does.

    A batch whose ids are those of this rank is, however large: the kernels of the stand-in number experts globally, and
    SGLang before 0.5.23 hands them such ids all the same (compressed-tensors under expert parallelism).
    """
    chosen = experts.runner_for(dispatched.hidden_states.shape[0])
    return experts.own if chosen is None and not experts.left and _ids_are_local(layer) else chosen


def forward(layer: Any, experts: Experts, dispatched: Any, runner: str) -> torch.Tensor:
    """Run the experts of this rank.

    Args:
        layer: SGLang's expert layer, prepared.
        experts: what serves it.
        dispatched: SGLang's standard dispatch output.
        runner: from :func:`runner_of`.

    Returns:
        [M, H] in the dtype of the hidden states.

    Raises:
        ConfigError: scales were written since the layer was prepared.
        BackendError: the runner failed, without an error of ours.
        Sm120Error: what the runner raised; like the others it names runner, layer and sizes.
    """
    reload.refuse_if_stale(layer)
    try:
        return _forward(layer, experts, dispatched, runner)
    except (torch.OutOfMemoryError, BackendError, ConfigError):
        raise  # they say who and what themselves
    except Exception as error:
        remedy = f"Name another {FLAG}, or run sglang-sm120 probe"
        call = _facts(layer, experts, dispatched.hidden_states)
        raise failed_call(runner, reload.layer_name(layer), call, error, remedy, STATE.facts) from error


def _facts(layer: Any, experts: Experts, hidden: torch.Tensor) -> ExpertFacts:
    """What a message and a file can say about a call after the device stopped answering."""
    sizes, dtype = shape_of(layer, experts).key, str(hidden.dtype).removeprefix("torch.")
    return ExpertFacts(hidden.shape[0], *sizes, gate_first=experts.gate_first, dtype=dtype)


def _forward(layer: Any, experts: Experts, dispatched: Any, runner: str) -> torch.Tensor:
    topk = dispatched.topk_output
    w13, w2 = _operands(layer, experts)
    return ops.nvfp4_moe(
        dispatched.hidden_states,
        topk.topk_ids.to(torch.int32),
        topk.topk_weights.to(torch.float32),
        *w13,
        *w2,
        experts.activation,
        experts.gate_first,
        first_expert(layer),
        runner,
    )


def _operands(layer: Any, experts: Experts) -> tuple[Stack, Stack]:
    """Both stacks of weights as ``ops.nvfp4_moe`` takes them: packed, block scales, alphas, input scale."""
    names = experts.convention
    return (
        (layer.w13_weight, getattr(layer, names.w13_scale), layer.g1_alphas, layer.w13_input_scale_quant),
        (layer.w2_weight, getattr(layer, names.w2_scale), layer.g2_alphas, layer.w2_input_scale_quant),
    )


def first_expert(layer: Any) -> int:
    """Return the number of this rank's first expert in the ids that reach the layer."""
    return 0 if _ids_are_local(layer) else int(layer.moe_ep_rank * layer.num_local_experts)


def _ids_are_local(layer: Any) -> bool:
    """Whether the dispatcher turned ids into those of this rank and -1, as it does for some of SGLang's runners."""
    dispatcher = layer.dispatcher
    mapped = getattr(dispatcher, "local_expert_mapping", None) is not None
    return mapped and not getattr(dispatcher, "skip_local_expert_mapping", False)


def _kernels(experts: Experts) -> str:
    """The runner whose limits hold for every batch: ``sm120_tuned`` takes ``sm120`` where that runs."""
    if experts.runner != moe_tuning.VALUE:
        return experts.runner
    judged = moe_verdict("sm120", kind_of(experts.convention.quantization), STATE.facts) if STATE.facts else None
    return "sm120" if judged is not None and judged.status == "ok" else experts.runner


def _foreign_form(experts: Experts, config: Any) -> str:
    """What of the layer's form, beside its sizes, the runner that was named does not take; empty if it is nothing."""
    if experts.runner == moe_tuning.VALUE:
        return ""
    dtypes = ops.moe_dtypes(experts.runner)
    if experts.dtype not in dtypes:
        return f"its kernels do not take {experts.dtype} activations"
    if experts.gate_first and config.is_gated and ops.wants_up_first(experts.runner):
        return "its kernels want up before gate, and this SGLang loads these experts gate first"
    if moe_choice.RUNNERS.two_streams and ops.wants_one_stream(experts.runner):
        return "its layers share workspaces, which prefill and decode use at the same time (--enable-pdmux)"
    return ""


def _crossover(experts: Experts) -> int | None:
    """Most tokens that ours serves where the stand-in's kernels run too."""
    most: int | None = getattr(ops.moe_implementation(experts.runner), "MOST_TOKENS", None)
    kind = kind_of(experts.convention.quantization)
    other = moe_verdict(moe_choice.stand_in(kind), kind, STATE.facts) if STATE.facts is not None else None
    return most if other is not None and other.status == "ok" else None


def _standard_dispatch() -> bool:
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    return bool(get_moe_a2a_backend().is_none())


def _quantized_allgather() -> bool:
    from sglang.srt.layers.moe import utils

    return bool(utils.should_use_flashinfer_cutlass_moe_fp4_allgather())


def _scales_per_token(method: Any) -> bool:
    """SGLang then leaves the static scales at one, and its kernels measure each token."""
    return bool(getattr(getattr(method, "quant_config", None), "use_per_token_activation", False))


def _moves_weights() -> bool:
    """Small batches then find w2 transposed, and where the layer before it had its own."""
    from sglang.srt.environ import envs

    switch = getattr(envs, _PHASE_LAYOUT, None)
    return switch is not None and bool(switch.get())


def _refusal(experts: Experts, why: str) -> UnsupportedError:
    flag = DRAFT_FLAG if moe_choice.RUNNERS.making_draft else FLAG
    return UnsupportedError(bad_value(flag, experts.runner, f"{why}. Or use {flag} auto"))
