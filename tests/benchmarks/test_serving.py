"""The parts of the serving benchmark: what it measures on a real server, and what it makes of the figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import serving
from benchmarks.serve import checkpoints, client, contenders, profile, report
from benchmarks.serve.checkpoints import Geometry
from benchmarks.serve.client import Answer, Burst
from cpu_host.checkpoints import Spec
from cpu_host.server import Launch, Server, ServerError
from sglang_sm120.models.checkpoint import check_checkpoint
from tests.support.servers import launch

TINY = Geometry("tiny", 128, 256, 1, 4, 2, 32, 512)
TINY_MOE = Geometry("tiny experts", 128, 64, 1, 4, 2, 32, 512, experts=4, experts_per_token=2)
TINY_DRAFT = replace(TINY_MOE, draft=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = checkpoints.make(tmp_path_factory.mktemp("checkpoint"), TINY, device="cpu")
    options = launch(Spec(), folder, tmp_path_factory.mktemp("server"), arguments=["--stream-interval", "4"])
    with Server(options) as running:
        yield running


@pytest.mark.server
def test_a_real_server_is_measured(server: Server) -> None:
    args = serving.arguments(["--concurrency", "1", "3", "--repeats=1", "--input-tokens=8", "--output-tokens=6"])
    samples = serving.measure({"sm120": server, "marlin": server}, args, TINY.vocab)
    measured = [("sm120", 1), ("marlin", 1), ("sm120", 3), ("marlin", 3)]
    assert [(sample.contender, sample.concurrency) for sample in samples] == measured
    for sample in samples:
        for answer in sample.burst.answers:
            assert (answer.error, answer.tokens) == ("", 6)
            assert 0 < answer.first_s < answer.last_s <= sample.burst.seconds
    rows = report.rows(samples)
    assert [row["requests"] for row in rows] == [1, 1, 3, 3]
    assert not any(row["errors"] for row in rows)


@pytest.mark.server
def test_the_result_file_holds_what_ran_and_what_did_not(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Started:
        servers = {"sm120": server}
        problems = {"marlin": "the server exited with 1\nValueError: no such backend"}

    monkeypatch.setitem(checkpoints.GEOMETRIES, "dense", TINY)
    monkeypatch.setattr(checkpoints, "make", partial(checkpoints.make, device="cpu"))
    monkeypatch.setattr(contenders, "Fleet", lambda launches, timeout: nullcontext(Started))
    line = "--contenders sm120 marlin --concurrency 2 --repeats 1 --input-tokens 4 --output-tokens 3 --profile-steps 0"
    assert serving.main([*line.split(), "--json", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("serving_dense_")
    record = json.loads(file.read_text())
    assert record["model"]["hidden"] == TINY.hidden
    assert record["contenders"]["marlin"]["error"] == "ValueError: no such backend"
    (row,) = record["rows"]
    assert (row["contender"], row["concurrency"], row["requests"], row["errors"]) == ("sm120", 2, 2, [])
    assert row["tokens_per_s"]["median"] > 0
    assert "marlin did not start" in capsys.readouterr().out


@pytest.mark.server
def test_a_server_survives_a_client_that_hangs_up(server: Server) -> None:
    asyncio.run(client.hang_up(server.url, [1, 2, 3], 400))
    burst = asyncio.run(client.burst(server.url, client.prompts(2, 4, TINY.vocab, 0), 4, 2))
    assert burst.errors == []


@pytest.mark.server
def test_what_goes_wrong_with_a_request_is_counted_and_named(server: Server) -> None:
    too_long = [[1] * 5000, [1, 2, 3]]
    burst = asyncio.run(client.burst(server.url, too_long, 4, 2))
    assert len(burst.errors) == 1
    nobody = asyncio.run(client.burst("http://127.0.0.1:9", [[1]], 4, 1))
    assert "ClientConnectorError" in nobody.errors[0]


def test_medians_leave_the_first_token_and_failed_requests_out() -> None:
    def sample(repeat: int, seconds: float, *answers: Answer) -> report.Sample:
        return report.Sample("sm120", 2, repeat, Burst(seconds, answers))

    (row,) = report.rows(
        [
            sample(0, 2.0, Answer(11, 0.5, 1.5), Answer(error="lost")),
            sample(1, 1.0, Answer(11, 0.1, 0.3), Answer(11, 0.3, 1.0)),
            sample(2, 0.5, Answer(11, 0.2, 0.4), Answer(11, 0.2, 0.4)),
        ]
    )
    assert row["tokens_per_s"] == {"median": 22.0, "low": 5.5, "high": 44.0}
    assert row["ttft_ms"] == {"median": 200.0, "low": 200.0, "high": 500.0}
    assert row["per_token_ms"]["median"] == 45.0
    assert (row["requests"], row["errors"]) == (6, ["lost"])


def test_ratios_are_ours_over_theirs() -> None:
    def row(name: str, concurrency: int, rate: float) -> dict:
        return {"contender": name, "concurrency": concurrency, "tokens_per_s": {"median": rate}}

    rows = [row("sm120", 1, 300.0), row("marlin", 1, 200.0), row("marlin", 4, 100.0)]
    assert report.ratios(rows, "sm120") == {1: {"marlin": 1.5}}


def test_overlapping_kernels_are_charged_once() -> None:
    def kernel(name: str, start: float, duration: float) -> dict:
        return {"cat": "kernel", "name": name, "ts": start, "dur": duration}

    gemm, rope, copy = "void sm120::skinny::gemm_kernel<1>()", "fused_rope", "copy"
    events = [
        {"cat": "cpu_op", "name": "ignored", "ts": 0.0, "dur": 1e6},
        kernel(gemm, 10.0, 10.0),
        kernel(rope, 15.0, 10.0),  # launched early: runs from 20 to 25 as far as anybody can tell
        kernel(copy, 35.0, 15.0),
    ]
    times, span = profile.charged(events)
    assert times == {gemm: 10.0, rope: 5.0, profile.IDLE: 10.0, copy: 15.0}
    assert span == 40.0
    found = profile.summary(events, steps=2)
    assert found["step_us"] == 20.0
    assert found["shares"] == {
        "other": 0.375, "FP4 GEMM": 0.25, profile.IDLE: 0.25, "norms, rope, activation": 0.125,
    }  # fmt: skip
    assert found["kernels"][0] == {"name": copy, "us_per_step": 7.5, "share": 0.375}
    with pytest.raises(ValueError, match="no kernel"):
        profile.summary(events[:1], steps=1)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void sm120::tiled::tiled_gemm_kernel<(sm120::tiled::Shape)1>()", "FP4 GEMM"),
        ("void device::marlin::Marlin<__nv_bfloat16, 256, 1, 8, 8, false>()", "FP4 GEMM"),
        ("void device::marlin_moe::Marlin<__nv_bfloat16, 256>()", "FP4 experts"),
        ("void sm120::quantize::quantize_kernel<true>()", "FP4 quantizer"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "bf16 GEMM"),
        ("void at::native::index_elementwise_kernel<128, 4>()", profile.OTHER),
    ],
)
def test_kernels_are_sorted_into_groups(kernel: str, group: str) -> None:
    assert profile.group_of(kernel) == group


@pytest.mark.parametrize("geometry", [TINY, TINY_MOE, TINY_DRAFT], ids=["dense", "moe", "draft"])
def test_checkpoints_are_sound_and_complete(geometry: Geometry, tmp_path: Path) -> None:
    checkpoints.make(tmp_path, geometry, device="cpu")
    checked = check_checkpoint(tmp_path)
    assert [finding for finding in checked["findings"] if finding["severity"] != "info"] == []
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    linears = [name for name in index["weight_map"] if name.endswith(".weight_scale_2")]
    assert len(linears) == (1 + geometry.draft) * (4 + 3 * max(1, geometry.experts))


def test_a_contender_that_does_not_start_leaves_its_reason(tmp_path: Path) -> None:
    class Dead(Launch):
        def command_line(self, port: int) -> list[str]:
            return [str(self.python), "-c", "raise ValueError('no such backend')"]

    chosen = contenders.launch("humming", tmp_path, tmp_path / "run", contenders.Settings())
    with contenders.Fleet({"humming": Dead(**vars(chosen))}, 20.0) as fleet:
        assert fleet.servers == {}
    assert contenders.reason(fleet.problems["humming"]) == "ValueError: no such backend"
    with pytest.raises(ServerError):
        Server(Dead(**vars(chosen))).__enter__()


def test_a_contender_that_sglang_serves_with_other_kernels_is_found_out() -> None:
    kernels = {"sm120": "void sm120::skinny<1>()", "marlin": "void device::marlin::Marlin<4>()"}
    profiles = {name: {"1": {"kernels": [{"name": kernel}, {"name": "fmha"}]}} for name, kernel in kernels.items()}
    assert contenders.impostors(profiles) == {}
    found = contenders.impostors({**profiles, "humming": profiles["marlin"], "sm120_tuned": profiles["marlin"]})
    assert list(found) == ["humming"]
    assert found["humming"].endswith("to device::marlin::Marlin")
    assert contenders.impostors({"humming": {"1": {"error": "no trace"}}}) == {}


def test_contenders_differ_in_their_backend_only(tmp_path: Path) -> None:
    def line(name: str, moe: bool) -> list[str]:
        return contenders.launch(name, tmp_path, tmp_path, contenders.Settings(), moe=moe).command_line(20000)

    ours, theirs = line("sm120", True), line("marlin", True)
    assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == [("sm120", "marlin")] * 2
    assert "--moe-runner-backend" not in line("sm120", False)
    tuned = line("sm120_tuned", True)
    assert [pair for pair in zip(ours, tuned, strict=True) if pair[0] != pair[1]] == [("sm120", "sm120_tuned")] * 2
