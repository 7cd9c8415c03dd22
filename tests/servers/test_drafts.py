"""A real server whose checkpoint drafts tokens (MTP) with NVFP4 experts: target and draft, each with its own runner.

What SGLang lacks for drafting on a CPU is in ``cpu_host/runtime/drafting.py``; its loader, worker and draft are real.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpu_host.checkpoints import Spec
from cpu_host.kernels.build import library_path
from cpu_host.runtime import KERNELS_VARIABLE
from cpu_host.server import Server
from sglang_sm120 import env
from tests.support.checkpoints import Checkpoints
from tests.support.servers import PROMPT, ask, judge, launch

pytestmark = pytest.mark.server

SPEC = Spec(format="modelopt", experts=6, draft=True)
LAYERS = 2


@dataclass(frozen=True)
class Runners:
    """What a server is given, and who then serves how many layers of experts."""

    target: str
    draft: str | None
    served: dict[str, int]


RUNNERS = {
    "inherited": Runners("sm120", None, {"sm120": LAYERS + 1}),
    "another for the draft": Runners("sm120", "torch_reference", {"sm120": LAYERS, "torch_reference": 1}),
    # Without a table and a GPU sm120_tuned is the oracle; the kernels are emulated.
    "ours for the draft": Runners("sm120_tuned", "sm120", {"torch_reference": LAYERS, "sm120": 1}),
}


@pytest.fixture(scope="module", params=list(RUNNERS))
def runners(request: pytest.FixtureRequest) -> Runners:
    return RUNNERS[request.param]


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, runners: Runners, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every call of every FP4 layer is checked, of the draft as well; the first wrong one ends the server."""
    workdir, folder = tmp_path_factory.mktemp("drafts"), checkpoints.folder(SPEC)
    environ = {
        KERNELS_VARIABLE: str(library_path()),
        env.CACHE_DIR: str(workdir / "cache"),
        env.REPORT: str(workdir / "served.json"),
        env.VERIFY: "1",
        "OMP_NUM_THREADS": "1",  # the layers are so small that threads only wait for one another
    }
    arguments = [
        "--skip-server-warmup",
        *("--moe-runner-backend", runners.target),
        *("--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", str(folder)),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        *(("--speculative-moe-runner-backend", runners.draft) if runners.draft is not None else ()),
    ]
    with Server(launch(SPEC, folder, workdir, arguments=arguments, environ=environ)) as running:
        yield running


def test_target_and_draft_have_the_runner_that_was_named_and_their_experts_are_right(
    server: Server, runners: Runners, checkpoints: Checkpoints
) -> None:
    assert judge(ask(server), checkpoints.reference(checkpoints.folder(SPEC))).agrees
    assert served(Path(server.launch.environ[env.REPORT])) == runners.served
    report = re.findall(rf"{env.VERIFY}: (.*)\.$", server.log(), re.MULTILINE)[-1]
    # qkv, o and experts of each layer
    assert re.match(rf"(\d+) of \1 pairs .* \({3 * LAYERS + 3} layers, {LAYERS + 1} of them experts, ", report), report
    said = {"--moe": (runners.target, LAYERS), "--speculative-moe": (runners.draft or runners.target, 1)}
    for flag, (value, layers) in said.items():
        assert server.log().count(f"] {flag}-runner-backend {value} serves the NVFP4 experts of {layers} layers.") == 1


def served(report: Path) -> dict[str, int]:
    """Layers of experts by runner."""
    found: dict[str, int] = {}
    for row in json.loads(report.read_text())["rows"]:
        if "top_k" in row:
            found[row["backend"]] = max(found.get(row["backend"], 0), row["layers"])
    return found


def test_drafts_are_accepted(server: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    meta = server.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling})["meta_info"]
    assert meta["spec_num_correct_drafts"] > 0, meta
    assert meta["spec_verify_ct"] < meta["completion_tokens"]
