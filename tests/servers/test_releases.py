"""Releases before the newest, which has tests of its own: started, asked, judged, and the judge judged.

Half of them: the matrix asks the scheduler of every release, and a served answer takes a minute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cpu_host.checkpoints import Format, Spec, linears_per_forward
from cpu_host.runtime.mutations import MUTATIONS
from cpu_host.server import Server
from sglang_sm120 import env
from tests.support.checkpoints import Checkpoints
from tests.support.servers import ask, judge, launch
from tools.envs import NEWEST, RELEASES

pytestmark = [pytest.mark.server, pytest.mark.matrix]


#: The first of the window, where each was different, then about every second one.
SERVED = ("0.5.9", "0.5.10", "0.5.11", "0.5.13", "0.5.15", "0.5.16", "0.5.18", "0.5.20", "0.5.22")
CASES: list[tuple[str, Format]] = [(release, "modelopt") for release in SERVED]
# The scheme of compressed-tensors checkpoints is the same file in all of them, the code around it is not.
CASES += [(release, "compressed-tensors") for release in ("0.5.9", "0.5.10", "0.5.11", "0.5.16")]


@pytest.mark.parametrize(("release", "kind"), CASES)
def test_served_right(
    release: str,
    kind: Format,
    checkpoints: Checkpoints,
    tmp_path: Path,
    record_sampled: Callable[[str, int, int], None],
) -> None:
    record_sampled("releases served", len(SERVED), sum(release != NEWEST for release in RELEASES))
    spec = Spec(format=kind, different_scales=True, bias=True)
    folder = checkpoints.folder(spec)
    reference = checkpoints.reference(folder)
    # The first of very many steps is checked by the server itself: SGLang's own warm-up, before a mistake is planted.
    report = tmp_path / "served.json"
    environ = {env.VERIFY: str(env.MAX_STEPS), env.REPORT: str(report)}
    with Server(launch(spec, folder, tmp_path, environment=f"sglang-{release}", environ=environ)) as server:
        assert re.search(r"SGLANG_SM120_VERIFY: (\d+) of \1 pairs of layer and M checked", server.log())
        comparison = judge(ask(server), reference)
        assert comparison.agrees, comparison
        rows = json.loads(report.read_text())["rows"]
        assert {row["backend"] for row in rows} == {"torch_reference"}
        assert {row["layers"] for row in rows} == {2}  # one of each class in each of two decoder layers
        for mutation in MUTATIONS:
            server.plant(mutation)
            comparison = judge(ask(server), reference)
            assert comparison.mean > 2 * comparison.MEAN_BOUND, f"{mutation}: {comparison}"
        (evidence,) = server.evidence()
        assert evidence.backend == "torch_reference"
        assert evidence.calls == evidence.forwards * linears_per_forward(spec)
        assert server.stop() == []
    assert server.crash_lines() == []
