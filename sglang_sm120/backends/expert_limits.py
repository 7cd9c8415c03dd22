"""Which layers of experts the kernels behind a MoE runner do not take. Needs neither torch nor sglang.

What a machine must have stands in ``moe_table.py``; here stand sizes, which differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: Limits of one launch of ``sm120`` (csrc/moe/config.h). Experts are those held by this process.
MAX_PAIRS = 4096
MAX_TOP_K = 32
MAX_EXPERTS = 8192
MAX_HIDDEN_SIZE = 12288

#: FlashInfer's kernels for SM12x take H in tiles of this width (flashinfer 0.7.4 fused_moe/cute_dsl/blackwell_sm12x/
#: moe_dispatch.py, _validate_w4a4_dimensions), and an I that is no multiple of it, or a single tile of I, makes
#: FlashInfer hold a second, padded copy of the weights (_prepare_weight_views; 0.7.1 b12x_moe.py, run).
B12X_TILE = 128


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of one layer on one rank.

    Attributes:
        experts: of all ranks.
        local: held by this process.
        top_k: experts of a token.
        hidden: H.
        inner: I as it reaches the kernels.
    """

    experts: int
    local: int
    top_k: int
    hidden: int
    inner: int


def beyond_limits(runner: str, sizes: ExpertSizes) -> str:
    """Say what of a layer the kernels of ``runner`` do not take; empty if they take it, or nothing is known of them."""
    limit = _LIMITS.get(runner)
    return limit(sizes) if limit is not None else ""


def _of_sm120(sizes: ExpertSizes) -> str:
    if sizes.local > MAX_EXPERTS:
        shares = (n for n in range(2, sizes.experts + 1) if sizes.experts % n == 0)
        nearest = next(n for n in shares if sizes.experts // n <= MAX_EXPERTS)
        return (
            f"the number of experts on this rank {sizes.local} is above {MAX_EXPERTS}; the nearest --ep-size that "
            f"shares them out is {nearest}"
        )
    limited = (("hidden size", sizes.hidden, MAX_HIDDEN_SIZE), ("top_k", sizes.top_k, MAX_TOP_K))
    return next((f"the {name} {size} is above {most}" for name, size, most in limited if size > most), "")


def _of_flashinfer_b12x(sizes: ExpertSizes) -> str:
    if sizes.local != sizes.experts:
        return "FlashInfer's kernels share out no experts over ranks where activations are FP4"
    if sizes.hidden % B12X_TILE:
        return f"the hidden size {sizes.hidden} is no multiple of {B12X_TILE}"
    if sizes.inner % B12X_TILE or sizes.inner == B12X_TILE:
        return (
            f"for the {sizes.inner} intermediate columns of this rank FlashInfer would hold a second, padded copy of "
            f"the weights; it takes multiples of {B12X_TILE} from {2 * B12X_TILE} on as they are"
        )
    return ""


_LIMITS: Mapping[str, Callable[[ExpertSizes], str]] = MappingProxyType(
    {"sm120": _of_sm120, "flashinfer_b12x": _of_flashinfer_b12x}
)
