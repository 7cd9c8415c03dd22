"""A call of experts is judged row by row, kept with the experts that it needs, and run again alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from sglang_sm120 import env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.cli.main import app
from sglang_sm120.errors import ConfigError, RecordError, UnsupportedError
from sglang_sm120.probing import expert_bound
from sglang_sm120.probing.expert_operations import ExpertOperations, Layer, of_runner
from sglang_sm120.records import Identity
from sglang_sm120.verification import replay, reproducer
from sglang_sm120.verification.expert_call import ExpertCall
from sglang_sm120.verification.expert_judge import _far_rows, judge_experts
from sglang_sm120.verification.reproducer import Reproducer
from tests.probing.faulty_experts import as_grouped_gemms
from tests.support.moe_problem import MoeProblem, random_moe
from tests.verification.calls import shifted_ids
from tests.verification.test_reproducer import _described, _tensors

CPU = HostFacts(capability=None)
FAULTY = "tests.verification.calls:shifted_ids"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache" / reproducer.FOLDER


def call_of(problem: MoeProblem, experts: int = 8) -> ExpertCall:
    return ExpertCall.of(
        problem.hidden, problem.ids, problem.weights, problem.w13, problem.w2, activation=problem.activation,
        gate_first=problem.gate_first, first_expert=problem.first_expert, experts=experts,
    )  # fmt: skip


def problem(tokens: int = 9, **more: object) -> MoeProblem:
    """Experts 2 to 6 of 8 are here; 2 has no token."""
    made = random_moe(tokens, 5, 2, 96, 48, gate_first=True, **more)  # type: ignore[arg-type]
    made.first_expert = 2
    made.ids = torch.where(made.ids == 0, 7, made.ids + 2)
    return made


def case(call: ExpertCall, **more: object) -> Reproducer:
    out = call.run(shifted_ids("torch_reference"))
    wrong = judge_experts(call, out, rounds_between=False).text
    values = {"backend": "torch_reference", "layer": "model.layers.3.mlp.experts", "wrong": wrong, **more}
    return Reproducer(call.kept(), (out,), identity=Identity("a card", "12.0", {}), **values)  # type: ignore[arg-type]


# --- judging ---------------------------------------------------------------------------------------------------------


def test_of_many_rows_some_are_judged_with_the_experts_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    made = problem(300)
    made.ids[1:299] = 3  # whichever rows are chosen, the experts are these
    made.ids[0], made.ids[299] = 4, 5
    call, decoded = call_of(made), set()
    out, gemm = call.run(of_runner("torch_reference")), expert_bound.gemm
    monkeypatch.setattr(expert_bound, "gemm", lambda x, stack, e: decoded.add((e, len(x.value))) or gemm(x, stack, e))
    judgement = judge_experts(call, out, rounds_between=False)
    assert (judgement.wrong, judgement.rows) == ("", 32)
    assert {expert for expert, _ in decoded} == {1, 2, 3}
    assert max(rows for _, rows in decoded) <= 2 * 32
    out[299] = 0
    assert "in row 299" in judge_experts(call, out, rounds_between=False).wrong


def test_rows_that_are_not_finite_promise_nothing() -> None:
    call = call_of(problem())
    out = call.run(of_runner("torch_reference"))
    call.operands["hidden"][2, 5] = torch.inf
    call.operands["router_weights"][4, 0] = torch.nan
    out[2], out[4] = 1.0, torch.nan
    judgement = judge_experts(call, out, rounds_between=False)
    assert (judgement.wrong, judgement.rows) == ("", 7)
    call.operands["hidden"].fill_(torch.nan)
    assert judge_experts(call, out, rounds_between=False).rows == 0
    assert "has shape" in judge_experts(call, out[:3], rounds_between=False).wrong


def test_where_16_bit_numbers_lie_between_the_kernels_a_wrong_expert_shows_in_a_whole_row() -> None:
    """The bounds of single elements hold nearly everything there."""
    made = random_moe(5, 4, 2, 1024, 128)
    call = call_of(made, 4)
    right = as_grouped_gemms(made.hidden, made.ids, made.weights, Layer(made.w13, made.w2, "silu", 4))
    assert judge_experts(call, right, rounds_between=True).wrong == ""
    exact, _ = expert_bound.expected(*made.arguments())  # type: ignore[arg-type]
    assert float(((right - exact).norm(dim=1) / exact.norm(dim=1)).max()) < 0.1
    ids = made.ids.clone()
    ids[4] = 3 - ids[4]
    wrong = as_grouped_gemms(made.hidden, ids, made.weights, Layer(made.w13, made.w2, "silu", 4))
    judgement = judge_experts(call, wrong, rounds_between=True)
    assert "1 of 5 rows are far from right" in judgement.wrong or "in row 4" in judgement.wrong
    assert "row 4" in judgement.wrong


def test_nan_hides_no_wrong_row() -> None:
    """A block scale of w2 that is NaN makes a column of it, in the oracle as well."""
    exact = torch.ones(3, 4, dtype=torch.float64)
    exact[:, 0] = torch.nan
    got, rows = exact.to(torch.bfloat16), torch.arange(3)
    assert _far_rows(got, exact, rows) == ""
    got[1, 2] = 3
    assert "1 of 3 rows are far from right" in _far_rows(got, exact, rows)
    got[1, 2] = torch.nan
    assert "row 1 is off by nan of its length" in _far_rows(got, exact, rows)


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_and_computes_the_same(folder: Path) -> None:
    call = call_of(problem(per_expert=True))
    path = reproducer.write(case(call))
    read = reproducer.read(path).call
    assert isinstance(read, ExpertCall)
    assert (read.experts, read.local, read.sizes) == (8, 5, call.sizes)
    assert len(read.operands["w13"]) == 4  # the one without a token is left out
    assert set(read.operands["ids"].flatten().tolist()) <= {-1, 0, 1, 2, 3}
    right = of_runner("torch_reference")
    assert torch.equal(read.run(right), call.run(right))
    assert set(load_file(path.with_suffix(".safetensors"))) == {*call.operands, "result"}


def test_a_batch_without_a_token_for_this_rank_is_kept_too() -> None:
    made = problem(3)
    made.ids[:] = 0
    call = call_of(made)
    assert judge_experts(call, torch.zeros_like(made.hidden), rounds_between=False).wrong == ""
    read = reproducer.read(reproducer.write(case(call))).call
    assert len(read.operands["w2"]) == 1
    assert set(read.operands["ids"].flatten().tolist()) == {-1}


def test_what_would_be_too_large_to_read_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducer, "MAX_BYTES", 1000)
    with pytest.raises(RecordError, match="files of more than 1000 are not read"):
        reproducer.write(case(call_of(problem())))
    assert not list(folder.iterdir())


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "another activation": (_described(lambda v: v.update(activation="gelu")), "activation='gelu'"),
    "no order": (_described(lambda v: v.pop("gate_first")), "no field gate_first"),
    "relu2 with a gate": (_described(lambda v: v.update(activation="relu2")), "w13 of type"),
    "a field of a dense call": (_described(lambda v: v.update(n=3)), "unknown fields: n"),
    "no result": (_tensors(lambda t: t.pop("result")), "tensors other than"),
    "no ids": (_tensors(lambda t: t.pop("ids")), "tensors other than"),
    "flat ids": (_tensors(lambda t: t.update(ids=t["ids"].flatten())), "ids of shape"),
    "ids of another type": (_tensors(lambda t: t.update(ids=t["ids"].long())), "ids of type torch.int64"),
    "an expert too few": (_tensors(lambda t: t.update(w13=t["w13"][1:])), "w13 of type"),
    "no experts": (_tensors(lambda t: t.update(w2=t["w2"][:0])), "0 experts"),
    "an odd I": (_tensors(lambda t: t.update(w2=t["w2"][..., 1:])), "not multiples of 16"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused_with_one_error(what: str) -> None:
    spoil, text = BAD[what]
    path = reproducer.write(case(call_of(problem())))
    spoil(path)
    with pytest.raises(RecordError, match=text):
        reproducer.read(path)


# --- replay ----------------------------------------------------------------------------------------------------------


def test_a_replay_tells_the_faulty_runner_from_a_right_one() -> None:
    """In child processes, as the command runs it."""
    written = case(call_of(problem()))
    path = reproducer.write(written)
    faulty = replay.run(path, None, CPU, 300, factory=FAULTY)
    assert faulty.status == "wrong"
    assert written.wrong in faulty.reason
    assert faulty.reason.startswith("moe M=9 E=8 local=5 top_k=2 H=96 I=48, call 1: ")
    result = CliRunner().invoke(app, ["replay", str(path), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["outcome"]["status"] == "ok"
    assert (report["call"]["e"], report["call"]["top_k"], report["call"]["m"]) == (8, 2, 9)


def test_what_cannot_run_it_is_refused_by_name() -> None:
    call = call_of(problem())
    path = reproducer.write(case(call, backend="cutlass"))
    with pytest.raises(ConfigError, match="--backend='cutlass'.*flashinfer_cutlass, .*sm120, torch_reference"):
        replay.run(path, None, CPU, 300)
    assert replay.run(path, "flashinfer_cutlass", CPU, 300).status == "unsupported"
    with pytest.raises(UnsupportedError, match="have the gate first"):
        call.run(ExpertOperations(as_grouped_gemms, up_first_only=True))
    swapped = replace(call, gate_first=False)
    assert not torch.equal(swapped.run(of_runner("torch_reference")), call.run(of_runner("torch_reference")))
