"""Each FP4 layer of a served model computes what the float64 oracle computes from the same activations.

The model's weights are random, so its tokens say nothing: W4A4 rounds activations to 16 values, and two right servers
round differently after a few layers. Hence the comparison layer by layer, in the scheduler, on the activations of real
requests (``SGLANG_SM120_VERIFY``): the first wrong result would end the server.
"""

from __future__ import annotations

import asyncio
import re

import pytest

from benchmarks.serve import checkpoints, client
from cpu_host.server import Server
from sglang_sm120 import env
from tests.e2e_gpu.conftest import SERVED, START_TIMEOUT, MakeLaunch

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]
#: Lengths of prompts on both sides of where the kernels change: one token, skinny, tiled.
LENGTHS = (1, 7, 33, 64, 65, 200)


@pytest.mark.parametrize(("value", "moe"), SERVED, ids=lambda p: p if isinstance(p, str) else "moe" if p else "dense")
def test_layers_are_right_on_the_activations_of_real_requests(make_launch: MakeLaunch, value: str, moe: bool) -> None:
    vocab = checkpoints.GEOMETRIES["moe" if moe else "dense"].vocab
    with Server(make_launch(value, moe, **{env.VERIFY: "1"}), timeout=START_TIMEOUT) as server:
        for length in LENGTHS:
            server.generate(client.prompts(1, length, vocab, length)[0], 3)
        together = asyncio.run(client.burst(server.url, client.prompts(16, 20, vocab, "together"), 6, 16))
        assert together.errors == []
        reports = re.findall(rf"{env.VERIFY}: (.*)", server.log())
        assert reports, server.tail()
        print(reports[-1])
        assert server.stop() == []
    assert server.crash_lines() == []
