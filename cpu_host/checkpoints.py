"""Tiny Qwen3 checkpoints in every NVFP4 flavour that SGLang reads, made on the spot in a second or two.

The same :class:`Spec` gives the same weights on every machine. They are random, with one property that makes
the check sharp: what a layer adds to the residual stream is a fifth of its size. Two correct servers round in
bfloat16 differently, that flips a few FP4 codes, and every flip is a whole step; undamped, the flips of one layer
cause more in the next until log-probabilities differ by as much as a mistake would make them differ (mean 0.22,
against 0.8 for scales a quarter too large). Damped, it is 0.03 against 0.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from cpu_host import nvfp4

Format = Literal["bf16", "modelopt", "modelopt-awq", "modelopt-w4a16", "compressed-tensors", "compressed-tensors-w4a16"]

#: ModelOpt's names of its algorithms.
_MODELOPT_ALGORITHM = {"modelopt": "NVFP4", "modelopt-awq": "NVFP4_AWQ", "modelopt-w4a16": "W4A16_NVFP4"}
#: Largest activation that is not clipped.
_INPUT_AMAX = 12.0
#: What a shard's scales are multiplied by if the shards of a fused projection shall differ.
_SHARD_FACTORS = {"q_proj": 1.0, "k_proj": 0.37, "v_proj": 1.9, "gate_proj": 0.61, "up_proj": 1.0}
#: How much smaller the layers that write to the residual stream are; see above.
_RESIDUAL_GAIN = {"o_proj": 0.2, "down_proj": 0.2}
#: ModelOpt folds the pre-scale of the other layers into the norm before them; SGLang cannot load it for fused ones.
_PRE_SCALED = ("o_proj", "down_proj")
_TEXT = "the quick brown fox jumps over the lazy dog. hello world, this is a tiny tokenizer."
_END = "<|endoftext|>"


@dataclass(frozen=True)
class Spec:
    """What to make.

    Attributes:
        format: how the linear layers are stored.
        odd: hidden and intermediate sizes, and so N and K of the layers, that are multiples of 16 only.
        different_scales: the shards of q/k/v and gate/up have their own global scales (weights and inputs).
        bias: bias on the attention projections.
        experts: number of routed experts of each layer in place of the dense MLP (Qwen3-MoE); 0 for none.
        draft: one more layer, with experts too, drafts the token after the next one (``Qwen3MoeForCausalLMMTP``).
        seed: other weights.
    """

    format: Format = "modelopt"
    odd: bool = False
    different_scales: bool = False
    bias: bool = False
    experts: int = 0
    draft: bool = False
    seed: int = 0

    @property
    def weight_only(self) -> bool:
        return self.format.endswith("w4a16")


def make(folder: Path, spec: Spec) -> Path:
    """Write the checkpoint into ``folder`` (created) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(spec)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if spec.format in _MODELOPT_ALGORITHM:
        (folder / "hf_quant_config.json").write_text(json.dumps(_modelopt_config(spec), indent=2), encoding="utf-8")
    write_tokenizer(folder)
    tensors: dict[str, Tensor] = {}
    for name, weight in _weights(config, spec):
        tensors.update(_stored(name, weight, spec))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_adapter(folder: Path, spec: Spec, *, rank: int = 8, seed: int = 100) -> Path:
    """Write a LoRA adapter (PEFT format) for every linear layer of the checkpoint that ``spec`` describes."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in _weights(_config(spec), spec):
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            continue
        n, k = weight.shape
        a = torch.randn(rank, k, generator=generator) / math.sqrt(k)
        b = torch.randn(n, rank, generator=generator) * weight.std().item()
        prefix = f"base_model.model.{module}"
        tensors |= {f"{prefix}.lora_A.weight": a.bfloat16(), f"{prefix}.lora_B.weight": b.bfloat16()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in tensors})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return folder


def linears_per_forward(spec: Spec) -> int:
    """How many calls of the backend one forward makes: q/k/v and gate/up run fused where they share scales."""
    attention, mlp = (4, 3) if spec.different_scales else (2, 2)
    return (attention if spec.experts else attention + mlp) * int(_config(spec)["num_hidden_layers"])


def _config(spec: Spec) -> dict[str, Any]:
    hidden, intermediate, heads, kv_heads, head_dim = (144, 176, 3, 1, 48) if spec.odd else (128, 256, 4, 2, 32)
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "attention_bias": spec.bias,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if spec.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": spec.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if spec.format.startswith("compressed-tensors"):
        config["quantization_config"] = _compressed_tensors_config(spec)
    return config


def _modelopt_config(spec: Spec) -> dict[str, Any]:
    quantization: dict[str, Any] = {
        "quant_algo": _MODELOPT_ALGORITHM[spec.format],
        "kv_cache_quant_algo": None,
        "group_size": nvfp4.BLOCK,
        "exclude_modules": ["lm_head", *(["*.mlp.gate"] if spec.experts else [])],
    }
    if spec.format == "modelopt-awq":
        quantization |= {"has_zero_point": False, "pre_quant_scale": True}
    return {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": quantization}


def _compressed_tensors_config(spec: Spec) -> dict[str, Any]:
    arguments = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": nvfp4.BLOCK,
    }
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**arguments, "dynamic": False}}
    group["input_activations"] = None if spec.weight_only else {**arguments, "dynamic": "local"}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _weights(config: dict[str, Any], spec: Spec) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the unquantised model by name, float64, in a fixed order."""
    generator = torch.Generator().manual_seed(spec.seed)

    def normal(std: float, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * std

    hidden, dim = config["hidden_size"], config["head_dim"]
    q_width, kv_width = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    widths = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}

    def linear(name: str, n: int, k: int) -> Iterator[tuple[str, Tensor]]:
        # The shards of a fused projection also differ in size if their scales shall differ.
        factor = _factor(name, spec) * _RESIDUAL_GAIN.get(name.rpartition(".")[2], 1.0)
        # Blocks of very different size, or scales in a wrong order would change little.
        sizes = torch.rand(n, k // nvfp4.BLOCK, generator=generator, dtype=torch.float64)
        sizes = torch.exp2(4 * sizes - 2)
        sizes = (sizes / sizes.square().mean().sqrt()).repeat_interleave(nvfp4.BLOCK, dim=1)
        yield f"{name}.weight", normal(factor / math.sqrt(k), n, k) * sizes
        if spec.bias and ".self_attn." in name:
            yield f"{name}.bias", normal(0.3, n)

    def layer(name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.input_layernorm.weight", 1.0 + normal(0.1, hidden)
        for shard, width in widths.items():
            yield from linear(f"{name}.self_attn.{shard}", width, hidden)
        yield from linear(f"{name}.self_attn.o_proj", hidden, q_width)
        yield f"{name}.self_attn.q_norm.weight", 1.0 + normal(0.1, dim)
        yield f"{name}.self_attn.k_norm.weight", 1.0 + normal(0.1, dim)
        yield f"{name}.post_attention_layernorm.weight", 1.0 + normal(0.1, hidden)
        if spec.experts:
            yield f"{name}.mlp.gate.weight", normal(2.0 / math.sqrt(hidden), spec.experts, hidden)
        for mlp, width in _mlps(f"{name}.mlp", config, spec):
            yield from linear(f"{mlp}.gate_proj", width, hidden)
            yield from linear(f"{mlp}.up_proj", width, hidden)
            yield from linear(f"{mlp}.down_proj", hidden, width)

    yield "model.embed_tokens.weight", normal(1.0, config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        yield from layer(f"model.layers.{index}")
    yield "model.norm.weight", 1.0 + normal(0.1, hidden)
    yield "lm_head.weight", normal(2.0 / math.sqrt(hidden), config["vocab_size"], hidden)
    if spec.draft:
        for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield f"mtp.{norm}.weight", 1.0 + normal(0.1, hidden)
        # The last token's embedding goes on as it is: what it leads to in the target, it often leads to here too.
        embedding, state = torch.eye(hidden, dtype=torch.float64), normal(0.2 / math.sqrt(hidden), hidden, hidden)
        yield "mtp.fc.weight", torch.cat([embedding, state], dim=1)
        yield from layer("mtp.layers.0")


def _mlps(name: str, config: dict[str, Any], spec: Spec) -> list[tuple[str, int]]:
    """Names and widths of a layer's MLPs: one, or one for each expert."""
    if not spec.experts:
        return [(name, config["intermediate_size"])]
    return [(f"{name}.experts.{i}", config["moe_intermediate_size"]) for i in range(spec.experts)]


def _stored(name: str, weight: Tensor, spec: Spec) -> dict[str, Tensor]:
    """The tensors that the checkpoint holds for one tensor of the model."""
    module = name.removesuffix(".weight")
    if spec.format == "bf16" or not module.endswith("_proj"):
        return {name: weight.to(torch.bfloat16)}
    extra: dict[str, Tensor] = {}
    if spec.format == "modelopt-awq" and module.endswith(_PRE_SCALED):
        # What the activation is multiplied by at run time is divided out of the weight here.
        pre_scale = _pre_quant_scale(weight.shape[1])
        weight = weight / pre_scale.to(torch.float64)
        extra[f"{module}.pre_quant_scale"] = pre_scale
    encode = _weight_encode_scale(module, spec)
    codes, scale_codes = nvfp4.quantize(weight, encode.item())
    packed = nvfp4.pack(codes)
    block_scales = scale_codes.to(torch.uint8).view(torch.float8_e4m3fn)
    input_encode = _input_encode_scale(module, spec)
    if spec.format.startswith("modelopt"):
        extra |= {f"{module}.weight": packed, f"{module}.weight_scale": block_scales}
        extra[f"{module}.weight_scale_2"] = 1 / encode
        if not spec.weight_only:
            extra[f"{module}.input_scale"] = 1 / input_encode
    else:
        extra |= {f"{module}.weight_packed": packed, f"{module}.weight_scale": block_scales}
        extra[f"{module}.weight_global_scale"] = encode.reshape(1)
        if not spec.weight_only:
            extra[f"{module}.input_global_scale"] = input_encode.reshape(1)
    return extra


def _factor(module: str, spec: Spec) -> float:
    return _SHARD_FACTORS.get(module.rpartition(".")[2], 1.0) if spec.different_scales else 1.0


def _weight_encode_scale(module: str, spec: Spec) -> Tensor:
    """Clips nothing below 6 standard deviations of the largest blocks."""
    amax = 1.2 * _factor(module, spec)
    return torch.tensor(nvfp4.E2M1_MAX * nvfp4.E4M3_MAX / amax, dtype=torch.float32)


def _input_encode_scale(module: str, spec: Spec) -> Tensor:
    amax = _INPUT_AMAX / _factor(module, spec)
    return torch.tensor(nvfp4.E2M1_MAX * nvfp4.E4M3_MAX / amax, dtype=torch.float32)


def _pre_quant_scale(k: int) -> Tensor:
    """Between 0.7 and 1.4."""
    return (1.05 + 0.35 * torch.sin(torch.arange(k, dtype=torch.float64))).to(torch.bfloat16)


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer, with settings that every supported transformers release reads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_TEXT] * 50, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _END,
        "eos_token": _END,
        "pad_token": _END,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
