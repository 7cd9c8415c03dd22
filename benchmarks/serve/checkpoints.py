"""Checkpoints of random weights in the geometry of real models, ModelOpt NVFP4, made on the GPU in seconds.

The weights say nothing; shapes, formats and sizes are those that a served model has. A layer's output is as large as
its input (the standard deviation of a weight is ``K**-0.5``), so that nothing overflows in 36 layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cpu_host.checkpoints import write_tokenizer

BLOCK = 16
#: Root mean square of the 16 values of e2m1, each as likely as the others.
_CODES_RMS = math.sqrt(137 / 16)
#: Block scales are uniform over [64, 448), so that e4m3 rounds each by less than 1/16.
_SCALE_LOW, _SCALE_HIGH = 64.0, 448.0
_SCALES_RMS = math.sqrt((_SCALE_HIGH**3 - _SCALE_LOW**3) / (3 * (_SCALE_HIGH - _SCALE_LOW)))
#: Activations up to this size are not clipped: their global scale is amax / (6 * 448).
_INPUT_AMAX = 8.0
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
#: How much smaller the layers that write to the residual stream are where a draft is to be accepted.
_DRAFTED_GAIN = 0.02


@dataclass(frozen=True)
class Geometry:
    """Sizes of a Qwen3 or, with experts, a Qwen3-MoE model.

    Attributes:
        name: what reports call it.
        hidden, layers, heads, kv_heads, head_dim, vocab: as in ``config.json``.
        intermediate: width of the MLP, or of one expert.
        experts: routed experts of a layer; 0 makes the model dense.
        experts_per_token: how many a token is sent to.
        draft: whether one more layer, with experts too, drafts the token after the next one (multi-token prediction;
            SGLang's ``Qwen3MoeForCausalLMMTP``). Layers add little to the residual stream then: the next token depends
            on the last one almost alone, both for target and draft, so that random weights get drafts accepted.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    draft: bool = False

    def __post_init__(self) -> None:
        if self.draft and not self.experts:
            raise ValueError(
                "draft=True needs experts: SGLang drafts with a layer of the checkpoint for Qwen3-MoE only"
            )

    def with_layers(self, layers: int | None) -> Geometry:
        """The same with another number of layers; ``None`` keeps it."""
        return self if layers is None else replace(self, layers=layers)


#: Sizes from the models' own config.json. The MoE one has plain attention in each layer: Qwen3.6's linear attention
#: is no FP4 GEMM, and its experts, whose shapes these are, are what is measured.
GEOMETRIES = {
    "dense": Geometry("Qwen3-8B geometry", 4096, 12288, 36, 32, 8, 128, 151936),
    "moe": Geometry("experts of Qwen3.6-35B-A3B, plain attention", 2048, 512, 16, 16, 2, 256, 248320, 256, 8),
}


def make(folder: Path, geometry: Geometry, device: str = "cuda", seed: int = 0) -> Path:
    """Write the checkpoint into ``folder`` (created), one file for each layer, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(geometry), indent=1), encoding="utf-8")
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": BLOCK,
        "exclude_modules": ["lm_head", *(["*.mlp.gate"] if geometry.experts else [])],
    }
    settings = {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    write_tokenizer(folder)
    generator = torch.Generator(device).manual_seed(seed)
    files: dict[str, str] = {}
    size = 0
    for index, tensors in enumerate(_parts(geometry, generator)):
        name = f"model-{index:05d}.safetensors"
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, folder / name, {"format": "pt"})
        files |= dict.fromkeys(tensors, name)
        size += sum(value.numel() * value.element_size() for value in tensors.values())
    index_text = json.dumps({"metadata": {"total_size": size}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index_text, encoding="utf-8")
    return folder


def _config(geometry: Geometry) -> dict[str, Any]:
    kind = "qwen3_moe" if geometry.experts else "qwen3"
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if geometry.experts else "Qwen3ForCausalLM"],
        "model_type": kind,
        "dtype": "bfloat16",
        "vocab_size": geometry.vocab,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if geometry.experts:
        config |= {
            "num_experts": geometry.experts,
            "num_experts_per_tok": geometry.experts_per_token,
            "moe_intermediate_size": geometry.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.0,
        }
    return config


def _parts(geometry: Geometry, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file."""
    for index in range(geometry.layers):
        yield dict(_layer(geometry, f"model.layers.{index}", generator))
    if geometry.draft:
        yield dict(_draft(geometry, generator))
    hidden, device = geometry.hidden, generator.device

    def normal(std: float, *shape: int) -> Tensor:
        return (torch.randn(*shape, device=device, generator=generator) * std).to(torch.bfloat16)

    yield {
        "model.embed_tokens.weight": normal(1.0, geometry.vocab, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": normal(hidden**-0.5, geometry.vocab, hidden),
    }


def _draft(geometry: Geometry, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """The draft's layer; in front of it a projection of the last token's embedding and the target's hidden state."""
    hidden, device = geometry.hidden, generator.device
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{name}.weight", torch.ones(hidden, dtype=torch.bfloat16)
    of_state = torch.randn(hidden, hidden, device=device, generator=generator) * (_DRAFTED_GAIN * hidden**-0.5)
    yield "mtp.fc.weight", torch.cat([torch.eye(hidden, device=device), of_state], dim=1).to(torch.bfloat16)
    yield from _layer(geometry, "mtp.layers.0", generator)


def _layer(geometry: Geometry, prefix: str, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, dim = geometry.hidden, geometry.head_dim
    q_width, kv_width = geometry.heads * dim, geometry.kv_heads * dim
    added = _DRAFTED_GAIN if geometry.draft else 1.0
    for name, size in {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.q_norm": dim,
        "self_attn.k_norm": dim,
    }.items():
        yield f"{prefix}.{name}.weight", torch.ones(size, dtype=torch.bfloat16)
    for name, n in (("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)):
        yield from _linear(f"{prefix}.self_attn.{name}", n, hidden, generator)
    yield from _linear(f"{prefix}.self_attn.o_proj", hidden, q_width, generator, gain=added)
    if geometry.experts:
        router = torch.randn(geometry.experts, hidden, device=generator.device, generator=generator)
        yield f"{prefix}.mlp.gate.weight", (router * hidden**-0.5).to(torch.bfloat16)
    for expert in [f".experts.{index}" for index in range(geometry.experts)] or [""]:
        for name in ("gate_proj", "up_proj"):
            yield from _linear(f"{prefix}.mlp{expert}.{name}", geometry.intermediate, hidden, generator)
        yield from _linear(f"{prefix}.mlp{expert}.down_proj", hidden, geometry.intermediate, generator, gain=added)


def _linear(
    name: str, n: int, k: int, generator: torch.Generator, *, gain: float = 1.0
) -> Iterator[tuple[str, Tensor]]:
    """The four tensors of a layer: packed codes [N, K/2], block scales [N, K/16], global scales of weight and input.

    ``gain`` times the size of its input is the size of its output.
    """
    device = generator.device
    spread = _SCALE_HIGH - _SCALE_LOW
    scales = torch.rand(n, k // BLOCK, device=device, generator=generator) * spread + _SCALE_LOW
    yield f"{name}.weight", torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=generator)
    yield f"{name}.weight_scale", scales.to(torch.float8_e4m3fn)
    yield f"{name}.weight_scale_2", torch.tensor(gain * k**-0.5 / (_CODES_RMS * _SCALES_RMS))
    yield f"{name}.input_scale", torch.tensor(_INPUT_AMAX / (_E2M1_MAX * _E4M3_MAX))


def description(geometry: Geometry) -> dict[str, Any]:
    """The geometry as it stands in reports."""
    return asdict(geometry)
