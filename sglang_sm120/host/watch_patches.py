"""The seams of ``watch.py``: each wraps what is there, our own patches included."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from sglang_sm120 import env
from sglang_sm120.host import watch_experts
from sglang_sm120.host.conventions import Convention, ExpertConvention
from sglang_sm120.host.patching import Patcher, mark
from sglang_sm120.host.unserved import has_experts, is_dense
from sglang_sm120.host.watch import Watcher
from sglang_sm120.host.watch_source import Source, foreign, quantizer_in_force
from sglang_sm120.verification.call import Call


@cache
def watcher() -> Watcher:
    """The watcher of this process, made when the first seam is patched."""
    return Watcher(env.verify_every(), report=env.report_path() is not None)


def watch_apply(module: ModuleType, patcher: Patcher, *, convention: Convention, seam: str) -> None:
    """Watch the forward of one linear method."""
    cls = getattr(module, convention.cls)
    inner, watch = getattr(cls, convention.apply), watcher()

    def apply(self: Any, layer: torch.nn.Module, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return inner(self, layer, x, bias)  # type: ignore[no-any-return]
        return watch.layer(inner, self, layer, x, bias)

    patcher.set(cls, convention.apply, mark(seam, apply, inner))


def watch_moe(module: ModuleType, patcher: Patcher, *, convention: ExpertConvention, seam: str) -> None:
    """Watch the forward of one method of experts, and note at its creation what a check of it has to know."""
    owner, watch = getattr(module, convention.cls), watcher()
    inner, create = getattr(owner, convention.apply), owner.create_moe_runner

    def look_at(method: Any, layer: Any) -> None:
        layer.sm120_watched = watch_experts.look_at(method, layer, convention, own_path=type(method) is not owner)

    def create_moe_runner(self: Any, layer: Any, moe_runner_config: Any) -> None:
        create(self, layer, moe_runner_config)
        look_at(self, layer)

    def apply(self: Any, layer: Any, dispatch_output: Any) -> Any:
        if torch.compiler.is_compiling():
            return inner(self, layer, dispatch_output)
        if not hasattr(layer, "sm120_watched"):  # a subclass made its runner by itself
            look_at(self, layer)
        return watch_experts.run(watch, inner, self, layer, dispatch_output)

    patcher.set(owner, "create_moe_runner", mark(seam, create_moe_runner, create))
    patcher.set(owner, convention.apply, mark(seam, apply, inner))


def watch_gemm(module: ModuleType, patcher: Patcher, *, seam: str) -> None:
    """Check the GEMM of layers that SGLang prepared, on the operands that reach it."""
    inner, watch = module.flashinfer_fp4_gemm, watcher()

    def flashinfer_fp4_gemm(
        a: torch.Tensor,
        b: torch.Tensor,
        a_descale: torch.Tensor,
        b_descale: torch.Tensor,
        alpha: torch.Tensor,
        out_dtype: torch.dtype,
        *args: Any,
        backend: str = "auto",
        **kwargs: Any,
    ) -> torch.Tensor:
        out: torch.Tensor = inner(a, b, a_descale, b_descale, alpha, out_dtype, *args, backend=backend, **kwargs)
        call = watch.current
        if call is None:
            return out
        source = foreign(backend)
        call.backend = source.value
        if backend == "trtllm":
            call.why_not = "its weights are shuffled"
        elif call.due:
            product = Call.gemm(a, b.T, a_descale, b_descale.T, alpha, None, out_dtype)
            watch.check(product, (out,), source)
        return out

    patcher.set(module, "flashinfer_fp4_gemm", mark(seam, flashinfer_fp4_gemm, inner))


def watch_quantizer(module: ModuleType, patcher: Patcher, *, seam: str) -> None:
    """Check the quantizer in front of that GEMM."""
    inner, watch = module.fp4_quantize, watcher()

    def fp4_quantize(
        input: torch.Tensor, global_scale: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed, scales = inner(input, global_scale, *args, **kwargs)
        if watch.current is not None and watch.current.due and not (args or kwargs):
            watch.check(Call.quantize(input, global_scale), (packed, scales), quantizer_in_force())
        return packed, scales

    patcher.set(module, "fp4_quantize", mark(seam, fp4_quantize, inner))


def watch_preemption(module: ModuleType, patcher: Patcher, *, seam: str) -> None:
    """Check SGLang's own kernel for some Qwen3.x shapes, which is asked before any backend."""
    inner, watch = module.try_qwen3x_nvfp4_gemm, watcher()

    def try_qwen3x_nvfp4_gemm(
        input: torch.Tensor,
        weight: torch.Tensor,
        input_sf: torch.Tensor,
        weight_sf: torch.Tensor,
        alpha: torch.Tensor,
        out_dtype: torch.dtype,
        out_features: int,
    ) -> torch.Tensor | None:
        out: torch.Tensor | None = inner(input, weight, input_sf, weight_sf, alpha, out_dtype, out_features)
        if out is not None and watch.current is not None:
            source = Source("try_qwen3x_nvfp4_gemm")
            watch.current.backend = source.value
            if watch.current.due:
                product = Call.gemm(input, weight.T, input_sf, weight_sf.T, alpha, None, out_dtype)
                watch.check(product, (out,), source)
        return out

    patcher.set_everywhere(module, "try_qwen3x_nvfp4_gemm", inner, mark(seam, try_qwen3x_nvfp4_gemm, inner))


def watch_steps(module: ModuleType, patcher: Patcher, *, seam: str) -> None:
    """See where a step begins and ends.

    The several steps of a draft model are captured into one graph, and run in front of it, through the same method:
    those are no steps of a server.
    """
    cls, watch = module.ModelRunner, watcher()
    inner = cls.forward

    def forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if _capture_mode()():
            return inner(self, forward_batch, *args, **kwargs)
        return watch.step(self, forward_batch, lambda: inner(self, forward_batch, *args, **kwargs))

    patcher.set(cls, "forward", mark(seam, forward, inner))


@cache
def _capture_mode() -> Callable[[], bool]:
    """SGLang's own flag, which is set in front of a capture too; 0.5.14 gave it a module of its own."""
    executor = "sglang.srt.model_executor"
    try:
        module = import_module(f"{executor}.runner_utils.capture_mode")
    except ModuleNotFoundError:
        module = import_module(f"{executor}.cuda_graph_runner")
    found: Callable[[], bool] = module.get_is_capture_mode
    return found


def keep_from_graphs(module: ModuleType, patcher: Patcher, *, cls: str, method: str, seam: str) -> None:
    """Let steps that are checked run without a CUDA graph, those of a draft model included.

    Not under data-parallel attention, where ranks have agreed beforehand about using a graph.
    """
    owner, watch = getattr(module, cls), watcher()
    inner = getattr(owner, method)

    def can_run(self: Any, forward_batch: Any) -> bool:
        if not inner(self, forward_batch):
            return False
        return forward_batch.global_num_tokens_cpu is not None or not watch.due(self.model_runner, forward_batch)

    patcher.set(owner, method, mark(seam, can_run, inner))


def name_layers(module: ModuleType, patcher: Patcher, *, seam: str) -> None:
    """Tell FP4 layers their place in the model, once it is loaded."""
    loader = module.DefaultModelLoader
    inner, watch = loader.load_weights_and_postprocess, watcher()

    def load_weights_and_postprocess(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        inner(model, *args, **kwargs)
        for name, layer in model.named_modules():
            if is_dense(layer) or has_experts(layer):
                watch.name(layer, name)

    patcher.set(loader, "load_weights_and_postprocess", staticmethod(mark(seam, load_weights_and_postprocess, inner)))
