"""Feed-forward layers: dense, routed experts, shared experts, router."""

from __future__ import annotations

from sglang_sm120.models.config import Reader
from sglang_sm120.models.gemms import Gemm, Part


def experts(read: Reader) -> int:
    """Number of routed experts of a layer, 0 for a dense model."""
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if read.config.get(name):
            return read.number(name)
    return 0


def top_k(read: Reader) -> int:
    """How many routed experts a token takes."""
    return read.number("num_experts_per_tok") if experts(read) else 0


def dense(read: Reader, index: int) -> tuple[Gemm, ...]:
    """A dense model's layer; all are alike, whatever ``index``."""
    return _pair(read, "mlp", "dense MLP", read.number("intermediate_size"))


def qwen(read: Reader, index: int) -> tuple[Gemm, ...]:
    """Qwen3-MoE, Qwen3-Next, Qwen3.5; ``mlp_only_layers`` and ``decoder_sparse_step`` make layers dense."""
    step = read.optional("decoder_sparse_step", 1) or 1
    if not experts(read) or index in (read.config.get("mlp_only_layers") or ()) or (index + 1) % step:
        return dense(read, index)
    gemms = _routed(read, "mlp", read.number("moe_intermediate_size"), ("gate_proj", "up_proj", "down_proj"))
    shared = read.optional("shared_expert_intermediate_size", 0)
    if shared:
        gemms += _pair(read, "mlp.shared_expert", "shared expert", shared)
        gate = "mlp.shared_expert_gate"
        gemms += (Gemm(gate, "router", (1,), read.number("hidden_size"), "replicated", (gate,), always_bf16=True),)
    return gemms


def deepseek(read: Reader, index: int) -> tuple[Gemm, ...]:
    """DeepSeek-V3, Kimi-K2, GLM: the first ``first_k_dense_replace`` layers are dense."""
    if not experts(read) or index < read.optional("first_k_dense_replace", 0):
        return dense(read, index)
    inner = read.number("moe_intermediate_size")
    gemms = _routed(read, "mlp", inner, ("gate_proj", "up_proj", "down_proj"))
    shared = read.optional("n_shared_experts", 0)
    return gemms + _pair(read, "mlp.shared_experts", "shared expert", shared * inner) if shared else gemms


def minimax(read: Reader, index: int) -> tuple[Gemm, ...]:
    """MiniMax-M2: routed experts in every layer, no shared ones."""
    return _routed(read, "block_sparse_moe", read.number("intermediate_size"), ("w1", "w3", "w2"))


def _routed(read: Reader, block: str, inner: int, names: tuple[str, str, str]) -> tuple[Gemm, ...]:
    hidden = read.number("hidden_size")
    gate, up, down = (f"{block}.experts.*.{name}" for name in names)
    router = f"{block}.gate"
    part: Part = "routed experts"
    return (
        Gemm(router, "router", (experts(read),), hidden, "replicated", (router,), always_bf16=True),
        Gemm(f"{block}.experts.w13", part, (inner, inner), hidden, "expert_column", (gate, up)),
        Gemm(f"{block}.experts.w2", part, (hidden,), inner, "expert_row", (down,)),
    )


def _pair(read: Reader, block: str, part: Part, inner: int) -> tuple[Gemm, ...]:
    hidden = read.number("hidden_size")
    return (
        Gemm(
            f"{block}.gate_up_proj", part, (inner, inner), hidden, "column", (f"{block}.gate_proj", f"{block}.up_proj")
        ),
        Gemm(f"{block}.down_proj", part, (hidden,), inner, "row", (f"{block}.down_proj",)),
    )
