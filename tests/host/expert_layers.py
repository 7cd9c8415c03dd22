"""NVFP4 expert layers of the installed SGLang, with random weights, and what they must compute.

Used by the tests of this folder on one release, and as a program by ``tests/matrix`` on every release.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sglang_sm120 import reference
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.host import moe_choice
from sglang_sm120.host.state import STATE
from sglang_sm120.layout import ScaleLayout

KINDS = ("ModelOpt", "compressed-tensors")


@dataclass
class Shape:
    """Sizes of one rank's experts. ``inner`` is what tensor parallelism leaves of the intermediate size."""

    experts: int = 6
    hidden: int = 128
    inner: int = 64
    top_k: int = 3
    gated: bool = True
    ranks: int = 1  # expert-parallel
    rank: int = 0
    tensor_parallel: int = 1
    config: dict[str, Any] = field(default_factory=dict)


class ExpertLayer:
    """One method of SGLang with its layer, prepared; and its oracle."""

    def __init__(self, kind: str, shape: Shape, *, seed: int = 0, device: str = "cpu") -> None:
        self.kind, self.shape, self.device = kind, shape, device
        self.generator = torch.Generator().manual_seed(seed)
        self.method = make_method(kind)
        self.layer = torch.nn.Module()
        self._create()
        self._fill()
        with _cpu_has_no_cuda(device):
            self.method.process_weights_after_loading(self.layer)

    @property
    def up_first(self) -> bool:
        return bool(getattr(self.method, "load_up_proj_weight_first", False))

    def _create(self) -> None:
        from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig

        shape, layer = self.shape, self.layer
        local = shape.experts // shape.ranks
        config = MoeRunnerConfig(
            num_experts=shape.experts, num_local_experts=local, hidden_size=shape.hidden,
            intermediate_size_per_partition=shape.inner, top_k=shape.top_k,
            activation="silu" if shape.gated else "relu2", is_gated=shape.gated,
        )  # fmt: skip
        for name, value in shape.config.items():
            setattr(config, name, value)
        layer.moe_runner_config = config
        layer.num_experts, layer.num_local_experts = shape.experts, local
        layer.moe_ep_size, layer.moe_ep_rank = shape.ranks, shape.rank
        layer.moe_tp_size, layer.moe_tp_rank = shape.tensor_parallel, 0
        layer._mega_moe_nvfp4 = False  # 0.5.21 on
        layer.dispatcher = SimpleNamespace(set_quant_config=lambda config: None, local_expert_mapping=None)
        with torch.device(self.device), _cpu_has_no_cuda(self.device):
            self.method.create_weights(
                layer, num_experts=local, hidden_size=shape.hidden,
                intermediate_size_per_partition=shape.inner, params_dtype=torch.bfloat16,
                weight_loader=lambda *_: None,
            )  # fmt: skip
            self.method.create_moe_runner(layer, config)

    def _fill(self) -> None:
        """Random weights; global scales as each format writes them, gate and up alike."""
        layer, generator = self.layer, self.generator
        experts = layer.num_local_experts
        packed = "weight" if self.kind == "ModelOpt" else "weight_packed"
        for name in ("w13", "w2"):
            weight, scale = getattr(layer, f"{name}_{packed}"), getattr(layer, f"{name}_weight_scale")
            weight.data.copy_(torch.randint(0, 256, weight.shape, dtype=torch.uint8, generator=generator))
            bytes_ = torch.randint(0x30, 0x48, scale.shape, dtype=torch.uint8, generator=generator)
            scale.data.copy_(bytes_.view(torch.float8_e4m3fn))
        self.weight_decode = {n: torch.rand(experts, generator=generator) * 1e-2 + 1e-2 for n in ("w13", "w2")}
        encoded = self.kind != "ModelOpt"
        # One activation scale for all experts of the model, the largest; compressed-tensors has one for each.
        spread = torch.exp2(-(torch.arange(experts) % 3).float()) if encoded else torch.ones(())
        self.input_decode = {"w13": spread / 128, "w2": spread / 64}
        names = ("weight_global_scale", "input_global_scale") if encoded else ("weight_scale_2", "input_scale")
        for name in ("w13", "w2"):
            decode = self.weight_decode[name]
            for suffix, value in zip(names, (decode, self.input_decode[name]), strict=True):
                parameter = getattr(layer, f"{name}_{suffix}").data
                value = 1 / value if encoded else value
                parameter.copy_(value.unsqueeze(-1) if value.dim() and parameter.dim() == 2 else value)
            scales = getattr(layer, f"{name}_{names[1]}").data
            if not encoded:
                scales[:-1] *= 0.25  # the last expert has the largest, whichever rank holds it
            if scales.dim() == 2 and scales.shape[1] == 2:
                scales[:, 0] *= 2 if encoded else 0.5  # the gate's: of a pair the one that clips less counts
        self.before = {
            name: (getattr(layer, f"{name}_{packed}").data.clone(), getattr(layer, f"{name}_weight_scale").data.clone())
            for name in ("w13", "w2")
        }

    def batch(self, tokens: int, *, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        """Hidden states, distinct expert ids of all ranks, router weights."""
        shape, generator = self.shape, self.generator
        hidden = torch.randn(tokens, shape.hidden, generator=generator).to(dtype)
        ids = torch.stack(
            [torch.randperm(shape.experts, generator=generator)[: shape.top_k] for _ in range(tokens)]
            or [torch.empty(shape.top_k, dtype=torch.int64)][:0]
        ) if tokens else torch.empty(0, shape.top_k, dtype=torch.int64)  # fmt: skip
        return hidden, ids.to(torch.int32), torch.rand(tokens, shape.top_k, generator=generator)

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """SGLang's own forward of the layer."""
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        given = [t.to(self.device) for t in (hidden, ids, weights)]
        topk = StandardTopKOutput(given[2], given[1], torch.empty(0))
        values: dict[str, Any] = {"hidden_states": given[0], "hidden_states_scale": None, "topk_output": topk}
        known = set(StandardDispatchOutput._fields)
        dispatched = StandardDispatchOutput(**{name: values.get(name) for name in known})
        apply = getattr(self.method, "apply", None) or self.method.apply_weights
        out: torch.Tensor = apply(self.layer, dispatched).hidden_states
        return out

    def oracle_arguments(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Any, ...]:
        """What ``expert_bound.expected`` takes, from the tensors as the loader left them."""

        def stack(name: str) -> reference.ExpertWeights:
            packed, scales = self.before[name]
            encode = self.input_decode[name].reciprocal()
            alpha = self.input_decode[name] * self.weight_decode[name]
            return reference.ExpertWeights(packed.cpu(), scales.cpu(), alpha, encode, ScaleLayout.LINEAR)

        shape = self.shape
        first = shape.rank * (shape.experts // shape.ranks)
        activation = "silu" if shape.gated else "relu2"
        return hidden, ids, weights, stack("w13"), stack("w2"), activation, not self.up_first, first

    def expected(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The oracle, rounded to the dtype of ``hidden``."""
        *given, activation, gate_first, first = self.oracle_arguments(hidden, ids, weights)
        given[1] = ids - first
        return reference.moe(*given, activation, gate_first if activation == "silu" else None)


def make_method(kind: str) -> Any:
    """An expert method of SGLang as its model code makes it."""
    if kind == "ModelOpt":
        from sglang.srt.layers.quantization import modelopt_quant

        config = modelopt_quant.ModelOptFp4Config(is_checkpoint_nvfp4_serialized=True, group_size=16)
        return modelopt_quant.ModelOptNvFp4FusedMoEMethod(config)
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4_moe as ct

    return ct.CompressedTensorsW4A4Nvfp4MoE()


def serve_with(runner: str | None, kind: str, *, facts: HostFacts | None = None, draft: str | None = None) -> None:
    """Put this process into the state in which a scheduler makes its layers."""
    from sglang.srt.layers.moe import utils

    value = moe_choice.stand_in("compressed-tensors" if kind == "compressed-tensors" else "modelopt_fp4")
    member = utils.MoeRunnerBackend(value)
    STATE.facts = facts or HostFacts(capability=None)
    moe_choice.RUNNERS.__init__(value, value, None, runner, draft)  # type: ignore[misc]
    if hasattr(utils, "MOE_RUNNER_BACKEND"):
        utils.MOE_RUNNER_BACKEND = utils.SPECULATIVE_MOE_RUNNER_BACKEND = member
        utils.MOE_A2A_BACKEND = utils.MoeA2ABackend("none")
        return
    from sglang.srt.runtime_context import get_flags

    flags = get_flags().moe
    flags.runner_backend = flags.speculative_runner_backend = member
    flags.a2a_backend = utils.MoeA2ABackend("none")


def _cpu_has_no_cuda(device: str) -> Any:
    """Releases up to 0.5.18 move swizzled scales with ``Tensor.cuda()``."""
    stack = ExitStack()
    if device == "cpu":
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self))
    return stack
