"""Speculative decoding (EAGLE, MTP) without a GPU: what SGLang 0.5.23 has for it needs Intel's AMX and its own kernels.

SGLang's own worker drafts, verifies and accepts. Put in here are the small kernels that it calls on a CPU, for the
case of one chain of drafts (``--speculative-eagle-topk 1``), and attention over drafted tokens for ``torch_native``,
which SGLang offers for ``intel_amx`` alone. Anything else still raises.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from cpu_host.runtime import after_import

_FACTORY = "sglang.srt.speculative.draft_utils"
_ATTENTION = "sglang.srt.layers.attention.torch_native_backend"
_MTP = "sglang.srt.models.qwen3_moe_mtp"


def arm() -> None:
    after_import.after("sgl_kernel", _add_kernels)
    after_import.after(_ATTENTION, _attend_to_drafts)
    after_import.after(_FACTORY, _offer_torch_native)
    after_import.after(_MTP, _share_without_cuda)


# --- kernels ---------------------------------------------------------------------------------------------------------


def copy_all_layer_kv_cache_cpu(pointers: Any, strides: Any, target: Any, source: Any) -> None:
    """SGLang calls it once to warm it up; branches of a tree would need it, a chain does not."""
    if not target.equal(source):
        raise NotImplementedError("rows of the KV cache are moved for branches of drafts only; use one chain")


def assign_extend_cache_locs_cpu(requests: Any, table: Any, start: Any, end: Any, out: Any, width: int) -> None:
    """Slots of positions [start, end) of each request, one request after the other."""
    position = 0
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        out[position : position + last - first] = table[request, first:last]
        position += last - first


def assign_req_to_token_pool_cpu(requests: Any, table: Any, start: Any, end: Any, slots: Any, width: int) -> None:
    """The other direction: enter slots into the table."""
    position = 0
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        table[request, first:last] = slots[position : position + last - first]
        position += last - first


def assign_draft_cache_locs_contiguous_cpu(
    requests: Any, table: Any, lengths: Any, out: Any, width: int, topk: int, steps: int
) -> None:
    """Slots of the positions after the end of each request."""
    assign_extend_cache_locs_cpu(requests, table, lengths, lengths + topk * steps, out, width)


def fill_bonus_tokens_cpu(tokens: Any, counts: Any, bonus: Any, width: int) -> None:
    """The last accepted token of each request."""
    bonus.copy_(tokens.view(-1, width).gather(1, counts.long().view(-1, 1) - 1).view(-1))


def fill_accept_out_cache_loc_cpu(accepted: Any, slots: Any, out: Any) -> None:
    """Slots of the accepted tokens, closed up."""
    kept = slots[accepted[accepted >= 0].long()]
    out[: len(kept)] = kept


def build_tree_kernel_efficient_cpu(
    parents: Any, selected: Any, lengths: Any, mask: Any, positions: Any, index: Any, following: Any, sibling: Any,
    topk: int, depth: int, count: int, mask_mode: Any,
) -> None:  # fmt: skip
    """A chain: each token follows the one before it. Its mask is causal attention's, which needs none."""
    import torch

    if topk != 1:
        raise NotImplementedError(f"topk={topk}: only a chain of drafts runs here; use --speculative-eagle-topk 1")
    steps = torch.arange(count)
    positions.copy_((lengths.view(-1, 1) + steps).view(-1))
    index.copy_(torch.arange(index.numel()).view_as(index))
    following.copy_(torch.where(steps < count - 1, steps + 1, -1).expand_as(following))
    sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: Any, accept_index: Any, accept_token_num: Any, candidates: Any, retrive_index: Any,
    retrive_next_token: Any, retrive_next_sibling: Any, target_predict: Any,
) -> None:  # fmt: skip
    """Accept drafts from the first on, for as long as the target would have said the same."""
    target = target_predict.view_as(candidates)
    agrees = (candidates[:, 1:] == target[:, :-1]).long().cumprod(1).sum(1)
    for request, accepted in enumerate(agrees.tolist()):
        rows = retrive_index[request, : accepted + 1]
        accept_index[request, : accepted + 1] = rows.to(accept_index.dtype)
        predicts[rows.long()] = target[request, : accepted + 1].to(predicts.dtype)
        accept_token_num[request] = accepted


_KERNELS = (
    copy_all_layer_kv_cache_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    assign_draft_cache_locs_contiguous_cpu,
    fill_bonus_tokens_cpu,
    fill_accept_out_cache_loc_cpu,
    build_tree_kernel_efficient_cpu,
    verify_tree_greedy_cpu,
)


def _add_kernels(module: ModuleType) -> None:
    for kernel in _KERNELS:
        vars(module)[kernel.__name__] = kernel


# --- attention -------------------------------------------------------------------------------------------------------


class _Batch:
    """A batch of SGLang with some fields replaced."""

    def __init__(self, batch: Any, **fields: Any) -> None:
        self._batch = batch
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def _attend_to_drafts(module: ModuleType) -> None:
    """Let a step of the draft see the tokens drafted so far, and each token to be verified those in front of it."""
    import torch

    cls: Any = vars(module)["TorchNativeAttnBackend"]
    extend, decode = cls.forward_extend, cls.forward_decode

    def forward_extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_target_verify():
            count = batch.spec_info.draft_token_num
            lengths = batch.seq_lens
            new = torch.full_like(lengths, count)
            batch = _Batch(batch, seq_lens=lengths + count, extend_prefix_lens=lengths, extend_seq_lens=new)
        return extend(self, q, k, v, layer, batch, *args, **kwargs)

    def forward_decode(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafted: int = getattr(self, "cpu_host_drafted", 0)
        if drafted:
            batch = _Batch(batch, seq_lens=batch.seq_lens + drafted)
        return decode(self, q, k, v, layer, batch, *args, **kwargs)

    cls.forward_extend, cls.forward_decode = forward_extend, forward_decode


class _Steps:
    """One attention backend for each step of the draft, as SGLang's containers have them."""

    def __init__(self, backends: list[Any]) -> None:
        self.attn_backends = backends
        for step, backend in enumerate(backends):
            backend.cpu_host_drafted = step + 1

    def init_forward_metadata(self, batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(batch)


def _offer_torch_native(module: ModuleType) -> None:
    cls: Any = vars(module)["DraftBackendFactory"]

    def backend(self: Any) -> Any:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return TorchNativeAttnBackend(self.draft_model_runner)

    def create_decode_backend(self: Any) -> Any:
        return _Steps([backend(self) for _ in range(self.speculative_num_steps - 1)])

    cls.create_decode_backend, cls.create_draft_extend_backend = create_decode_backend, backend


def _share_without_cuda(module: ModuleType) -> None:
    """SGLang's own synchronizes with a GPU after it has given the target's embedding and head to the draft."""
    cls: Any = vars(module)["Qwen3MoeForCausalLMMTP"]

    def set_embed_and_head(self: Any, embed: Any, head: Any) -> None:
        self.model.embed_tokens.weight, self.lm_head.weight = embed, head

    cls.set_embed_and_head = set_embed_and_head
