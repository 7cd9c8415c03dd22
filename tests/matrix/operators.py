"""Run inside a release's environment: its own MoE and dense code through our operators. Prints one JSON object.

The body of ``cutlass_moe_fp4``, which ours replaces as a whole, and that of ``fp4_gemm`` are the release's; what they
call beside the NVFP4 operators is CUDA code of the ``sgl_kernel`` wheel, for which plain torch stands in here.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from typing import Any

import torch

HIDDEN, INNER, TOP_K, TOKENS = 64, 96, 2, 37
#: Tokens choose among these; the others stay empty, the first and the last among them.
USED, EXPERTS = (1, 2, 4), 6


def main(release: str) -> dict[str, Any]:
    import sglang.srt.layers.moe.cutlass_moe as cutlass_moe
    import sglang.srt.layers.quantization.modelopt_quant as modelopt

    from sglang_sm120 import verify
    from sglang_sm120.backends import BACKENDS
    from sglang_sm120.backends.record import HostFacts
    from sglang_sm120.device import installed_versions
    from sglang_sm120.dispatch import Decision
    from sglang_sm120.errors import UnsupportedError
    from sglang_sm120.host.state import STATE

    weights, tokens = make_experts(), torch.randn(TOKENS, HIDDEN, generator=torch.manual_seed(1)).to(torch.bfloat16)
    refusal = ""
    try:
        run_experts(cutlass_moe, weights, tokens)
    except UnsupportedError as error:
        refusal = str(error)
    facts = HostFacts(None, installed_versions())
    assert facts.versions["sglang"] == release
    record = BACKENDS["torch_reference"]
    STATE.decide(Decision(record.value, "command line", True, "test"), facts, record)
    whole = run_experts(cutlass_moe, weights, tokens)
    other_ranks = {**weights, "ids": torch.where(weights["ids"] == USED[0], -1, weights["ids"])}
    routed = cutlass_moe.cutlass_moe_fp4
    cutlass_moe.cutlass_moe_fp4 = routed.__wrapped__
    one_by_one = run_experts(cutlass_moe, weights, tokens)
    cutlass_moe.cutlass_moe_fp4 = routed
    return {
        "refusal": refusal,
        "operators": STATE.operators,
        "experts": compare_experts(one_by_one, weights, tokens),
        "whole": compare_experts(whole, weights, tokens),
        "other ranks": compare_experts(run_experts(cutlass_moe, other_ranks, tokens), other_ranks, tokens),
        "dense": compare_dense(modelopt),
        "signatures": signatures(),
        "states": {s.name: s.state for s in verify() if s.name.startswith("operators")},
    }


def make_experts() -> dict[str, Any]:
    from sglang_sm120.reference import ExpertWeights
    from tests.support.nvfp4 import random_nvfp4_weight

    generator = torch.manual_seed(2)

    def stack(n: int, k: int) -> ExpertWeights:
        found = [random_nvfp4_weight(n, k, generator) for _ in range(EXPERTS)]
        return ExpertWeights(
            torch.stack([w.packed for w in found]),
            torch.stack([w.scales for w in found]).view(torch.float8_e4m3fn),
            torch.rand(EXPERTS, generator=generator) * 1e-3 + 1e-4,
            torch.rand(EXPERTS, generator=generator) * 20 + 1,
        )

    ids = torch.tensor(USED)[torch.rand(TOKENS, len(USED), generator=generator).argsort(1)[:, :TOP_K]]
    router = torch.rand(TOKENS, TOP_K, generator=generator)
    return {"w13": stack(2 * INNER, HIDDEN), "w2": stack(HIDDEN, INNER), "ids": ids.to(torch.int32), "router": router}


def run_experts(cutlass_moe: Any, weights: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    from sglang.srt.layers.moe.cutlass_moe_params import CutlassMoEParams, CutlassMoEType

    for stand_in in (prepare_moe_input, shuffle_rows, apply_shuffle_mul_sum, silu_and_mul):
        setattr(cutlass_moe, stand_in.__name__, stand_in)
    w13, w2 = weights["w13"], weights["w2"]
    arguments = {
        "a": tokens,
        "a1_gscale": w13.input_global_scale,
        "w1_fp4": w13.packed,
        "w1_blockscale": w13.scales,
        "w1_alphas": w13.alpha,
        "a2_gscale": w2.input_global_scale,
        "w2_fp4": w2.packed,
        "w2_blockscale": w2.scales,
        "w2_alphas": w2.alpha,
        "topk_weights": weights["router"],
        "topk_ids": weights["ids"],
        "params": CutlassMoEParams(CutlassMoEType.BlockscaledFP4, torch.device("cpu"), EXPERTS, INNER, HIDDEN),
    }
    out: torch.Tensor = cutlass_moe.cutlass_moe_fp4(**arguments)
    return out


def prepare_moe_input(topk_ids: Any, starts: Any, sizes1: Any, sizes2: Any, a_map: Any, c_map: Any, *rest: Any) -> None:
    """Sort the slots by expert; ``rest`` is number of experts, inner and hidden size, first rows of the scales."""
    experts, inner, hidden, scale_starts = rest
    slots = topk_ids.flatten()
    order = slots.argsort(stable=True)
    counts = torch.bincount(slots, minlength=experts)
    starts.copy_(torch.cat([torch.zeros(1), counts.cumsum(0)]))
    scale_starts.copy_(torch.cat([torch.zeros(1), ((counts + 127) // 128 * 128).cumsum(0)]))
    for sizes, n, k in ((sizes1, 2 * inner, hidden), (sizes2, hidden, inner)):
        sizes.copy_(torch.stack([counts, torch.full_like(counts, n), torch.full_like(counts, k)], 1))
    a_map.copy_(order // topk_ids.shape[1])
    c_map[order] = torch.arange(len(order), dtype=c_map.dtype)


def shuffle_rows(x: torch.Tensor, source: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return x[source.long()].view(shape)


def apply_shuffle_mul_sum(x: torch.Tensor, out: torch.Tensor, source: torch.Tensor, factors: torch.Tensor) -> None:
    slots = x[source.long()].view(out.shape[0], -1, out.shape[1])
    out.copy_((slots.double() * factors.view(out.shape[0], -1, 1).double()).sum(1))


def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    gate, up = x.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def compare_experts(out: torch.Tensor, weights: dict[str, Any], tokens: torch.Tensor) -> dict[str, float]:
    """Distance from the oracle, and from the oracle with another expert's weights, both relative to its size."""
    from sglang_sm120 import reference

    def distance(ids: torch.Tensor) -> float:
        right = reference.moe(tokens, ids, weights["router"], weights["w13"], weights["w2"], "silu", True).double()
        return float((out.double() - right).norm() / right.norm())

    ids = weights["ids"]
    return {"right": distance(ids), "wrong expert": distance((ids + 1) % EXPERTS), "elements": out.numel()}


def compare_dense(modelopt: Any) -> dict[str, float]:
    """``fp4_gemm`` where FlashInfer does not multiply: ``--fp4-gemm-backend cutlass``, or no FlashInfer at all."""
    import sglang.srt.layers.quantization.fp4_utils as fp4_utils

    from sglang_sm120 import reference
    from tests.support.nvfp4 import random_nvfp4_weight

    member = "cutlass" if "CUTLASS" in fp4_utils.Fp4GemmRunnerBackend.__members__ else "flashinfer_cutlass"
    fp4_utils.FP4_GEMM_RUNNER_BACKEND = fp4_utils.Fp4GemmRunnerBackend(member)
    x = torch.randn(5, HIDDEN, generator=torch.manual_seed(3)).to(torch.bfloat16)
    weight = random_nvfp4_weight(INNER, HIDDEN, torch.manual_seed(4))
    encode, alpha = torch.tensor(3.0), torch.tensor(0.01)
    codes, scales = reference.quantize(x, encode)
    body = undecorated(modelopt, "fp4_gemm")
    out = body(codes, weight.packed, scales, weight.scales, alpha, torch.bfloat16, INNER)
    right = reference.gemm(codes, weight.packed, scales, weight.scales, alpha, torch.bfloat16)
    return {"different": int((out != right).sum()), "elements": out.numel()}


def undecorated(module: Any, name: str) -> Any:
    """The release's function as it was before it became an operator, which exists for CUDA only."""
    (function,) = (n for n in ast.parse(inspect.getsource(module)).body if getattr(n, "name", "") == name)
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list.clear()
    operator = getattr(module, name)
    exec(compile(ast.Module([function], []), str(module.__file__), "exec"), vars(module))
    body = getattr(module, name)
    setattr(module, name, operator)
    return body


def signatures() -> dict[str, list[list[str]]]:
    """Arguments of each operator of the release's own module, and of ours."""
    from importlib.util import find_spec

    from sglang_sm120.sgl_kernel_ops import matmul, quantizers

    if find_spec("sglang.jit_kernel.nvfp4") is None:
        return {}
    import sglang.jit_kernel.nvfp4 as theirs

    def arguments(function: Any) -> list[str]:
        parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
        return [f"{p.name}={p.default}" if p.default is not p.empty else p.name for p in parameters]

    found = {}
    for name in vars(theirs):
        ours = getattr(quantizers, name, None) or getattr(matmul, name, None)
        if "fp4_" in name and not name.startswith(("_", "prewarm", "suggest")):
            assert ours is not None, f"{name} has no counterpart"
            found[name] = [arguments(getattr(theirs, name)), arguments(ours)]
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
