"""Attention of every kind: its projections, and what it keeps of the context."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_sm120.models.config import Reader
from sglang_sm120.models.gemms import Gemm, Part, kv_heads_per_rank


@dataclass(frozen=True)
class ContextMemory:
    """Sizes in elements for one sequence and one layer, before sharding.

    Attributes:
        kv_heads, head_dim: of a layer with keys and values.
        latent: width of the latent that takes the place of keys and values; the same on every rank. 0 without.
        selected: sparse attention reads the latents of this many tokens at most. 0 without.
        index: width of the FP8 keys with which sparse attention selects, read for every token.
        state: elements of the recurrent state of a gated delta net or of Mamba2. 0 without.
        convolution: elements of its convolution state.
        state_bytes: per element of the recurrent state.
    """

    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    selected: int = 0
    index: int = 0
    state: int = 0
    convolution: int = 0
    state_bytes: int = 4

    def kv_traffic(self, tp: int, context: int, kv_bytes: int) -> int:
        """Bytes that one step reads of the context per sequence, layer and rank."""
        if self.latent:
            tokens = min(context, self.selected) if self.selected else context
            return tokens * self.latent * kv_bytes + context * self.index
        return 2 * kv_heads_per_rank(self.kv_heads, tp) * self.head_dim * kv_bytes * context

    def state_traffic(self, tp: int) -> float:
        """Bytes that one step reads and writes per sequence, layer and rank for a recurrent state."""
        return 2 * (self.state * self.state_bytes + self.convolution * 2) / tp


def grouped(read: Reader, *, gate: bool = False) -> tuple[Gemm, ...]:
    """Grouped-query attention; with ``gate`` the query projection also makes an output gate of the same width."""
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    kv_heads = read.number("num_key_value_heads", "num_attention_heads")
    dim = _head_dim(read)
    q_heads = 2 * heads if gate else heads
    modules = tuple(f"self_attn.{name}_proj" for name in "qkv")
    widths = (q_heads * dim, kv_heads * dim, kv_heads * dim)
    return (
        Gemm("self_attn.qkv_proj", "attention", widths, hidden, "qkv", modules, heads=(q_heads, kv_heads, dim)),
        Gemm("self_attn.o_proj", "attention", (hidden,), heads * dim, "row", ("self_attn.o_proj",)),
    )


def gated(read: Reader) -> tuple[Gemm, ...]:
    """The full-attention layers of Qwen3-Next and Qwen3.5 (``attn_output_gate``, on unless it is switched off)."""
    return grouped(read, gate=read.config.get("attn_output_gate") is not False)


def latent(read: Reader) -> tuple[Gemm, ...]:
    """Multi-head latent attention of DeepSeek, with the indexer of V3.2 and GLM-5 where there is one.

    ``kv_b_proj`` is multiplied in its absorbed form when decoding; the bytes are those of the unquantized weight.
    """
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    rank, rope = read.number("kv_lora_rank"), read.number("qk_rope_head_dim")
    nope, value = read.number("qk_nope_head_dim"), read.number("v_head_dim")
    q_rank = read.number("q_lora_rank")
    gemms = [
        _attention("fused_qkv_a_proj_with_mqa", (q_rank, rank + rope), hidden, "q_a_proj", "kv_a_proj_with_mqa"),
        Gemm("self_attn.q_b_proj", "attention", (heads * (nope + rope),), q_rank, "column", ("self_attn.q_b_proj",)),
        Gemm("self_attn.kv_b_proj", "attention", (heads * (nope + value),), rank, "column", ("self_attn.kv_b_proj",)),
        Gemm("self_attn.o_proj", "attention", (hidden,), heads * value, "row", ("self_attn.o_proj",)),
    ]
    if read.config.get("index_n_heads"):
        index_heads, index_dim = read.number("index_n_heads"), read.number("index_head_dim")
        gemms += [
            _attention("indexer.wq_b", (index_heads * index_dim,), q_rank, "indexer.wq_b"),
            _attention("indexer.wk", (index_dim,), hidden, "indexer.wk"),
            _attention("indexer.weights_proj", (index_heads,), hidden, "indexer.weights_proj"),
        ]
    return tuple(gemms)


def delta_net(read: Reader) -> tuple[Gemm, ...]:
    """The gated delta net of Qwen3-Next and Qwen3.5."""
    hidden = read.number("hidden_size")
    k_heads, v_heads = read.number("linear_num_key_heads"), read.number("linear_num_value_heads")
    keys, values = k_heads * read.number("linear_key_head_dim"), v_heads * read.number("linear_value_head_dim")
    part: Part = "linear attention"
    qkvz = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    ba = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    return (
        Gemm("linear_attn.in_proj_qkvz", part, (keys, keys, values, values), hidden, "column", qkvz),
        Gemm("linear_attn.in_proj_ba", part, (v_heads, v_heads), hidden, "column", ba),
        Gemm("linear_attn.out_proj", part, (hidden,), values, "row", ("linear_attn.out_proj",)),
    )


def context_memory(read: Reader, *, latent: bool, linear: bool) -> ContextMemory:
    """Read what a sequence keeps. The recurrent state is float32 unless ``mamba_ssm_dtype`` says otherwise."""
    if latent:
        return ContextMemory(
            latent=read.number("kv_lora_rank") + read.number("qk_rope_head_dim"),
            selected=read.optional("index_topk", 0),
            index=read.optional("index_head_dim", 0),
        )
    kv_heads = read.number("num_key_value_heads", "num_attention_heads")
    if not linear:
        return ContextMemory(kv_heads, _head_dim(read))
    k_dim, v_dim = read.number("linear_key_head_dim"), read.number("linear_value_head_dim")
    k_heads, v_heads = read.number("linear_num_key_heads"), read.number("linear_num_value_heads")
    taps = read.optional("linear_conv_kernel_dim", 4)
    return ContextMemory(
        kv_heads,
        _head_dim(read),
        state=v_heads * v_dim * k_dim,
        convolution=(2 * k_heads * k_dim + v_heads * v_dim) * (taps - 1),
        state_bytes=state_bytes(read),
    )


def state_bytes(read: Reader) -> int:
    """Bytes of an element of the recurrent state."""
    return 2 if read.config.get("mamba_ssm_dtype") in ("bfloat16", "float16") else 4


def _attention(name: str, shards: tuple[int, ...], k: int, *modules: str) -> Gemm:
    """A projection that every rank holds whole."""
    names = tuple(f"self_attn.{module}" for module in modules)
    return Gemm(f"self_attn.{name}", "attention", shards, k, "replicated", names)


def _head_dim(read: Reader) -> int:
    return read.optional("head_dim", 0) or read.number("hidden_size") // read.number("num_attention_heads")
