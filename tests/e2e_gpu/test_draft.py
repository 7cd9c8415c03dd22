"""A layer with NVFP4 experts drafts tokens (MTP): target and draft each have the runner that was given to them.

SGLang's ``Qwen3MoeForCausalLMMTP`` is the draft: plain attention, and no rule that keeps its experts from FP4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import checkpoints, client, contenders
from cpu_host.server import Server
from sglang_sm120 import env
from tests.e2e_gpu.answers import VOCAB, ask_many_lengths, numbers
from tests.e2e_gpu.conftest import CHOSEN, LAYERS, find, together
from tests.e2e_gpu.load import put

#: The first test waits for the start of every server.
pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.timeout(1800)]
#: Not ours; it runs on the cards that these tests have run on.
OTHER = "marlin"
#: Runner of the target and of the draft, ``None`` if the draft is to inherit it.
RUNNERS: dict[str, tuple[str, str | None]] = {
    "both": (CHOSEN, CHOSEN),
    "target": (CHOSEN, OTHER),
    "draft": (OTHER, CHOSEN),
}
STEPS = 3
CONCURRENCY, SECONDS = 16, 8.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft in one checkpoint."""
    geometry = replace(checkpoints.GEOMETRIES["moe"].with_layers(LAYERS["moe"]), draft=True)
    return checkpoints.make(tmp_path_factory.mktemp("draft"), geometry)


@pytest.fixture(scope="module")
def draft_fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[contenders.Fleet]:
    """A checked server for each of :data:`RUNNERS`; one that drafts with what it inherits, and one that drafts not."""
    launches = {}

    def add(name: str, target: str, options: tuple[str, ...], environ: dict[str, str]) -> None:
        settings = contenders.Settings(max_requests=CONCURRENCY, max_tokens=32768, extra=options)
        workdir = tmp_path_factory.mktemp(name.replace(" ", "-"))
        launches[name] = contenders.launch(target, model, workdir, settings, moe=True)
        launches[name].environ.update(environ)

    for name, (target, draft) in RUNNERS.items():
        environ = {env.VERIFY: "1", env.REPORT: str(tmp_path_factory.mktemp("report") / "served.json")}
        add(f"checked {name}", target, drafting(model, draft), environ)
    add("drafting", CHOSEN, drafting(model, None), {})
    add("plain", CHOSEN, (), {})
    with together(launches) as running:
        yield running


def drafting(model: Path, runner: str | None) -> tuple[str, ...]:
    """Options of a server that drafts with the checkpoint itself."""
    return (
        *("--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", str(model)),
        *("--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(STEPS + 1)),
        *(() if runner is None else ("--speculative-moe-runner-backend", runner)),
    )


@pytest.fixture
def drafting_server(draft_fleet: contenders.Fleet) -> Server:
    """The one of which only the target's runner was named."""
    return find(draft_fleet, "drafting")


@pytest.mark.parametrize("name", RUNNERS)
def test_experts_of_target_and_draft_are_right_and_have_the_runner_that_was_named(
    draft_fleet: contenders.Fleet, name: str
) -> None:
    """The first wrong result ends the server, of a step of the draft as well."""
    checked = find(draft_fleet, f"checked {name}")
    assert ask_many_lengths(checked) == [], checked.tail()
    reports = re.findall(rf"{env.VERIFY}: ((\d+) of (\d+) pairs .*)", checked.log())
    assert reports, checked.tail()
    report, judged, seen = reports[-1]
    assert f"{LAYERS['moe'] + 1} of them experts" in report, report
    served = experts_by_runner(json.loads(Path(checked.launch.environ[env.REPORT]).read_text()))
    target, draft = RUNNERS[name]
    if target == draft:
        assert served == {target: LAYERS["moe"] + 1}
        assert judged == seen, report
    else:
        assert served == {target: LAYERS["moe"], draft: 1}
        assert f"calls ({OTHER}: " in report, report
    print(report)


def experts_by_runner(report: dict[str, Any]) -> dict[str, int]:
    """Layers of experts that each runner served, from a report."""
    found: dict[str, int] = {}
    for row in report["rows"]:
        if "top_k" in row:
            found[row["backend"]] = max(found.get(row["backend"], 0), row["layers"])
    return found


def test_drafts_are_accepted_under_load_from_graphs_and_without_an_error(drafting_server: Server) -> None:
    load = put(drafting_server.url, CONCURRENCY, SECONDS, VOCAB)
    assert load.errors == [], drafting_server.tail()
    lengths = re.findall(r"Decode batch.*accept len: ([\d.]+).*cuda graph: True", drafting_server.log())
    assert lengths, drafting_server.tail()
    assert max(map(float, lengths)) > 1.5, "a draft that computes nonsense is never accepted"
    print(f"{load.tokens} tokens in {load.bursts} bursts at {CONCURRENCY}; accepted at once {', '.join(lengths)}")


def test_a_draft_changes_no_answer(draft_fleet: contenders.Fleet, drafting_server: Server) -> None:
    prompts = client.prompts(16, 30, VOCAB, "drafted")
    answers = [
        [token for prompt in prompts for token in server.generate(prompt, 24).tokens]
        for server in (drafting_server, find(draft_fleet, "plain"))
    ]
    equal = sum(drafted == plain for drafted, plain in zip(*answers, strict=True)) / len(answers[0])
    # Other batches have other bits, and two tokens may be nearly equal: the rest of such an answer is another one.
    assert equal > 0.7
    print(f"{equal:.3f} of the tokens are those without a draft")


def test_the_same_prompts_get_the_same_bits(drafting_server: Server) -> None:
    assert numbers(drafting_server) == numbers(drafting_server)
