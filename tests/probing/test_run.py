"""Which subjects a probe tries, in which order and on which problems."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_sm120 import reference
from sglang_sm120.backends import BACKENDS, verdict
from sglang_sm120.backends.record import QUANTIZER, HostFacts
from sglang_sm120.errors import ConfigError
from sglang_sm120.probing import operations
from sglang_sm120.probing.child import run_job
from sglang_sm120.probing.children import Job
from sglang_sm120.probing.plan import Plan, plan_for
from sglang_sm120.probing.record import Outcome
from sglang_sm120.probing.run import PROBEABLE, probe, subjects
from tests.dispatch.machines import B200, RTX, machine

CPU = HostFacts(capability=None, versions={"torch": "2.13.0"})


def _probe(facts: HostFacts, names: list[str], verdicts: dict[str, str]) -> tuple[dict[str, Outcome], list[Job]]:
    jobs = []

    def run(job: Job, timeout: float) -> Outcome:
        jobs.append(job)
        return Outcome(verdicts.get(job.subject, "ok"), "planted", 1.0)  # type: ignore[arg-type]

    return dict(probe(subjects(names), facts, 5.0, run=run)), jobs


def test_the_quantizer_comes_first_and_every_value_gets_a_verdict() -> None:
    outcomes, jobs = _probe(machine(RTX), [], {})
    assert list(outcomes) == [QUANTIZER, *PROBEABLE]
    assert jobs[0].subject == QUANTIZER
    assert {job.device for job in jobs} == {"cuda"}
    assert {job.subject for job in jobs} >= {"flashinfer_cutlass", "flashinfer_b12x", "torch_reference"}


def test_what_the_table_refuses_is_not_tried() -> None:
    facts = machine(RTX, flashinfer="0.6.4")
    outcomes, jobs = _probe(facts, ["flashinfer_cutlass", "flashinfer_trtllm"], {})
    assert [job.subject for job in jobs] == [QUANTIZER]
    for value in ("flashinfer_cutlass", "flashinfer_trtllm"):
        assert outcomes[value] == Outcome("unsupported", verdict(value, facts).reason)


def test_without_a_gpu_the_backends_of_the_cpu_are_tried() -> None:
    outcomes, jobs = _probe(CPU, [], {})
    assert "torch_reference" in [job.subject for job in jobs]
    assert {job.device for job in jobs} == {"cpu"}
    assert {BACKENDS[job.subject].provider for job in jobs} == {"sglang_sm120"}
    assert outcomes[QUANTIZER].status == "unsupported"


@pytest.mark.parametrize("status", ["wrong", "crash", "timeout"])
def test_a_product_is_not_blamed_for_the_quantizer(status: str) -> None:
    _, jobs = _probe(machine(RTX), ["flashinfer_cutlass", "torch_reference"], {QUANTIZER: status})
    bursts = {job.subject: job.plan.burst for job in jobs}
    assert bursts["flashinfer_cutlass"] == 0
    assert bursts["torch_reference"] > 0


def test_a_missing_flashinfer_has_no_quantizer_to_judge() -> None:
    outcomes, jobs = _probe(machine(RTX, flashinfer=None), [], {})
    assert outcomes[QUANTIZER].status == "unsupported"
    assert QUANTIZER not in [job.subject for job in jobs]


def test_shuffled_weights_are_left_out_by_name() -> None:
    outcomes, _ = _probe(machine(B200), ["flashinfer_trtllm"], {})
    assert outcomes["flashinfer_trtllm"].status == "unsupported"
    assert "shuffled" in outcomes["flashinfer_trtllm"].reason


def test_problems_follow_the_rules_of_the_table() -> None:
    plan = plan_for(machine(RTX), BACKENDS["flashinfer_cutedsl"])
    assert plan.shapes
    assert all(n % 64 == 0 and k % 64 == 0 for n, k in plan.shapes)
    assert plan.dtypes == ("bfloat16",)
    everything = plan_for(machine(RTX))
    assert any(n % 64 or k % 64 for n, k in everything.shapes), "what tensor parallelism leaves must be tried"
    assert {384, 512, 1024} <= set(everything.rows), "flashinfer#3398"


@pytest.mark.parametrize("value", ["marlin", "cutlass", "auto", "nonsense"])
def test_what_only_a_server_can_call_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"BACKEND='{value}'"):
        subjects([value])


def test_a_plan_survives_the_way_to_the_child() -> None:
    plan = plan_for(machine(RTX), BACKENDS["flashinfer_b12x"])
    assert Plan.from_json(plan.to_json()) == plan


class FlashInfer:
    """The oracle behind FlashInfer's signatures; asserts what FlashInfer checks."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.quantizers: list[str] = []

    def mm_fp4(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_descale: torch.Tensor,
        b_descale: torch.Tensor,
        alpha: Any = None,
        out_dtype: torch.dtype = torch.bfloat16,
        out: Any = None,
        block_size: int = 16,
        use_8x4_sf_layout: bool = False,
        backend: str = "auto",
    ) -> torch.Tensor:
        assert a.ndim == b.ndim == 2
        assert a.shape[1] == b.shape[0]
        assert b.stride(0) == 1, "column major"
        assert b_descale.dtype == torch.float8_e4m3fn
        assert alpha.numel() == 1
        assert alpha.dtype == torch.float32
        self.asked.append(backend)
        return reference.gemm(a, b.T, a_descale, b_descale.T, alpha, out_dtype)

    def fp4_quantize(
        self, input: torch.Tensor, global_scale: Any = None, sf_vec_size: int = 16, backend: str = "auto"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.quantizers.append(backend)
        return reference.quantize(input, global_scale)


class OldFlashInfer(FlashInfer):
    def fp4_quantize(self, input: torch.Tensor, global_scale: Any = None) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        self.quantizers.append("only one")
        return reference.quantize(input, global_scale)


@pytest.mark.parametrize(("kind", "quantizer"), [(FlashInfer, "cuda"), (OldFlashInfer, "only one")])
def test_flashinfer_is_called_as_sglang_calls_it(
    kind: type[FlashInfer], quantizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = kind()
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", installed)
    plan = Plan(rows=(1, 33), shapes=((96, 160),), widths=(160,), repeats=1, burst=2)
    messages: list[dict[str, str]] = []
    for subject in (QUANTIZER, "flashinfer_b12x", "flashinfer_cutedsl"):
        job = Job(subject, plan, "cpu").to_json()
        assert run_job(job, lambda **message: messages.append(message))[0] == "ok", messages
    assert set(installed.asked) == {"b12x", "cute-dsl"}
    assert set(installed.quantizers) == {quantizer}
    steps = [message["step"] for message in messages]
    assert steps.index("quantizer M=1 K=160") < steps.index("GEMM M=1 N=96 K=160 bfloat16")


def test_operations_of_ours_go_through_the_operators_that_a_server_uses() -> None:
    parts = operations.of_subject("torch_reference")
    assert parts.column_alpha
    assert parts.linear is not None
    with pytest.raises(ConfigError, match="only a server"):
        operations.of_subject("marlin")


@pytest.mark.gpu
def test_the_oracle_passes_its_own_probe_on_a_gpu() -> None:
    """CUDA graphs, poisoned memory of the caching allocator and launches in a row, in a child of its own."""
    from sglang_sm120.probing import children

    plan = Plan(rows=(1, 33, 129), shapes=((480, 352),), widths=(352,), burst=8)
    outcome = children.run(Job("torch_reference", plan, "cuda"), 300)
    assert outcome.status == "ok", outcome.reason
