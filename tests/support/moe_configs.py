"""Configurations of tiny MoE models, without weights: all that SGLang reads while it resolves its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "mlp_only_layers": [],
}
_EXPERT = "model.layers.0.mlp.experts.0.gate_proj"
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_FP4, "dynamic": False},
            "input_activations": {**_FP4, "dynamic": "local"},
        }
    },
}


def _mixed(algorithm: str) -> dict[str, Any]:
    return {
        "quant_method": "modelopt_mixed",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            _EXPERT: {"quant_algo": algorithm, "group_size": 16},
        },
    }


#: Name -> ``quantization_config`` of config.json.
QUANTIZATION_CONFIGS: dict[str, dict[str, Any]] = {
    "modelopt_fp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
    "modelopt_mixed": _mixed("NVFP4"),
    "nvfp4_weight_only": _mixed("W4A16_NVFP4"),
    "mixed, experts in FP8": _mixed("FP8"),
    "compressed-tensors": _COMPRESSED_TENSORS,
}


def write_moe_config(folder: Path, name: str, **changes: Any) -> Path:
    """Write ``config.json`` of one kind of checkpoint below ``folder`` and return its folder.

    ``changes`` replace entries of the model's configuration; ``None`` removes one.
    """
    target = folder / name.replace(" ", "_").replace(",", "")
    target.mkdir(parents=True, exist_ok=True)
    config = {**_MODEL, "quantization_config": QUANTIZATION_CONFIGS[name], **changes}
    written = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(written), encoding="utf-8")
    return target
