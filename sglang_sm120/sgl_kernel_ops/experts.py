"""Where the rows of each expert are, as the host has to know to launch one GEMM per expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sm120.errors import FormatError, UnsupportedError, bad_value
from sglang_sm120.layout import TILE_ROWS


@dataclass(frozen=True)
class Span:
    """Rows of one expert.

    Attributes:
        expert: its number.
        start, count: its first row among the sorted rows, and how many it has.
        scale_start: first row of its block scales, a multiple of 128.
    """

    expert: int
    start: int
    count: int
    scale_start: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.count)

    @property
    def scale_rows(self) -> slice:
        return slice(self.scale_start, self.scale_start + -(-self.count // TILE_ROWS) * TILE_ROWS)

    def require_room(self, rows: int, scale_rows: int) -> None:
        """Raise if the span reaches past ``rows`` rows or ``scale_rows`` rows of scales.

        Raises:
            FormatError: it does; nothing was written.
        """
        if self.start + self.count > rows:
            raise FormatError(bad_value(f"expert_offsets[{self.expert}]", self.start, f"there are {rows} rows"))
        if self.scale_rows.stop > scale_rows:
            remedy = f"the scale buffer has {scale_rows} rows"
            raise FormatError(bad_value(f"blockscale_offsets[{self.expert}]", self.scale_start, remedy))


def refuse_capture(operand: torch.Tensor, why: str) -> None:
    """Raise before the host waits for the GPU while a CUDA graph is captured, which would end in an error of CUDA's.

    Args:
        operand: a tensor of the call.
        why: what would wait.

    Raises:
        UnsupportedError: a capture is under way.
    """
    if operand.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "SGLang's NVFP4 expert operators have no code for this card, and what stands in for them cannot be "
            f"recorded in a CUDA graph: {why}. Start with --disable-cuda-graph, with --fp4-gemm-backend sm120, whose "
            "MoE kernels can be recorded, or with a --moe-runner-backend that runs here."
        )


def spans(starts: torch.Tensor, counts: torch.Tensor, scale_starts: torch.Tensor) -> list[Span]:
    """Read where each expert's rows are; experts without rows are left out.

    The host waits for the GPU here, once per call: our GEMM takes M from the host. A CUDA graph replays launches and
    cannot ask, so a capture is refused. SGLang's own runner does not come here (``runner.py``).

    Args:
        starts: int32 ``[E]``, first row of each expert.
        counts: int32 ``[E]``, rows of each.
        scale_starts: int32 ``[E]``, first row of each expert's block scales.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
        FormatError: a negative number, or scales that do not start at a multiple of 128 rows.
    """
    refuse_capture(starts, "the single expert operators ask the GPU how many rows each expert has")
    table = torch.stack([starts.to(torch.int64), counts.to(torch.int64), scale_starts.to(torch.int64)]).tolist()
    found = []
    for expert, (start, count, scale_start) in enumerate(zip(*table, strict=True)):
        if min(start, count, scale_start) < 0:
            raise FormatError(bad_value(f"offsets of expert {expert}", (start, count, scale_start), "use 0 or more"))
        if count and scale_start % TILE_ROWS:
            remedy = f"scales of an expert start at a multiple of {TILE_ROWS} rows"
            raise FormatError(bad_value(f"blockscale_offsets[{expert}]", scale_start, remedy))
        if count:
            found.append(Span(expert, start, count, scale_start))
    return found
