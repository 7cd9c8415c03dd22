"""The MoE runner ``flashinfer_b12x``: FlashInfer's fused experts for SM12x behind the interface of ``ops.nvfp4_moe``.

SGLang has no value for them. The weights that it prepares for ``flashinfer_cutlass`` have the layout that they read: up
before gate, block scales swizzled 128x4, each expert padded by itself. Scales are another matter. SGLang keeps what a
quantizer multiplies by (``input_global_scale``) and the factor of the whole product (``alpha``); FlashInfer wants the
reciprocal of the first for both GEMMs, the whole factor for the second GEMM, and for the first GEMM the factor without
the input's part, which it multiplies in itself (flashinfer 0.7.4 fused_moe/cute_dsl/blackwell_sm12x/moe_dispatch.py,
launch_sm120_moe, and its test tests/moe/test_b12x_direct_micro_scale_contract.py):

    input_global_scale = 1 / w13.input_global_scale      w1_alpha = w13.alpha * w13.input_global_scale
    fc2_input_scale    = 1 / w2.input_global_scale       w2_alpha = w2.alpha

One ``B12xMoEWrapper`` belongs to each layer: it holds views of the weights, so that a CUDA graph can record a call.
Layers of one size share its workspaces, which FlashInfer allows while their calls follow one another on one stream.

Checked here: the operands that FlashInfer's own code derives from these, without a GPU. Its kernels were run by nobody
who works on this package; ``needs_probe`` in the table says so.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sglang_sm120.backends.expert_limits import ExpertSizes, beyond_limits
from sglang_sm120.errors import UnsupportedError, bad_value
from sglang_sm120.reference import Activation, ExpertWeights

RUNNER = "flashinfer_b12x"
#: Only the order of w13 that ``flashinfer_cutlass`` has; the other one would need a copy.
UP_FIRST_ONLY = True
#: Calls share workspaces, so they must follow one another.
ONE_STREAM = True
DTYPES = (torch.bfloat16,)
#: Tokens of one call, for which the workspaces are made; more are cut. FlashInfer's default.
CAPACITY = 4096


@dataclass(eq=False)
class _Workspaces:
    """What FlashInfer writes to between its kernels; the names are those of its arguments."""

    shared_static_workspace: Any
    shared_dynamic_workspace: Any
    shared_output: Any


@dataclass(frozen=True)
class _Prepared:
    """FlashInfer's object for one layer, its arguments that are the same in every call, and what they came from.

    ``held`` keeps the addresses in ``sources`` from becoming those of other tensors.
    """

    wrapper: Any
    workspaces: _Workspaces
    constants: dict[str, torch.Tensor]
    sources: tuple[int | str, ...]
    held: tuple[torch.Tensor, ...]


#: By the packed w13. Values hold aliases of their weights, not the tensors themselves, so they go when those go.
_PREPARED: Any = WeakTensorKeyDictionary()
#: By device, sizes and activation.
_WORKSPACES: weakref.WeakValueDictionary[tuple[Any, ...], _Workspaces] = weakref.WeakValueDictionary()


def start(device: torch.device) -> None:
    """Import FlashInfer's module, so that what it lacks is known before a weight is loaded.

    Raises:
        UnsupportedError: it cannot be imported, or its wrapper is another one than this package knows.
    """
    _wrapper_class()


def prepare(w13: ExpertWeights, w2: ExpertWeights, top_k: int, activation: Activation) -> None:
    """Make the workspaces of one layer, before SGLang divides the rest of the memory, and see whether it is taken.

    The scales are derived by the first call: some of SGLang's loaders (``sharded_state``, ``presharded``, ``remote``)
    prepare layers first and copy what another server had prepared into them.

    Args:
        w13, w2: as of :func:`moe`.
        top_k: experts of a token.
        activation: ``silu`` or ``relu2``.

    Raises:
        UnsupportedError: sizes that FlashInfer does not take, or a FlashInfer that this package does not know.
    """
    _PREPARED[w13.packed] = replace(_prepare(w13, w2, top_k, activation), sources=())


def moe(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    activation: Activation,
    gate_first: bool,
    first_expert: int,
) -> torch.Tensor:
    """Run the experts of a layer that lies whole in this process.

    Args:
        hidden: bfloat16 [M, H].
        topk_ids: int32 [M, top_k] below E; negative ones are skipped. Like ``topk_weights`` copied where it has gaps.
        topk_weights: float32 [M, top_k].
        w13: ``packed`` [E, 2 * I, H / 2] with up before gate, for ``relu2`` [E, I, H / 2]; ``scales`` swizzled, [E, …];
            ``alpha`` float32 [E]; ``input_global_scale`` float32, one value or [E].
        w2: the same with [E, H, I / 2].
        activation: ``silu`` or ``relu2``.
        gate_first: must be false where there is a gate.
        first_expert: must be 0.

    Returns:
        bfloat16 [M, H].

    Raises:
        UnsupportedError: an operand that FlashInfer's kernels do not take.
    """
    if hidden.dtype not in DTYPES:
        raise _unsupported(f"its kernels take bfloat16 activations alone, and these are {hidden.dtype}")
    if gate_first and activation == "silu":
        raise _unsupported("its kernels want up before gate")
    if first_expert:
        raise _unsupported("its kernels share out no experts over ranks where activations are FP4")
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if not len(hidden):
        return out
    prepared, top_k = _PREPARED.get(w13.packed), topk_ids.shape[1]
    if prepared is None or prepared.sources != _sources(w13, w2, top_k, activation):
        prepared = _PREPARED[w13.packed] = _prepare(w13, w2, top_k, activation)
    hidden, topk_ids, topk_weights = hidden.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    for start_row in range(0, len(hidden), CAPACITY):
        part = slice(start_row, start_row + CAPACITY)
        _run(prepared, hidden[part], topk_ids[part], topk_weights[part], out[part])
    return out


def _run(
    prepared: _Prepared, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Let FlashInfer write into ``out``: what it returns otherwise is a buffer that the next layer overwrites.

    The wrapper lives as long as its layer, and must not keep the memory of a result for so long.
    """
    prepared.wrapper._moe_output = out
    try:
        result = prepared.wrapper.run(
            x=hidden, token_selected_experts=ids, token_final_scales=weights, **prepared.constants
        )
    finally:
        prepared.wrapper._moe_output = prepared.workspaces.shared_output
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)


def _prepare(w13: ExpertWeights, w2: ExpertWeights, top_k: int, activation: Activation) -> _Prepared:
    experts, hidden, half_inner = w2.packed.shape
    sizes = ExpertSizes(experts, experts, top_k, hidden, 2 * half_inner)
    if obstacle := beyond_limits(RUNNER, sizes):
        raise _unsupported(obstacle)
    # FlashInfer asks tensors for their version, which those made in inference mode lack; nor can those that it works in
    # be written outside of that mode, by another layer of the size.
    with torch.inference_mode(False), torch.no_grad():
        wrapper, workspaces = _wrapper(sizes, activation, w13.packed.device)
        constants = {
            "w1_weight": w13.packed.detach(),
            "w1_weight_sf": _in_tiles(w13),
            "w1_alpha": (w13.alpha * w13.input_global_scale).contiguous(),
            "input_global_scale": _for_each(w13.input_global_scale.reciprocal(), experts),
            "w2_weight": w2.packed.detach(),
            "w2_weight_sf": _in_tiles(w2),
            "w2_alpha": w2.alpha.detach(),
            "fc2_input_scale": _for_each(w2.input_global_scale.reciprocal(), experts),
        }
        held = tuple(scale.detach() for scale in (w13.alpha, w13.input_global_scale, w2.input_global_scale))
    return _Prepared(wrapper, workspaces, constants, _sources(w13, w2, top_k, activation), held)


def _wrapper(sizes: ExpertSizes, activation: Activation, device: torch.device) -> tuple[Any, _Workspaces]:
    """FlashInfer's object for one layer, with the workspaces of the layers of the same size."""
    key = (device, sizes, activation)
    found = _WORKSPACES.get(key)
    try:
        wrapper = _wrapper_class()(
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.inner,
            use_cuda_graph=True,
            max_num_tokens=CAPACITY,
            device=str(device),
            activation=activation,
            quant_mode="nvfp4",
            **(vars(found) if found is not None else {}),
        )
    except (ImportError, ValueError, NotImplementedError) as error:  # no CUDA 13, no CuTe DSL, a size
        raise _unsupported(f"FlashInfer refuses it: {error}") from error
    try:
        made = _Workspaces(wrapper._static_workspace, wrapper._dynamic_workspace, wrapper._moe_output)
    except AttributeError as error:
        raise _unsupported(f"this FlashInfer keeps its workspaces elsewhere ({error})") from error
    return wrapper, _WORKSPACES.setdefault(key, made) if found is None else found


@cache
def _wrapper_class() -> Any:
    try:
        cls: Any = import_module("flashinfer").B12xMoEWrapper
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # none, an old one, one that is broken
        raise _unsupported(f"FlashInfer cannot be asked for it: {error}") from error
    missing = {"quant_mode", *_Workspaces.__dataclass_fields__} - set(inspect.signature(cls.__init__).parameters)
    if missing:
        raise _unsupported(f"this FlashInfer's B12xMoEWrapper has no argument {', '.join(sorted(missing))}")
    return cls


def _in_tiles(stack: ExpertWeights) -> torch.Tensor:
    """Swizzled block scales [E, rows padded to 128, K / 16 padded to 4] as the view in six dimensions that it takes."""
    experts, rows, half_k = stack.packed.shape
    convert: Any = import_module("flashinfer.cute_dsl.utils").convert_sf_to_mma_layout
    scales = stack.scales.detach().view(torch.float8_e4m3fn)
    tiles: torch.Tensor = convert(scales, m=rows, k=2 * half_k, num_groups=experts)
    return tiles


def _for_each(scale: torch.Tensor, experts: int) -> torch.Tensor:
    """One value for all experts, or one each, as float32 [E]."""
    return scale.to(torch.float32).expand(experts).contiguous()


def _sources(w13: ExpertWeights, w2: ExpertWeights, top_k: int, activation: Activation) -> tuple[int | str, ...]:
    """What a layer was prepared for, and where the operands lie that its constants were made of."""
    stacks = (t for s in (w13, w2) for t in (s.packed, s.scales, s.alpha, s.input_global_scale))
    return top_k, activation, *(tensor.data_ptr() for tensor in stacks)


def _unsupported(why: str) -> UnsupportedError:
    return UnsupportedError(bad_value("--moe-runner-backend", RUNNER, f"{why}; take another runner"))
