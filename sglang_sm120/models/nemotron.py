"""Nemotron-H: Mamba2, attention and feed-forward layers in an order of their own, experts without a gate.

A layer has one mixer: what other families call a layer is two of them here. The names below are those of the
checkpoints and of ``nemotron_h.py``, ``nemotron_h_mtp.py`` and ``mamba.py`` of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.models import attention, mlp
from sglang_sm120.models.attention import ContextMemory
from sglang_sm120.models.config import MOST_LAYERS, Reader
from sglang_sm120.models.gemms import Gemm, Part
from sglang_sm120.models.layer import Draft, Layer, LayerKind, Stack

_Block = Literal["mamba", "attention", "mlp", "moe"]
_BLOCKS: Mapping[object, _Block] = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
#: What a block remembers, and its kernels that are no GEMM: convolution and state update, or attention.
_KINDS: Mapping[_Block, tuple[LayerKind, int]] = {
    "mamba": ("linear", 2),
    "attention": ("full", 1),
    "mlp": ("none", 0),
    "moe": ("none", 0),
}


def stack(read: Reader) -> Stack:
    """Read the layers of a configuration of ``model_type`` nemotron_h.

    Raises:
        ConfigError: no pattern of layers, an unknown letter in it, or a field that is missing or no number.
    """
    blocks = _pattern(read, "layers_block_type", "hybrid_override_pattern")
    layers = tuple(_layer(read, "backbone.layers", index, block) for index, block in enumerate(blocks))
    return Stack(layers, _memory(read), _draft(read))


def _pattern(read: Reader, *names: str) -> tuple[_Block, ...]:
    """The first of the fields that is given: a text of letters, or a list of letters or words."""
    name = next((name for name in names if read.config.get(name) is not None), names[-1])
    value = read.config.get(name)
    remedy = f"at most {MOST_LAYERS} of M (mamba), * (attention), - (mlp) and E (moe) are needed"
    if not isinstance(value, (str, list)) or not 0 < len(value) <= MOST_LAYERS:
        raise ConfigError(bad_value(f"{name} of {read.label}", value, remedy))
    blocks = tuple(_BLOCKS[entry] for entry in value if isinstance(entry, str) and entry in _BLOCKS)
    if len(blocks) != len(value):
        raise ConfigError(bad_value(f"{name} of {read.label}", value, remedy))
    return blocks


def _layer(read: Reader, prefix: str, index: int, block: _Block) -> Layer:
    kind, launches = _KINDS[block]
    return Layer(index, f"{prefix}.{index}", kind, _MIXERS[block](read), launches, all_reduces=1)


def _draft(read: Reader) -> Draft | None:
    """One prediction module of one or more layers; the first also joins the embedding with the hidden state."""
    if read.optional("num_nextn_predict_layers", 0, MOST_LAYERS) == 0:
        return None
    blocks = _pattern(read, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    hidden = read.number("hidden_size")
    first, *others = (_layer(read, "mtp.layers", index, block) for index, block in enumerate(blocks))
    projection = Gemm("eh_proj", "MTP projection", (hidden,), 2 * hidden, "column", ("eh_proj",))
    layers = (replace(first, gemms=(projection, *first.gemms)), *others)
    return Draft(layers, per_step=len(layers))


def _mamba(read: Reader) -> tuple[Gemm, ...]:
    """z, x, B, C and the time steps are one projection. Ranks share whole groups of heads."""
    heads, groups = read.number("mamba_num_heads"), _groups(read)
    inner, state = heads * read.number("mamba_head_dim"), groups * read.number("ssm_state_size")
    hidden = read.number("hidden_size")
    widths = (inner, inner, state, state, heads)
    return (
        Gemm("mixer.in_proj", "Mamba2", widths, hidden, "column", ("mixer.in_proj",), groups=groups),
        Gemm("mixer.out_proj", "Mamba2", (hidden,), inner, "row", ("mixer.out_proj",)),
    )


def _attention(read: Reader) -> tuple[Gemm, ...]:
    return tuple(_in_mixer(gemm, "self_attn") for gemm in attention.grouped(read))


def _in_mixer(gemm: Gemm, block: str) -> Gemm:
    """The same GEMM under the name that it has here."""
    modules = tuple(module.replace(block, "mixer", 1) for module in gemm.modules)
    return replace(gemm, name=gemm.name.replace(block, "mixer", 1), modules=modules)


def _mlp(read: Reader) -> tuple[Gemm, ...]:
    return _ungated(read, "mixer", "dense MLP", read.number("intermediate_size"))


def _moe(read: Reader) -> tuple[Gemm, ...]:
    """Routed experts, in a latent space of smaller width where there is one, and shared experts beside it."""
    hidden, inner = read.number("hidden_size"), read.number("moe_intermediate_size")
    latent = read.optional("moe_latent_size", 0)
    width = latent or hidden
    part: Part = "routed experts"
    router = Gemm("mixer.gate", "router", (mlp.experts(read),), hidden, "replicated", ("mixer.gate",), always_bf16=True)
    gemms: tuple[Gemm, ...] = (
        router,
        Gemm("mixer.experts.w13", part, (inner,), width, "expert_column", ("mixer.experts.*.up_proj",)),
        Gemm("mixer.experts.w2", part, (width,), inner, "expert_row", ("mixer.experts.*.down_proj",)),
    )
    if latent:
        gemms += (_projection("fc1_latent_proj", latent, hidden), _projection("fc2_latent_proj", hidden, latent))
    shared = read.optional("n_shared_experts", 0)
    if not shared:
        return gemms
    size = shared * read.number("moe_shared_expert_intermediate_size")
    return gemms + _ungated(read, "mixer.shared_experts", "shared expert", size)


def _projection(name: str, n: int, k: int) -> Gemm:
    """Into the latent space of the experts, or out of it; every rank holds it whole."""
    return Gemm(f"mixer.{name}", "latent projection", (n,), k, "replicated", (f"mixer.{name}",))


def _ungated(read: Reader, block: str, part: Part, inner: int) -> tuple[Gemm, ...]:
    hidden = read.number("hidden_size")
    return (
        Gemm(f"{block}.up_proj", part, (inner,), hidden, "column", (f"{block}.up_proj",)),
        Gemm(f"{block}.down_proj", part, (hidden,), inner, "row", (f"{block}.down_proj",)),
    )


def _memory(read: Reader) -> ContextMemory:
    """Keys and values of the attention layers, state and convolution of the Mamba2 layers (``Mamba2StateShape``)."""
    heads, dim, state = read.number("mamba_num_heads"), read.number("mamba_head_dim"), read.number("ssm_state_size")
    taps = read.number("conv_kernel", "mamba_d_conv")
    return replace(
        attention.context_memory(read, latent=False, linear=False),
        state=heads * dim * state,
        convolution=(heads * dim + 2 * _groups(read) * state) * (taps - 1),
        state_bytes=attention.state_bytes(read),
    )


def _groups(read: Reader) -> int:
    return read.number("n_groups", "mamba_n_groups")


_MIXERS: Mapping[_Block, Callable[[Reader], tuple[Gemm, ...]]] = {
    "mamba": _mamba,
    "attention": _attention,
    "mlp": _mlp,
    "moe": _moe,
}
