"""The independent judge: the checkpoint in Hugging Face transformers, quantised layers computed in float64.

Everything but the quantised linears is transformers' own code in bfloat16, the type that the server computes
in, so that both round between layers alike. A quantised linear dequantises its weight, quantises and
dequantises its input by the checkpoint's own scales, multiplies in float64, adds the bias and rounds once.
q, k, v, gate and up stay separate layers with their own scales; nothing is imported from ``sglang_sm120``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from cpu_host import nvfp4


class _QuantizedLinear(nn.Module):
    """A linear layer read from the tensors that a checkpoint holds for it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        if "weight_packed" in tensors:  # compressed-tensors stores encode scales
            packed = tensors["weight_packed"]
            encode = tensors["weight_global_scale"].item()
            input_encode = tensors["input_global_scale"].item() if "input_global_scale" in tensors else None
        else:  # ModelOpt stores decode scales; the runtime inverts the input's in float32
            packed = tensors["weight"]
            encode = 1.0 / tensors["weight_scale_2"].item()
            input_encode = (1.0 / tensors["input_scale"]).item() if "input_scale" in tensors else None
        scale_codes = tensors["weight_scale"].view(torch.uint8).to(torch.int64)
        self.weight64 = nvfp4.dequantize(nvfp4.unpack(packed), scale_codes, encode)
        self.input_encode = input_encode
        self.pre_quant_scale = tensors.get("pre_quant_scale")
        self.bias = tensors.get("bias")
        self.adapter: tuple[Tensor, Tensor, float] | None = None  # A, B and the scaling of a LoRA adapter

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.pre_quant_scale is not None:
            rows = rows * self.pre_quant_scale
        values = rows.to(torch.float64)
        if self.input_encode is not None:
            values = nvfp4.dequantize(*nvfp4.quantize(values, self.input_encode), self.input_encode)
        out = values @ self.weight64.T
        if self.bias is not None:
            out = out + self.bias.to(torch.float64)
        out = out.to(x.dtype)
        if self.adapter is not None:  # as LoRA servers do: in the model's type, beside the finished layer
            a, b, scaling = self.adapter
            out = out + (x.reshape(rows.shape) @ a.T) @ b.T * scaling
        return out.reshape(*x.shape[:-1], -1)


class _Experts(nn.Module):
    """Routed experts in float64, the activation held in float32 between the two layers of an expert.

    Expects quantised layers to be put at ``experts.N.gate_proj`` and so on.
    """

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Module() for _ in range(config.num_experts))
        self.top_k, self.normalised = config.num_experts_per_tok, config.norm_topk_prob

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).float().softmax(-1).topk(self.top_k)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros(rows.shape, dtype=torch.float64)
        for index, expert in enumerate(self.experts):
            row, slot = torch.nonzero(chosen == index, as_tuple=True)
            values = rows[row].to(torch.float64)
            gate, up, down = (expert.get_submodule(f"{name}_proj") for name in ("gate", "up", "down"))
            inner = nn.functional.silu(gate(values)) * up(values)
            part = down(inner.float().double())
            out.index_add_(0, row, part * weights[row, slot].double().unsqueeze(-1))
        return out.to(x.dtype).reshape(x.shape)


@dataclass(frozen=True)
class Comparison:
    """How far a server's log-probabilities are from the reference's.

    Two correct servers differ because they round between layers in another order and then quantise; measured
    here: mean 0.03, largest 0.15. The planted mistakes of the tests move the mean by 0.3 and more.
    """

    mean: float
    largest: float

    MEAN_BOUND: ClassVar[float] = 0.1
    LARGEST_BOUND: ClassVar[float] = 0.5

    @property
    def agrees(self) -> bool:
        return self.mean <= self.MEAN_BOUND and self.largest <= self.LARGEST_BOUND

    def __str__(self) -> str:
        mean = f"mean difference {self.mean:.4f} (bound {self.MEAN_BOUND})"
        return f"{mean}, largest {self.largest:.4f} (bound {self.LARGEST_BOUND})"


def compare(
    model: Qwen3ForCausalLM, prompt: Sequence[int], output: Sequence[int], served: Sequence[float]
) -> Comparison:
    """Compare the served log-probabilities of the prompt after its first token, and of the output."""
    expected = token_log_probabilities(model, prompt[:1], [*prompt[1:], *output])
    differences = [abs(a - b) for a, b in zip(expected, served, strict=True)]
    return Comparison(sum(differences) / len(differences), max(differences))


def load(folder: Path) -> Qwen3ForCausalLM:
    """Build the model of a checkpoint folder."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings.pop("quantization_config", None)  # or transformers would look for a quantizer of its own
    if settings["model_type"] == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, attn_implementation="eager"))
        for layer in model.model.layers:
            layer.mlp = _Experts(model.config)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**settings, attn_implementation="eager"))
    model = model.to(torch.bfloat16).eval()
    stored = load_file(folder / "model.safetensors")
    tensors = {
        name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")
    }  # a draft changes nothing
    quantized = {name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")}
    for module in quantized:
        parts = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == module}
        parent, _, leaf = module.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _QuantizedLinear(parts))
    plain = {n: t for n, t in tensors.items() if n.rpartition(".")[0] not in quantized}
    missing, unexpected = model.load_state_dict(plain, strict=False)
    if missing or unexpected:
        raise ValueError(f"checkpoint does not fit the model: missing {missing}, unexpected {unexpected}")
    return model


def adapt(model: Qwen3ForCausalLM, adapter: Path) -> Qwen3ForCausalLM:
    """Put a LoRA adapter in PEFT format beside the quantised layers of the model."""
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            model.get_submodule(module).adapter = (a, b, settings["lora_alpha"] / settings["r"])
    return model


@torch.no_grad()
def log_probabilities(model: Qwen3ForCausalLM, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities of the whole vocabulary after each token, float64 ``[len(tokens), vocabulary]``."""
    logits = model(input_ids=torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.to(torch.float64), dim=-1)


def token_log_probabilities(model: Qwen3ForCausalLM, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Log-probability of each output token given the prompt and the output before it."""
    table = log_probabilities(model, [*prompt, *output])
    first = len(prompt) - 1
    return [table[first + i, token].item() for i, token in enumerate(output)]
