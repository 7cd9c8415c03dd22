"""One matrix multiplication of a model, and its shape on one rank.

Weights are ``[N, K]`` (output x input features), as checkpoints store them. The rules are those of SGLang's layer
classes; ``tests/models/test_sharding.py`` builds the real ones of SGLang 0.5.23 and compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_sm120.errors import ConfigError, bad_value

Rule = Literal["column", "row", "qkv", "vocab", "replicated", "expert_column", "expert_row"]
Part = Literal[
    "attention",
    "linear attention",
    "Mamba2",
    "routed experts",
    "shared expert",
    "latent projection",
    "dense MLP",
    "router",
    "lm_head",
    "MTP projection",
]

#: ``vocab_parallel_embedding.py`` pads the vocabulary to this multiple, and so that the ranks share it equally.
VOCABULARY_PADDING = 64


@dataclass(frozen=True)
class Gemm:
    """One GEMM of one layer.

    Attributes:
        name: SGLang's name of the (fused) projection below its layer, for example ``self_attn.qkv_proj``.
        part: what it belongs to.
        shards: N of each projection that is fused into it, in order.
        k: input features.
        rule: how tensor parallelism divides it. ``expert_*`` stand for one expert.
        modules: names in the checkpoint, below the layer's prefix; ``experts.*`` stands for every expert.
        heads: of a ``qkv`` rule: query heads (an output gate counts as more of them), key/value heads, head size.
        always_bf16: SGLang builds it without quantization, whatever the checkpoint's configuration says.
        groups: of heads that stay together, where ranks share whole ones; 0 if it does not matter.
    """

    name: str
    part: Part
    shards: tuple[int, ...]
    k: int
    rule: Rule
    modules: tuple[str, ...]
    heads: tuple[int, int, int] | None = None
    always_bf16: bool = False
    groups: int = 0

    @property
    def n(self) -> int:
        """Output features of the unsharded layer."""
        return sum(self.shards)

    @property
    def is_expert(self) -> bool:
        return self.rule in ("expert_column", "expert_row")


def shard(gemm: Gemm, tp: int, ep: int = 1) -> tuple[int, int]:
    """Return (N, K) on one of ``tp`` ranks, of which ``ep`` groups share out the experts.

    An expert is divided by ``tp / ep``; with ``ep == tp`` every rank has whole experts.

    Raises:
        ConfigError: the layer cannot be divided; the message names it.
    """
    if tp < 1 or ep < 1 or tp % ep:
        raise ConfigError(bad_value("--ep", ep, f"it must divide --tp {tp}"))
    parts = tp // ep if gemm.is_expert else tp
    if gemm.groups:
        _divide(gemm, gemm.groups, parts, "groups of heads")
    if gemm.rule in ("column", "expert_column"):
        return sum(_divide(gemm, width, parts, "N") for width in gemm.shards), gemm.k
    if gemm.rule in ("row", "expert_row"):
        return gemm.n, _divide(gemm, gemm.k, parts, "K")
    if gemm.rule == "qkv":
        return _qkv_width(gemm, tp), gemm.k
    if gemm.rule == "vocab":
        return padded_vocabulary(gemm.n, tp) // tp, gemm.k
    return gemm.n, gemm.k


def padded_vocabulary(size: int, tp: int) -> int:
    """Return the padded number of rows of an embedding or ``lm_head``."""
    multiple = VOCABULARY_PADDING if VOCABULARY_PADDING % tp == 0 else VOCABULARY_PADDING * tp
    return -(-size // multiple) * multiple


def kv_heads_per_rank(kv_heads: int, tp: int) -> int:
    """Return how many key/value heads a rank holds: at least one, copies of it on several ranks."""
    return max(1, kv_heads // tp)


def _qkv_width(gemm: Gemm, tp: int) -> int:
    if gemm.heads is None:
        raise ValueError(f"{gemm.name} has the rule qkv and no heads")
    q_heads, kv_heads, head_dim = gemm.heads
    smaller, larger = sorted((tp, kv_heads))
    if larger % smaller:
        raise ConfigError(_indivisible(gemm, f"{kv_heads} key/value heads", tp))
    return (_divide(gemm, q_heads, tp, "query heads") + 2 * kv_heads_per_rank(kv_heads, tp)) * head_dim


def _divide(gemm: Gemm, size: int, parts: int, what: str) -> int:
    if size % parts:
        raise ConfigError(_indivisible(gemm, f"{what} = {size}", parts))
    return size // parts


def _indivisible(gemm: Gemm, what: str, parts: int) -> str:
    return bad_value(
        "--tp", parts, f"{gemm.name} has {what}, which {parts} ranks cannot share equally; take another --tp"
    )
