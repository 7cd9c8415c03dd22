"""The GEMMs of a model, layer by layer, from its configuration.

Covered are the families that publish NVFP4 checkpoints and that SGLang serves with the classes named below; another
``model_type`` is refused by name, because a guess would give wrong figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.models import attention, mlp, nemotron
from sglang_sm120.models.config import MOST_LAYERS, Reader
from sglang_sm120.models.gemms import Gemm
from sglang_sm120.models.layer import Draft, Layer, LayerKind, Stack
from sglang_sm120.models.source import ModelSource


@dataclass(frozen=True)
class Model:
    """A model's GEMMs and the sizes of what it keeps of the context.

    Attributes:
        hidden: width of the residual stream.
        experts, top_k: routed experts of a layer, and how many of them a token takes (0 without).
        memory: sizes of keys and values, latents and states.
        draft: of checkpoints with multi-token prediction weights.
    """

    label: str
    model_type: str
    hidden: int
    vocabulary: int
    tied_head: bool
    experts: int
    top_k: int
    layers: tuple[Layer, ...]
    head: Gemm
    memory: attention.ContextMemory
    draft: Draft | None

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep a recurrent state instead of keys and values."""
        return any(layer.kind == "linear" for layer in self.layers)


@dataclass(frozen=True)
class _Family:
    """How the configurations of one family are read."""

    attention: Callable[[Reader], tuple[Gemm, ...]]
    mlp: Callable[[Reader, int], tuple[Gemm, ...]]
    kind: LayerKind = "full"
    prefix: str = "model.layers"
    linear: bool = False  # three of four layers are gated delta nets
    draft: Callable[[Reader], int] = lambda _: 0
    draft_served: bool = True


def _mtp_layers(read: Reader) -> int:
    depth = read.optional("num_nextn_predict_layers", 0, MOST_LAYERS)
    return read.optional("mtp_num_hidden_layers", depth, MOST_LAYERS)


_DENSE = _Family(attention.grouped, mlp.dense)
_HYBRID = {"prefix": "model.language_model.layers", "linear": True, "draft": _mtp_layers}
_LATENT = _Family(attention.latent, mlp.deepseek, kind="latent", draft=_mtp_layers)
_FAMILIES: Mapping[str, _Family] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3_moe": _Family(attention.grouped, mlp.qwen),
    "glm4_moe": _Family(attention.grouped, mlp.deepseek, draft=_mtp_layers),
    "minimax_m2": _Family(
        attention.grouped, mlp.minimax, draft=lambda read: read.optional("num_mtp_modules", 0), draft_served=False
    ),
    "qwen3_next": _Family(attention.gated, mlp.qwen, linear=True, draft=lambda _: 1),
    "qwen3_5": _Family(attention.gated, mlp.qwen, **_HYBRID),  # type: ignore[arg-type]
    "qwen3_5_moe": _Family(attention.gated, mlp.qwen, **_HYBRID),  # type: ignore[arg-type]
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "kimi_k2": _LATENT,
    "glm_moe_dsa": _LATENT,
}
#: Families whose layers are no pairs of attention and feed-forward.
_STACKS: Mapping[str, Callable[[Reader], Stack]] = {"nemotron_h": nemotron.stack}


def read_model(source: ModelSource) -> Model:
    """Describe the model of a configuration.

    Raises:
        ConfigError: an unknown ``model_type``, or a field that is missing or no number.
    """
    read = Reader(source.config, source.label)
    model_type = str(source.config.get("model_type", ""))
    build = _builder(model_type)
    hidden, vocabulary = read.number("hidden_size"), read.number("vocab_size")
    stack = build(read)
    head = Gemm("lm_head", "lm_head", (vocabulary,), hidden, "vocab", ("lm_head",))
    return Model(
        label=source.label,
        model_type=model_type,
        hidden=hidden,
        vocabulary=vocabulary,
        tied_head=bool(source.config.get("tie_word_embeddings", False)),
        experts=mlp.experts(read),
        top_k=mlp.top_k(read),
        layers=stack.layers,
        head=head,
        memory=stack.memory,
        draft=stack.draft,
    )


def _builder(model_type: str) -> Callable[[Reader], Stack]:
    name = model_type.removesuffix("_text")
    if name in _STACKS:
        return _STACKS[name]
    if name not in _FAMILIES:
        raise ConfigError(bad_value("model_type", model_type, f"known are {', '.join((*_FAMILIES, *_STACKS))}"))
    return partial(_stack, family=_FAMILIES[name])


def _stack(read: Reader, family: _Family) -> Stack:
    count = read.number("num_hidden_layers", largest=MOST_LAYERS)
    return Stack(
        tuple(_layer(read, family, index) for index in range(count)),
        attention.context_memory(read, latent=family.kind == "latent", linear=family.linear),
        _draft(read, family, count),
    )


def _layer(read: Reader, family: _Family, index: int) -> Layer:
    prefix = f"{family.prefix}.{index}"
    if family.linear and not _is_full(read, index):
        gemms = attention.delta_net(read) + family.mlp(read, index)
        return Layer(index, prefix, "linear", gemms, launches=2)  # convolution and recurrent update
    return Layer(index, prefix, family.kind, family.attention(read) + family.mlp(read, index), launches=1)


def _is_full(read: Reader, index: int) -> bool:
    kinds = read.config.get("layer_types")
    if isinstance(kinds, list) and index < len(kinds):
        return bool(kinds[index] == "full_attention")
    return (index + 1) % (read.optional("full_attention_interval", 4) or 4) == 0


def _draft(read: Reader, family: _Family, count: int) -> Draft | None:
    depth = family.draft(read)
    if depth == 0:
        return None
    if not family.draft_served:
        return Draft((), False, "SGLang has no draft class for the prediction modules of this family")
    hidden = read.number("hidden_size")
    in_target = family.kind == "latent" or not family.linear  # stored as one more layer of the target
    layers = []
    for index in range(depth):
        prefix = f"model.layers.{count + index}" if in_target else f"mtp.layers.{index}"
        module = "eh_proj" if in_target else "mtp.fc"
        projection = Gemm(module, "MTP projection", (hidden,), 2 * hidden, "replicated", (module,), always_bf16=True)
        # A draft layer is never one of the leading dense layers.
        gemms = (projection, *family.attention(read), *family.mlp(read, count + index))
        layers.append(Layer(index, prefix, family.kind, gemms, launches=1))
    return Draft(tuple(layers))
