"""humming's NVFP4 experts, arranged as SGLang's ``--moe-runner-backend humming`` arranges them.

Weight-only: activations stay bf16. A layer is tokens sorted by expert, gate and up, SiLU, down, weighted sum; the
first, third and last are kernels of SGLang's (0.5.16 and later). humming compiles its own on first use. Before a layer
is timed, one of the same sizes is held against float64, because nothing else here would notice a wrong layout.

The interface was read from the wheel of 0.1.19. On an H200 the check passed; ``tests/benchmarks`` runs it with
stand-ins.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_sm120.errors import SelfTestError, UnsupportedError, bad_value
from sglang_sm120.formats import decode_e2m1, unpack_e2m1

if TYPE_CHECKING:
    from benchmarks.moe import Geometry

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: The release whose interface this was written for.
PACKAGE = "humming-kernels[cu13]==0.1.19"
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
#: SGLang pads to these.
_MULTIPLE_N, _MULTIPLE_K = 256, 128
#: Largest relative error of the norm. Sums in float32, results and the activation in between in bfloat16.
_TOLERANCE = 1e-2
_CHECKED = {"experts": 8, "top_k": 4, "tokens": 5}


@dataclass(frozen=True)
class Stack:
    """Weights of all experts as ModelOpt stores them.

    Attributes:
        packed: uint8 [E, N, K / 2], two e2m1 codes a byte, the lower nibble first.
        scales: float8_e4m3fn [E, N, K / 16].
        scale: float32 [E], what the decoded weight is multiplied with.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    scale: torch.Tensor

    def decoded(self, expert: int) -> torch.Tensor:
        """One expert's weight in float64, [N, K]."""
        values = decode_e2m1(unpack_e2m1(self.packed[expert]))
        blocks = self.scales[expert].double().repeat_interleave(16, 1)
        return values * blocks * self.scale[expert].double()


def layers(geometry: Geometry) -> list[Layer]:
    """Return checked layers of random weights, as many as the benchmark goes round.

    Raises:
        ImportError: there is no SGLang with this path.
        UnsupportedError: humming is not installed.
        AssertionError, ValueError, RuntimeError: a shape that it does not take, or kernels that do not compile here.
        SelfTestError: its result is wrong, as we call it.
    """
    _require_package()
    check(geometry)
    first = make(geometry, draw(geometry))
    return [call_of(geometry, *(first if index == 0 else copy.deepcopy(first))) for index in range(geometry.layers)]


def check(geometry: Geometry, device: str = "cuda") -> None:
    """Hold few experts of the geometry's sizes against :func:`expected`.

    Raises:
        SelfTestError: names the sizes and the error.
    """
    top_k = min(_CHECKED["top_k"], geometry.top_k)
    small = replace(geometry, experts=_CHECKED["experts"], top_k=top_k)
    stacks = draw(small, device)
    tokens = _CHECKED["tokens"]
    hidden = torch.randn(tokens, small.hidden, device=device).bfloat16()
    ids = torch.rand(tokens, small.experts, device=device).argsort(-1)[:, :top_k].int().contiguous()
    weights = torch.rand(tokens, top_k, device=device)
    got = call_of(small, *make(small, stacks, device))(hidden, ids, weights).double()
    wanted = expected(hidden, ids, weights, *stacks)
    error = float((got - wanted).norm() / wanted.norm())
    if not error <= _TOLERANCE:  # NaN is none of the good ones
        sizes = f"H={small.hidden} I={small.inner}"
        remedy = (
            f"humming's experts are {error:.3g} away from float64 ({sizes}), more than {_TOLERANCE}; do not time them"
        )
        raise SelfTestError(bad_value("peer", "humming", remedy))


def expected(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: Stack, w2: Stack) -> torch.Tensor:
    """The weighted sum of the experts in float64, [M, H]; activations are not quantized. Gate is w13's first half."""
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for expert in ids.unique().tolist():
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden[tokens].double() @ w13.decoded(expert).T).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        out.index_add_(0, tokens, inner @ w2.decoded(expert).T * weights[tokens, slots].double().unsqueeze(-1))
    return out


def draw(geometry: Geometry, device: str = "cuda") -> tuple[Stack, Stack]:
    """Random w13 and w2 whose outputs are about as large as their inputs."""

    def stack(rows: int, k: int) -> Stack:
        packed = torch.randint(0, 256, (geometry.experts, rows, k // 2), device=device, dtype=torch.uint8)
        scales = (torch.rand(geometry.experts, rows, k // 16, device=device) * 384 + 64).to(torch.float8_e4m3fn)
        # Random codes have a standard deviation of 2.9, these block scales a mean of 256.
        return Stack(packed, scales, torch.full((geometry.experts,), 1 / (2.9 * 256 * k**0.5), device=device))

    return stack(2 * geometry.inner, geometry.hidden), stack(geometry.hidden, geometry.inner)


def make(geometry: Geometry, stacks: tuple[Stack, Stack], device: str = "cuda") -> tuple[Any, Any]:
    """Give both stacks to humming, which repacks them: its layers for w13 and w2."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    made = []
    for stack in stacks:
        rows, k = stack.packed.shape[1], 2 * stack.packed.shape[2]
        layer = HummingLayer(
            shape_n=rows, shape_k=k, weight_config=dict(_NVFP4), num_experts=geometry.experts,
            pad_n_to_multiple=_MULTIPLE_N, pad_k_to_multiple=_MULTIPLE_K, torch_dtype=torch.bfloat16,
        ).to(device)  # fmt: skip
        layer.load_from_tensors({"weight": stack.packed, "weight_scale": stack.scales, "weight_scale_2": stack.scale})
        layer.transform()
        made.append(layer)
    return made[0], made[1]


def call_of(geometry: Geometry, w13: Any, w2: Any) -> Layer:
    """One layer's forward: (hidden [M, H], ids [M, top_k], weights [M, top_k]) to [M, H] bf16."""
    from humming.tune import get_heuristics_config  # type: ignore[import-not-found]
    from sgl_kernel import silu_and_mul
    from sglang.kernels.ops.moe.moe_fused_mul_sum import moe_fused_mul_sum
    from sglang.srt.layers.moe.fused_moe_triton import moe_align_block_size

    tuned = [get_heuristics_config(layer.humming_config, gemm_type="indexed") for layer in (w13, w2)]
    compute = json.dumps({"gemm_type": "indexed", "use_f16_accum": False})

    def call(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs, top_k = ids.numel(), ids.shape[1]
        # Given a whole table, humming compiles all of its kernels at once, of which one M needs one for each GEMM.
        chosen = [configuration(table, pairs) for table in tuned]
        block = chosen[0]["block_shape"][0]  # both GEMMs get it
        sorted_ids, expert_ids, padded = moe_align_block_size(ids, block, geometry.experts, ignore_invalid_expert=True)
        routing = {
            "sorted_ids": sorted_ids, "expert_ids": expert_ids, "num_tokens_padded": padded,
            "valid_shape_m": pairs, "compute_config": compute,
        }  # fmt: skip
        gate_up = hidden.new_empty(pairs, 2 * geometry.inner)
        w13(hidden, outputs=gate_up, top_k=top_k, tuning_config=json.dumps(chosen[0]), **routing)
        inner = hidden.new_empty(pairs, geometry.inner)
        silu_and_mul(gate_up, inner)
        down = hidden.new_empty(pairs, geometry.hidden)
        w2(inner, outputs=down, top_k=1, tuning_config=json.dumps(chosen[1]), **routing)
        out: torch.Tensor = moe_fused_mul_sum(down.view(*ids.shape, -1), weights, topk_ids=ids)
        return out

    return call


def configuration(tuned: list[Any], pairs: int) -> dict[str, Any]:
    """What humming's table has for so many pairs of token and expert.

    Raises:
        ValueError: the table ends before.
    """
    for above, up_to, config in tuned:
        if above < pairs <= up_to:
            found: dict[str, Any] = config
            return found
    raise ValueError(bad_value("M * top_k", pairs, "humming has no configuration for it; time fewer tokens"))


def _require_package() -> None:
    try:
        import humming  # type: ignore[import-not-found] # noqa: F401 - asked for once, before memory is
    except ImportError as error:
        remedy = f"humming is not installed; pip install {PACKAGE!r}"
        raise UnsupportedError(bad_value("--peers", "humming", remedy)) from error
