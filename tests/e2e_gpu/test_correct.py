"""Each FP4 layer of a served model computes what the float64 oracle computes from the same activations.

The model's weights are random, so its tokens say nothing: W4A4 rounds activations to 16 values, and two right servers
round differently after a few layers. Hence the comparison layer by layer, in the scheduler, on the activations of real
requests (``SGLANG_SM120_VERIFY``): the first wrong result ends the server.
"""

from __future__ import annotations

import re

import pytest

from cpu_host.server import Server
from sglang_sm120 import env
from tests.e2e_gpu.answers import ask_many_lengths
from tests.e2e_gpu.conftest import LAYERS

#: The first test waits for a tuning table and for the start of every server.
pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_layers_are_right_on_the_activations_of_real_requests(checked_server: Server, served: tuple[str, str]) -> None:
    assert ask_many_lengths(checked_server) == [], checked_server.tail()
    reports = re.findall(rf"{env.VERIFY}: (.*)", checked_server.log())
    assert reports, checked_server.tail()
    if served[1] == "moe":
        assert f"{LAYERS['moe']} of them experts" in reports[-1], reports[-1]
    print(reports[-1])
