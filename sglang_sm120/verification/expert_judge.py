"""Compare the result of one call of experts with the float64 oracle, within the bounds of ``sglang-sm120 probe``."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_sm120.probing import expert_bound
from sglang_sm120.verification.expert_call import ExpertCall
from sglang_sm120.verification.judge import Judgement, compare, some_rows

#: Of more tokens so many are judged: the first, the last and others at random. With ten experts each, 128 tokens take
#: nearly all of 512, and a layer would be decoded as a whole for each check.
ROWS = 32
#: How far a token's whole result may be from the oracle's, as a share of its length, if 16-bit numbers stand between
#: the kernels. The interval of an element assumes that every code next to a boundary falls the wrong way, and with it
#: all on the same side: for large H and I it holds nearly everything. In truth about one code of a hundred falls the
#: other way (2**-9 of a value against steps of a third of it), which makes some hundredths; one scale that does moves
#: its block by an eighth. A wrong expert, expert order or row is off by about its own length.
_SHARE = 1 / 3


def judge_experts(
    call: ExpertCall, out: torch.Tensor, generator: torch.Generator | None = None, *, rounds_between: bool
) -> Judgement:
    """Judge ``out``, what a runner returned for ``call``. Waits for the GPU.

    The oracle decodes one expert after the other, and those alone that have a token among the judged rows: its float64
    matrices are those of one expert.

    Args:
        call: what it was asked.
        out: [M, H].
        generator: chooses the rows if there are too many.
        rounds_between: the runner hands 16-bit numbers from kernel to kernel.
    """
    named = call.operands
    hidden, router_weights = named["hidden"], named["router_weights"]
    if out.shape != hidden.shape:
        wrong = f"the result has shape {tuple(out.shape)} instead of {tuple(hidden.shape)}"
        return Judgement(wrong, float("nan"), float("nan"), call.m)
    rows = some_rows(hidden.isfinite().all(1) & router_weights.isfinite().all(1), ROWS, generator)
    if not len(rows):
        return Judgement("", 0.0, 0.0, 0)
    exact, bound = expert_bound.expected(
        hidden[rows],
        named["ids"][rows],
        router_weights[rows],
        call.stack("w13"),
        call.stack("w2"),
        call.activation,
        call.gate_first,
        between=call.out_dtype if rounds_between else None,
    )
    judgement = compare(out[rows], exact, bound, rows)
    if rounds_between and not judgement.wrong:
        return replace(judgement, wrong=_far_rows(out[rows], exact, rows))
    return judgement


def _far_rows(got: torch.Tensor, exact: torch.Tensor, rows: torch.Tensor) -> str:
    """Say which tokens are further from the oracle than :data:`_SHARE` of their length; empty if none is.

    An element that is NaN in both is right, as in :func:`compare`: a block scale that is NaN makes a column of them.
    """
    same = exact.isnan() & got.isnan()
    got, exact = got.masked_fill(same, 0), exact.masked_fill(same, 0)
    length = exact.norm(dim=1)
    share = (got.to(torch.float64) - exact).norm(dim=1) / length
    far = ~(share <= _SHARE) & (length != 0)  # a comparison with NaN is false, so NaN counts as far
    if not bool(far.any()):
        return ""
    worst = int(torch.where(far, share, 0.0).argmax())
    return (
        f"{int(far.sum())} of {len(far)} rows are far from right, although no element is outside of its bound; row "
        f"{int(rows[worst])} is off by {float(share[worst]):.3g} of its length"
    )
