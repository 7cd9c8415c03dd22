"""The mixture-of-experts kernels on a real GPU: right, repeatable, safe in graphs and on streams."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from library import native as library  # noqa: E402

from sglang_sm120 import native, native_moe, ops  # noqa: E402
from sglang_sm120.errors import FormatError  # noqa: E402
from tests.support.moe_problem import MoeProblem, random_moe  # noqa: E402
from tests.support.nvfp4 import assert_matches_oracle  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

# experts, top_k, hidden, intermediate. Hidden sizes of gpt-oss, Nemotron and others; 397B's intermediate at TP 8.
SIZES = [
    (16, 4, 2880, 128),
    (8, 2, 2688, 1856),
    (8, 6, 1856, 464),
    (32, 10, 4096, 128),
    (64, 8, 2048, 64),
    (3, 1, 16, 16),
    (5, 5, 48, 176),
]
TOKENS = (1, 2, 3, 7, 8, 9, 16, 33, 64)


@pytest.fixture(autouse=True)
def library_under_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """``SM120_TEST_LIBRARY``, or what is compiled now from csrc."""
    can_depend = torch.cuda.get_device_capability() >= (9, 0)
    monkeypatch.setattr(native, "_library", lambda device: (library(), can_depend))


def make(tokens: int, *sizes: int, **case: object) -> MoeProblem:
    return random_moe(tokens, *sizes, device="cuda", **case)  # type: ignore[arg-type]


def check(problem: MoeProblem, **options: bool) -> torch.Tensor:
    out = native_moe.moe(*problem.arguments(), **options)  # type: ignore[arg-type]
    total, bound = problem.expected()
    assert out.dtype == problem.hidden.dtype
    assert_matches_oracle(out, total, bound)
    return out


def rows(problem: MoeProblem, count: int) -> MoeProblem:
    """The first ``count`` tokens."""
    return replace(problem, hidden=problem.hidden[:count], ids=problem.ids[:count], weights=problem.weights[:count])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        {"activation": "silu", "gate_first": False},
        {"activation": "silu", "gate_first": True, "per_expert": True, "dtype": torch.float16},
        {"activation": "relu2", "per_expert": True},
    ],
    ids=["up first", "gate first, fp16, scales per expert", "relu2"],
)
def test_every_number_of_tokens_is_within_the_derived_bound(
    sizes: tuple[int, int, int, int], case: dict[str, object]
) -> None:
    whole = make(max(TOKENS), *sizes, **case)
    for tokens in TOKENS:
        check(rows(whole, tokens), dependent_launch=tokens % 2 == 0)


def test_no_token_gives_no_row() -> None:
    assert check(make(0, 8, 2, 256, 128)).shape == (0, 256)


def test_more_pairs_than_one_launch_takes_are_served_in_parts() -> None:
    check(make(native_moe.MAX_PAIRS // 8 + 37, 16, 8, 128, 64))


Routing = Callable[[torch.Tensor], torch.Tensor]
ROUTINGS: dict[str, Routing] = {
    "all tokens on one expert": lambda ids: torch.where(torch.arange(ids.shape[1], device=ids.device) == 0, 5, -1),
    "every slot the same expert": lambda ids: torch.full_like(ids, 3),
    "no expert held here": lambda ids: torch.full_like(ids, -1),
    "ids beyond the last": lambda ids: ids + 12,
    "some slots empty": lambda ids: torch.where(ids % 3 == 0, -1, ids),
    "some tokens empty": lambda ids: torch.where(torch.arange(len(ids), device=ids.device)[:, None] % 2 == 0, -1, ids),
    "extreme ids": lambda ids: torch.where(ids % 2 == 0, -(2**31), torch.where(ids % 3 == 0, 2**31 - 1, ids)),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_unusual_routing(routing: str, tokens: int) -> None:
    problem = make(tokens, 16, 4, 512, 192)
    ids = ROUTINGS[routing](problem.ids).to(torch.int32).expand_as(problem.ids).contiguous()
    out = check(replace(problem, ids=ids))
    unserved = ~((ids >= 0) & (ids < 16)).any(1)
    assert not out[unserved].any()


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_the_ranks_of_expert_parallelism_add_up(tokens: int) -> None:
    """One GPU, by geometry: each rank holds a range of the experts and skips all other ids."""
    whole = make(tokens, 16, 6, 640, 128)
    for first in (0, 4, 12):
        part = slice(first, first + 4)
        held = replace(
            whole,
            first_expert=first,
            w13=replace(whole.w13, packed=whole.w13.packed[part], scales=whole.w13.scales[part],
                        alpha=whole.w13.alpha[part]),
            w2=replace(whole.w2, packed=whole.w2.packed[part], scales=whole.w2.scales[part],
                       alpha=whole.w2.alpha[part]),
        )  # fmt: skip
        check(held)


def test_a_token_does_not_depend_on_the_others_nor_on_what_memory_held() -> None:
    """NaN in other tokens, in the result's memory and in the scratch memory changes nothing."""
    problem = make(8, 16, 4, 1024, 256)
    alone = check(problem)
    hidden = problem.hidden.clone()
    hidden[1::2] = float("nan")
    poison = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    del poison  # the allocator hands this memory out again
    mixed = native_moe.moe(*replace(problem, hidden=hidden).arguments())  # type: ignore[arg-type]
    assert torch.equal(mixed[0::2], alone[0::2])
    assert mixed[1::2].isnan().all()


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(1, (64, 8, 2048, 512)), (7, (32, 10, 4096, 128)), (64, (16, 4, 2880, 192))], ids=str
)
def test_a_thousand_calls_give_the_same_bits(tokens: int, sizes: tuple[int, int, int, int]) -> None:
    problem = make(tokens, *sizes)
    first = native_moe.moe(*problem.arguments())  # type: ignore[arg-type]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        wrong += (native_moe.moe(*problem.arguments()) != first).sum()  # type: ignore[arg-type]
    assert int(wrong) == 0


@pytest.mark.parametrize("tokens", [1, 4, 48])
def test_graph_replays_follow_new_inputs_in_a_dependent_chain(tokens: int) -> None:
    """A kernel that writes hidden states, ids and weights stands directly in front of every layer of the chain."""
    variants = [make(tokens, 16, 4, 1024, 256, seed=s) for s in range(3)]
    fixed = variants[0]
    variants = [replace(v, w13=fixed.w13, w2=fixed.w2) for v in variants]
    expected = [native_moe.moe(*v.arguments(), dependent_launch=False) for v in variants]  # type: ignore[arg-type]
    sources = [t.clone() for t in (fixed.hidden, fixed.ids, fixed.weights)]
    live = [t.clone() for t in sources]
    problem = replace(fixed, hidden=live[0], ids=live[1], weights=live[2])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = []
        for _ in range(4):
            for to, source in zip(live, sources, strict=True):
                to.copy_(source)
            outs.append(problem.run("sm120"))
            outs.append(problem.run("sm120"))
            live[0].fill_(float("nan"))
            live[1].fill_(-1)
    for replay in range(30):
        which = replay % 3
        now = variants[which]
        for source, value in zip(sources, (now.hidden, now.ids, now.weights), strict=True):
            source.copy_(value)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            assert torch.equal(out, expected[which])


def test_two_streams_do_not_share_scratch_memory() -> None:
    problems = [make(16, 32, 8, 2048, 256, seed=s) for s in range(2)]
    expected = [native_moe.moe(*p.arguments()) for p in problems]  # type: ignore[arg-type]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(200):
        for stream, problem, found in zip(streams, problems, outs, strict=True):
            with torch.cuda.stream(stream):
                found.append(native_moe.moe(*problem.arguments()))  # type: ignore[arg-type]
    torch.cuda.synchronize()
    for found, right in zip(outs, expected, strict=True):
        assert all(torch.equal(out, right) for out in found)


def test_torch_compile_takes_the_operator_whole() -> None:
    problem = make(4, 16, 4, 512, 128)

    @torch.compile(fullgraph=True)
    def layer(hidden: torch.Tensor) -> torch.Tensor:
        return replace_hidden(problem, hidden)

    assert torch.equal(layer(problem.hidden), problem.run("sm120"))


def replace_hidden(problem: MoeProblem, hidden: torch.Tensor) -> torch.Tensor:
    stacks = [t for s in (problem.w13, problem.w2) for t in (s.packed, s.scales, s.alpha, s.input_global_scale)]
    return ops.nvfp4_moe(hidden, problem.ids, problem.weights, *stacks, "silu", False, 0, "sm120")


def test_rows_of_a_wider_tensor_are_right() -> None:
    problem = make(5, 16, 4, 512, 128)
    wide = torch.full((5, 512 + 24), float("nan"), dtype=torch.bfloat16, device="cuda")
    for start in (0, 8, 3):
        wide[:, start : start + 512] = problem.hidden
        check(replace(problem, hidden=wide[:, start : start + 512]))


def test_wrong_operands_are_refused_with_their_name() -> None:
    problem = make(2, 16, 4, 512, 128)
    for name, wrong in (
        ("topk_ids", replace(problem, ids=problem.ids.long())),
        ("topk_weights", replace(problem, weights=problem.weights.half())),
        ("w13_alpha", replace(problem, w13=replace(problem.w13, alpha=problem.w13.alpha[:3]))),
        ("w2_scale", replace(problem, w2=replace(problem.w2, scales=problem.w2.scales[:, :128]))),
        ("w13 must be", replace(problem, activation="relu2")),
        ("top_k", replace(problem, ids=problem.ids[:, :0], weights=problem.weights[:, :0])),
    ):
        with pytest.raises(FormatError, match=name):
            native_moe.moe(*wrong.arguments())  # type: ignore[arg-type]
