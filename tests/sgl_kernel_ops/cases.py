"""Random rows that are sorted by expert, for tests on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sm120 import reference
from sglang_sm120.layout import ScaleLayout
from tests.support.nvfp4 import Nvfp4Weight, random_activation, random_nvfp4_weight

#: Rows of each expert: none at both ends, more than a tile of scales, one.
COUNTS = (0, 130, 0, 1, 17, 0)


@dataclass(frozen=True)
class Sorted:
    """Rows of several experts and where they are; K and N are not multiples of a tile."""

    rows: torch.Tensor
    encode: torch.Tensor
    expert_offsets: torch.Tensor
    scale_offsets: torch.Tensor
    weights: list[Nvfp4Weight]
    alphas: torch.Tensor

    @property
    def sizes(self) -> torch.Tensor:
        n, half_k = self.weights[0].packed.shape
        counts = self.expert_offsets.diff()
        return torch.stack([counts, torch.full_like(counts, n), torch.full_like(counts, 2 * half_k)], 1)

    @property
    def params(self) -> dict[str, torch.Tensor]:
        return {
            "problem_sizes": self.sizes,
            "expert_offsets": self.expert_offsets[:-1],
            "blockscale_offsets": self.scale_offsets[:-1],
        }

    def packed(self) -> torch.Tensor:
        return torch.stack([weight.packed for weight in self.weights])

    def scales(self) -> torch.Tensor:
        return torch.stack([weight.scales for weight in self.weights]).view(torch.float8_e4m3fn)


def make_sorted(
    generator: torch.Generator,
    *,
    k: int = 96,
    n: int = 40,
    counts: tuple[int, ...] = COUNTS,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Sorted:
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    scale_offsets = torch.tensor([0, *((c + 127) // 128 * 128 for c in counts)]).cumsum(0).to(torch.int32)
    experts = len(counts)
    return Sorted(
        random_activation(sum(counts), k, dtype, generator, device),
        (torch.rand(experts, generator=generator) * 20 + 1).to(device),
        offsets.to(device),
        scale_offsets.to(device),
        [random_nvfp4_weight(n, k, generator, device) for _ in counts],
        (torch.rand(experts, generator=generator) * 1e-3 + 1e-4).to(device),
    )


def linear_scales(case: Sorted, scales: torch.Tensor) -> list[torch.Tensor]:
    """Row-major scale bytes of each expert, from a buffer of all of them."""
    from sglang_sm120.layout import unswizzle_128x4

    starts, counts = case.scale_offsets.tolist(), case.expert_offsets.diff().tolist()
    return [
        unswizzle_128x4(
            scales[start : start + -(-count // 128) * 128].view(torch.uint8), count, case.rows.shape[1] // 16
        )
        for start, count in zip(starts[:-1], counts, strict=True)
    ]


def oracle(case: Sorted, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and row-major scales of one expert's rows."""
    rows = case.rows[case.expert_offsets[expert] : case.expert_offsets[expert + 1]]
    return reference.quantize(rows, case.encode[expert], ScaleLayout.LINEAR)
