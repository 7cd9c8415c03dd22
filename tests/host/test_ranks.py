"""What ranks tell one another over the store of torch.distributed: here threads, each with a client of a real store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from sglang_sm120 import __version__, env
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.dispatch import Decision, Request, resolve
from sglang_sm120.errors import ConfigError, VerificationError
from sglang_sm120.host import agreement, moe_choice, moe_tuning, ranks
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.state import STATE, ServingState
from sglang_sm120.host.watch import Watcher
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import table
from sglang_sm120.tuning.choice import Timing
from sglang_sm120.tuning.results import Entry
from tests.dispatch.machines import SPARK, released
from tests.host.conftest import Serving
from tests.host.linear_layers import make_case
from tests.host.watching import watching
from tests.support.nvfp4 import fresh_generator

SIZE = 3
IDLE = {
    "sglang-sm120": __version__,
    env.VERIFY: "0",
    "tuning table": "not used",
    "--fp4-gemm-backend": "left to SGLang",
    "--moe-runner-backend": "left to SGLang, of the draft left to SGLang",
}


class Server:
    """A server of three ranks, of which any may run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rank = threading.local()
        self._master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: SIZE)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: self._rank.number)
        monkeypatch.setattr(ranks, "_store", lambda: self._rank.store)
        monkeypatch.setattr(ranks, "stage", lambda: ("", True))

    def on(self, rank: int, call: Callable[[], Any]) -> Any:
        """Let ``rank`` make a call in this thread."""
        self._rank.number = rank
        client = TCPStore("127.0.0.1", self._master.port, is_master=False, wait_for_workers=False)
        self._rank.store = PrefixStore("sglang_sm120", client)
        return call()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


@pytest.fixture
def tuned() -> Iterator[Any]:
    """Puts this process under ``sm120_tuned``; the table is what a test says."""
    untuned = SimpleNamespace(backend="torch_reference")
    tuned = SimpleNamespace(table=SimpleNamespace(digest="abc"), problem="", untuned=untuned)
    STATE.tuning = tuned  # type: ignore[assignment]
    STATE.facts = HostFacts((12, 0), device_name="a card")
    yield STATE.tuning
    STATE.tuning = STATE.facts = None


def test_everybody_hears_everybody_and_nobody_waits_without_need(server: Server) -> None:
    assert server.on(0, lambda: ranks.tell("x", [0])) == {0: [0]}
    assert server.on(2, lambda: ranks.tell("x", "two")) == {0: [0], 2: "two"}
    with ThreadPoolExecutor(SIZE) as pool:
        calls = [
            pool.submit(server.on, rank, lambda rank=rank: ranks.hear("y", rank, needed_by="a test"))  # type: ignore[misc]
            for rank in range(SIZE)
        ]
        assert [call.result(60) for call in calls] == [[0, 1, 2]] * SIZE


def test_a_single_process_asks_nobody() -> None:
    assert ranks.hear("x", 7, needed_by="a test") == [7]


def test_a_rank_without_the_package_is_named(server: Server) -> None:
    server.on(1, lambda: ranks.tell("settings", {}))
    with pytest.raises(ConfigError, match=r"a test needs sglang-sm120 .* on every rank .* ranks 0, 2 did not answer"):
        server.on(1, lambda: ranks.hear("settings", {}, needed_by="a test", seconds=0.1))


def test_settings_that_differ_between_nodes_stop_whoever_needs_them(
    server: Server, tuned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 1 and 2 stand for another node: without the variable and with another table."""
    tuned.table.digest = "other"
    for rank in (1, 2):
        server.on(rank, lambda: ranks.tell("settings", agreement._settings()))
    monkeypatch.setenv(env.VERIFY, "8")
    tuned.table.digest = "abc"
    with pytest.raises(ConfigError) as refusal:
        server.on(0, agreement.compare)
    text = str(refusal.value)
    assert f"{env.VERIFY}: 8 on rank 0, 0 on ranks 1, 2. Set {env.VERIFY} to the same number on every node" in text
    assert "tuning table: table abc for a card on rank 0, table other for a card on ranks 1, 2." in text
    assert "sglang-sm120 tune --output" in text


def test_a_rank_with_another_version_of_the_package_is_named(server: Server, tuned: Any) -> None:
    """What another version tells may be about other settings."""
    for rank in (1, 2):
        server.on(rank, lambda: ranks.tell("settings", {"sglang-sm120": "0.0.1", env.VERIFY: "0"}))
    with pytest.raises(ConfigError) as refusal:
        server.on(0, agreement.compare)
    expected = f"sglang-sm120: {__version__} on rank 0, 0.0.1 on ranks 1, 2. Install the same wheel on every node."
    assert expected in str(refusal.value)


def test_a_server_that_needs_no_agreement_waits_for_nobody(server: Server) -> None:
    server.on(0, agreement.compare)
    assert server.on(1, lambda: ranks.tell("settings", {}))[0] == IDLE


def test_experts_that_go_by_a_table_are_compared_too(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
    monkeypatch.setattr(moe_choice, "RUNNERS", moe_choice.Runners(own_target="sm120_tuned"))
    monkeypatch.setattr(STATE, "facts", HostFacts((12, 0), device_name="a card"))
    other = {**agreement._settings(), "tuning table": "table abc for a card"}
    for rank in (1, 2):
        server.on(rank, lambda: ranks.tell("settings", other))
    with pytest.raises(ConfigError, match="no table for a card on rank 0, table abc for a card on ranks 1, 2"):
        server.on(0, agreement.compare)


def test_the_table_that_was_compared_is_the_one_that_serves(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``tune`` may end while weights load; what it wrote is for the next server."""
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
    monkeypatch.setattr(moe_choice, "RUNNERS", moe_choice.Runners(own_target="sm120_tuned"))
    moe_tuning.forget()
    facts = HostFacts(None)

    def tune(time: float) -> str:
        entry = Entry(64, 128, "bfloat16", 1, "torch_reference", {"torch_reference": Timing(time, time, time)})
        return table.save(identity_of(facts), [entry], ["sglang-sm120", "tune", "some/model"]).digest

    serving.decide("torch_reference", facts=facts)
    compared = tune(1.0)
    assert compared in agreement._settings()["tuning table"]
    later = tune(2.0)
    used = moe_tuning.start(torch.device("cpu")).table
    assert used is not None
    assert used.digest == compared
    moe_tuning.forget()
    serving.decide("torch_reference", facts=facts)
    assert later in agreement._settings()["tuning table"]


def decide(server: Server, rank: int, facts: HostFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank resolve ``auto`` as it does at its start; it has told the others when this returns."""
    decision = resolve(Request("auto"), facts)
    state = ServingState()
    state.decide(decision, facts, BACKENDS[decision.backend] if decision.backend is not None else None)
    monkeypatch.setattr(agreement, "STATE", state)
    server.on(rank, lambda: ranks.tell("settings", agreement._settings()))


def test_ranks_whose_probe_records_lead_to_other_kernels_do_not_serve_together(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts of SGLang 0.5.9 on 12.1, for which its wheel has no code: by sm120 where that passed its probe."""
    spark = released(SPARK, "0.5.9")
    probed = replace(spark, probed={"sm120": "ok"})
    for rank, facts in ((0, spark), (1, probed), (2, probed)):
        decide(server, rank, facts, monkeypatch)
    with pytest.raises(ConfigError) as refused:
        server.on(2, agreement.compare)
    text = str(refused.value)
    assert "SGLang's operators by torch_reference on rank 0, " in text
    assert "SGLang's operators by sm120 on ranks 1, 2. Ranks with different kernels" in text
    decide(server, 0, probed, monkeypatch)
    server.on(0, agreement.compare)


def test_a_backend_of_ours_that_a_variable_names_on_one_node_is_told(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (1, 2):
        server.on(rank, lambda: ranks.tell("settings", IDLE))
    state = ServingState()
    state.decide(Decision("torch_reference", "environment", True, "test"), HostFacts(None), BACKENDS["torch_reference"])
    monkeypatch.setattr(agreement, "STATE", state)
    different = r"--fp4-gemm-backend: torch_reference on rank 0, left to SGLang on ranks 1, 2\. .*FP4_GEMM_BACKEND"
    with pytest.raises(ConfigError, match=different):
        server.on(0, agreement.compare)


@pytest.mark.parametrize("runners", [{"own_target": "sm120"}, {"own_draft": "sm120"}])
def test_runners_of_experts_are_compared(
    runners: dict[str, str], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (1, 2):
        server.on(rank, lambda: ranks.tell("settings", IDLE))
    monkeypatch.setattr(moe_choice, "RUNNERS", moe_choice.Runners(**runners))
    with pytest.raises(ConfigError, match=r"--moe-runner-backend: .*sm120.* on rank 0, left to SGLang, of the draft"):
        server.on(0, agreement.compare)


def test_they_are_compared_before_a_model_runner_loads(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    class ModelRunner:
        loaded = False

        def load_model(self) -> None:
            self.loaded = True

    server.on(1, lambda: ranks.tell("settings", {**IDLE, env.VERIFY: "4"}))
    server.on(2, lambda: ranks.tell("settings", {**IDLE, env.VERIFY: "8"}))
    monkeypatch.setenv(env.VERIFY, "8")
    module: Any = SimpleNamespace(ModelRunner=ModelRunner)
    agreement.wrap_load_model(module, Patcher())
    runner = ModelRunner()
    with pytest.raises(ConfigError, match="4 on rank 1"):
        server.on(0, runner.load_model)
    assert not runner.loaded


def step(watcher: Watcher, run: Callable[[], Any], *, idle: bool = False) -> None:
    mode = SimpleNamespace(name="EXTEND", is_idle=lambda: idle)
    watcher.step(SimpleNamespace(), SimpleNamespace(forward_mode=mode), run)


def test_a_pipeline_stage_without_a_layer_to_check_does_not_end_the_start(
    server: Server, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.decide("torch_reference")
    with watching(monkeypatch) as watcher:
        case = make_case("modelopt", 64, [32], fresh_generator())
        empty = [Watcher(1, report=False) for _ in range(2)]
        server.on(0, lambda: step(empty[0], lambda: None))  # before the later stages have run
        server.on(1, lambda: step(watcher, lambda: case.run(torch.ones(2, 64, dtype=torch.bfloat16))))
        server.on(2, lambda: step(empty[1], lambda: None))
        server.on(0, lambda: step(empty[0], lambda: None))
        # Now all of them know, and no later step waits for the network.
        monkeypatch.setattr(ranks, "tell", lambda name, value: pytest.fail("asked again"))
        for rank, one in enumerate((empty[0], watcher, empty[1])):
            server.on(rank, lambda one=one: step(one, lambda: None))  # type: ignore[misc]


def test_a_server_in_which_no_stage_checks_anything_ends(server: Server) -> None:
    for rank in (0, 1):
        server.on(rank, lambda: step(Watcher(1, report=False), lambda: None))
    nothing = rf"{env.VERIFY}=1 checked nothing on any rank of the server \(ranks 0, 1, 2: 0 of 0 pairs"
    with pytest.raises(VerificationError, match=nothing):
        server.on(2, lambda: step(Watcher(1, report=False), lambda: None))


def test_ranks_that_had_no_token_yet_prove_nothing(server: Server) -> None:
    for rank in range(SIZE):
        server.on(rank, lambda: step(Watcher(1, report=False), lambda: None, idle=True))
