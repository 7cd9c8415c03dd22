"""A probe of experts names each planted fault, and lets right runners pass, grouped GEMMs with 16-bit numbers included.

Wrong numbers are judged by the child's own function in this process, because a child spends its time importing torch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cpu_host.kernels.build import library_path
from cpu_host.runtime import KERNELS_VARIABLE
from sglang_sm120.backends.moe_table import CALLABLE_RUNNERS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.probing import child, children
from sglang_sm120.probing.children import Job
from sglang_sm120.probing.expert_operations import ExpertOperations, of_runner
from sglang_sm120.probing.expert_plan import ExpertPlan, expert_plan_for
from sglang_sm120.probing.expert_steps import steps
from sglang_sm120.probing.record import Outcome
from sglang_sm120.probing.run import EXPERT_STEPS, RUNNER_FACTORY, probe_experts, runners
from tests.cli.bare import ROOT
from tests.dispatch.machines import RTX, machine
from tests.probing.faulty_experts import FAULTS, as_grouped_gemms

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = HostFacts(capability=None, versions={"torch": "2.13.0"})
PLAN = expert_plan_for(CPU, "torch_reference")
FACTORY = "tests.probing.faulty_experts:make"

#: Verdict, and what its one line must say, by fault.
EXPECTED = {
    "none": ("ok", "13 steps"),
    "none, 16-bit numbers between kernels": ("ok", "13 steps"),
    "zeros": ("wrong", "experts M=1 E=8 top 2 H=64 I=32 silu bfloat16: 64 of 64 elements are wrong, in row 0 (zeros)"),
    "one NaN": ("wrong", "NaN"),
    "unwritten tokens": ("wrong", "experts M=9 E=8"),
    "router weights forgotten": ("wrong", "experts M=1"),
    "router weights of another slot": ("wrong", "experts M=1"),
    "the neighbour's expert": ("wrong", "experts M=1"),
    "alpha of another expert": ("wrong", "experts M=1"),
    "one alpha for all experts": ("wrong", "experts M=1"),
    "gate and up swapped": ("wrong", "experts M=1"),
    "id -1 read as expert 0": ("wrong", "experts, ids of -1, E=8"),
    "an expert that stands twice counts once": ("wrong", "experts, an expert twice in a token, E=8"),
    "ids of other ranks read as local": ("wrong", "E=6/3 top 3"),
    "last expert of a token dropped": ("wrong", "experts M=9"),
    "the numbers of another batch": ("wrong", "E=8"),
    "only 10 tokens, which no probe tries": ("ok", "13 steps"),
    "segfault": ("crash", "experts M=1 E=8 top 2 H=64 I=32 silu bfloat16: killed by SIGSEGV"),
    "refuses": ("unsupported", "no kernel for these experts"),
    "refuses 9 tokens only": ("crash", "experts M=9 E=8 top 2 H=64 I=32 silu bfloat16: ValueError"),
}
MISSED = {"only 10 tokens, which no probe tries"}
IN_CHILD = {"segfault"}


def test_every_fault_has_an_expectation() -> None:
    assert EXPECTED.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", EXPECTED)
def test_verdict(fault: str) -> None:
    status, text = EXPECTED[fault]
    job = Job(fault, PLAN, "cpu", FACTORY, EXPERT_STEPS)
    if fault in IN_CHILD:
        outcome = children.run(job, 300.0)
    else:
        found, reason = child.run_job(job.to_json(), lambda **message: None)
        outcome = Outcome(found, children.one_line(reason))  # type: ignore[arg-type]
    assert outcome.status == status, outcome.reason
    assert text in outcome.reason


def test_numbers_of_16_bits_between_kernels_are_no_excuse_for_kernels_of_float32() -> None:
    """The wider bound is for runners that are known to round there."""
    strict = ExpertOperations(as_grouped_gemms)
    _, first = next(iter(steps(strict, PLAN, torch.device("cpu"))))
    with pytest.raises(child.WrongResult, match="elements are wrong"):
        first()


def test_the_guide_has_the_rate_and_every_miss() -> None:
    planted = [fault for fault in EXPECTED if not fault.startswith("none")]
    rate = f"Of {len(planted)} faults planted in experts it finds {len(planted) - len(MISSED)}"
    guide = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert rate in guide
    assert all(f"`{fault}`" in guide for fault in MISSED)


def test_sm120_is_right_by_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, str(library_path()))
    plan = replace(PLAN, rows=(9,), repeats=1, burst=2)
    outcome = children.run(Job("sm120", plan, "cpu", RUNNER_FACTORY, EXPERT_STEPS), 300.0)
    assert outcome.status == "ok", outcome.reason
    assert outcome.reason == "11 steps"


def test_runners_are_judged_by_the_table_first() -> None:
    jobs: list[Job] = []

    def run(job: Job, timeout: float) -> Outcome:
        jobs.append(job)
        return Outcome("ok", "planted")

    found = dict(probe_experts(runners([]), CPU, 5.0, run=run))
    assert list(found) == list(CALLABLE_RUNNERS)
    assert [(job.subject, job.device) for job in jobs] == [("torch_reference", "cpu")]
    assert found["sm120"] == Outcome("unsupported", "needs a CUDA device")
    jobs.clear()
    assert [outcome.status for _, outcome in probe_experts(runners([]), machine(RTX), 5.0, run=run)] == ["ok"] * 4
    assert {job.device for job in jobs} == {"cuda"}
    assert runners(["marlin", "sm120"]) == ["sm120"]


def test_kernels_of_flashinfer_get_only_sizes_that_sglang_gives_them() -> None:
    theirs, ours = (expert_plan_for(machine(RTX), runner) for runner in ("flashinfer_cutlass", "sm120"))
    assert all(hidden % 128 == 0 and inner % 64 == 0 for _, _, _, hidden, inner, _ in theirs.geometries)
    assert any(inner % 32 for _, _, _, _, inner, _ in ours.geometries), "what tensor parallelism leaves must be tried"
    assert any(local < experts for experts, local, *_ in theirs.geometries), "and expert parallelism"
    assert ExpertPlan.from_json(ours.to_json()) == ours
    whole = expert_plan_for(machine(RTX), "flashinfer_b12x")
    assert whole.geometries
    assert all(local == experts and inner % 128 == 0 for experts, local, _, _, inner, _ in whole.geometries)
    assert whole.dtypes == ("bfloat16",)


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["sm120", "torch_reference"])
def test_experts_are_right_on_a_gpu_and_in_its_graphs(runner: str) -> None:
    plan = ExpertPlan((1, 9, 65), ((16, 8, 4, 256, 128, "silu"), (8, 8, 2, 144, 80, "relu2")), repeats=2, burst=4)
    names = []
    for name, action in steps(of_runner(runner), plan, torch.device("cuda")):
        names.append(name)
        action()
    assert any("CUDA graph" in name for name in names) == (runner == "sm120")
