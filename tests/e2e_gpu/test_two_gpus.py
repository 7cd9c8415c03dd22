"""Servers on two GPUs: each rank's layers are right, the ranks stay in step, and two GPUs answer what one does.

The sums of the ranks go through NCCL alone. SGLang's own all-reduce and FlashInfer's fusion of it are compiled at first
use and ask for NVLink multicast, which not every machine may use; our kernels lie in front of the sum either way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.serve import client, contenders
from cpu_host.server import Server
from sglang_sm120 import env
from tests.e2e_gpu.answers import VOCAB, ask_many_lengths, numbers
from tests.e2e_gpu.conftest import CHOSEN, LAYERS, ROLES, find, together
from tests.e2e_gpu.load import put

#: The first test waits for the start of every server.
pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.two_gpus, pytest.mark.timeout(1800)]
#: Kind of model and how its layers are shared: experts by their columns, or whole ones by their number.
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dense": ("dense", ()),
    "moe-columns": ("moe", ()),
    "moe-experts": ("moe", ("--ep-size", "2")),
}
TWO_GPUS = ("--tp-size", "2", "--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
#: Only the first rank says at the usual level what it has checked.
ALL_RANKS_SPEAK = ("--log-level", "debug")
#: SGLang refuses to start where one GPU has less free memory than the other: one-GPU servers are on the first one.
ENVIRON = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
#: FP4 layers that SGLang makes of a layer of the model: qkv, o, gate_up, down; with experts qkv, o, experts.
FP4_LAYERS = {"dense": 4 * LAYERS["dense"], "moe": 3 * LAYERS["moe"]}
CONCURRENCY, SECONDS = 16, 8.0
#: Of the log-probabilities from one GPU and from two. The sum of two bfloat16 halves is rounded once more, which W4A4
#: blows up: a model of this depth reaches 0.97 in float32 arithmetic. Two halves of a dense layer's weights in the
#: wrong order leave 0.8 at most. Wrong experts may leave 0.96: of eight that are averaged, each counts for little.
CORRELATION = 0.9


@pytest.fixture(scope="module")
def two_gpu_fleet(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[contenders.Fleet]:
    """Every model as every way shares it out, plain and checked, and plain on one GPU."""
    launches = {}

    def add(name: str, kind: str, options: tuple[str, ...], environ: dict[str, str]) -> None:
        settings = contenders.Settings(max_tokens=32768, extra=options)
        workdir = tmp_path_factory.mktemp(name.replace(" ", "-"))
        launches[name] = contenders.launch(CHOSEN, models(kind), workdir, settings, moe=kind == "moe")
        launches[name].environ.update(environ)

    for way, (kind, options) in WAYS.items():
        for role, environ in ROLES.items():
            speak = ALL_RANKS_SPEAK if env.VERIFY in environ else ()
            add(f"{role} {way}", kind, (*TWO_GPUS, *options, *speak), ENVIRON | environ)
    for kind in LAYERS:
        add(f"one GPU {kind}", kind, (), {})
    with together(launches) as running:
        yield running


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> str:
    """How the model is shared out."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def pair(two_gpu_fleet: contenders.Fleet, way: str) -> Server:
    """The plain server on two GPUs."""
    return find(two_gpu_fleet, f"server {way}")


def test_layers_are_right_on_every_rank(two_gpu_fleet: contenders.Fleet, way: str) -> None:
    """The first wrong result of any rank ends the server."""
    checked = find(two_gpu_fleet, f"checked_server {way}")
    assert ask_many_lengths(checked) == [], checked.tail()
    reports = dict(re.findall(rf" TP(\d)(?: EP\d)?\] {env.VERIFY}: (.*)", checked.log()))
    assert sorted(reports) == ["0", "1"], checked.tail()
    kind = WAYS[way][0]
    experts = f", {LAYERS['moe']} of them experts" if kind == "moe" else ""
    for report in reports.values():
        assert f"({FP4_LAYERS[kind]} layers{experts}, " in report, report
        print(report)


def test_a_load_is_served_from_graphs_without_an_error(pair: Server) -> None:
    load = put(pair.url, CONCURRENCY, SECONDS, VOCAB)
    assert load.errors == [], pair.tail()
    assert re.search(r"Decode batch.*cuda graph: True", pair.log()), pair.tail()
    print(f"{load.tokens} tokens in {load.bursts} bursts at {CONCURRENCY}")


def test_two_gpus_answer_what_one_does(two_gpu_fleet: contenders.Fleet, pair: Server, way: str) -> None:
    one = find(two_gpu_fleet, f"one GPU {WAYS[way][0]}")
    # Short ones: attention over many random tokens averages itself away.
    prompts = client.prompts(32, 8, VOCAB, "short")
    found = [[value for prompt in prompts for value in server.generate(prompt, 1).prompt] for server in (one, pair)]
    correlation = torch.corrcoef(torch.tensor(found))[0, 1].item()
    assert correlation > CORRELATION
    print(f"correlation {correlation:.4f}")


def test_the_same_prompts_get_the_same_bits_from_two_gpus(pair: Server) -> None:
    assert numbers(pair) == numbers(pair)
