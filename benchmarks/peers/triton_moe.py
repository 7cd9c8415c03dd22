"""SGLang's Triton experts with bf16 weights: what an unquantized model of the same geometry runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from cpu_host.server import free_port

if TYPE_CHECKING:
    from benchmarks.moe import Geometry

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def layers(geometry: Geometry) -> list[Layer]:
    """Return layers of random weights. A quarter of the number of the others: each has 3.6 times the bytes.

    Raises:
        ImportError: there is no SGLang, or something that it needs is missing.
    """
    from sglang.srt.layers.moe.fused_moe_triton import fused_experts  # noqa: F401 - asked for once, before memory is

    _pretend_to_serve()
    return [_layer(geometry) for _ in range(max(1, geometry.layers // 4))]


def _pretend_to_serve() -> None:
    """Set what the kernels look up in a server: two flags, both off unless asked for, and the group of its one rank."""
    from sglang.srt import distributed
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    if distributed.model_parallel_is_initialized():
        return
    address = f"tcp://127.0.0.1:{free_port()}"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_distributed_environment(1, 0, address, 0, backend)
    distributed.initialize_model_parallel()


def _layer(geometry: Geometry) -> Layer:
    from sglang.srt.layers.moe.fused_moe_triton import fused_experts
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    experts, hidden_size, inner = geometry.experts, geometry.hidden, geometry.inner
    w13 = torch.randn(experts, 2 * inner, hidden_size, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(experts, hidden_size, inner, device="cuda", dtype=torch.bfloat16)
    config = MoeRunnerConfig(
        num_experts=experts, num_local_experts=experts, hidden_size=hidden_size,
        intermediate_size_per_partition=inner, top_k=geometry.top_k, inplace=False,
    )  # fmt: skip

    def call(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fused_experts(hidden, w13, w2, StandardTopKOutput(weights, ids, hidden), config)
        return out

    return call
