"""``sm120_tuned`` on a real server: it follows its table, and then computes what the chosen backend computes."""

from __future__ import annotations

import re

import pytest

from cpu_host.server import Server
from sglang_sm120.tuning.cases import shapes_of_model
from tests.e2e_gpu.answers import same_bits
from tests.e2e_gpu.conftest import Table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.timeout(1800),  # alone it waits for a tuning table and for the start of its servers
    pytest.mark.parametrize("served", [("sm120_tuned", "dense")], indirect=True, ids="-".join),
]


def test_servers_follow_the_table_and_leave_it_as_it_is(
    server: Server, second_server: Server, tuning_table: Table
) -> None:
    shapes = shapes_of_model(str(tuning_table.model), 1)
    wanted = {(shape.n, shape.k): f"every M {tuning_table.value}" for shape in shapes}
    for each in (server, second_server):
        told = re.findall(r"N=(\d+) K=(\d+) bfloat16: (.+)$", each.log(), re.MULTILINE)
        assert {(int(n), int(k)): choice for n, k, choice in told} == wanted, each.tail()
        assert "has no entry for" not in each.log()
    assert tuning_table.path.read_bytes() == tuning_table.written


def test_answers_have_the_bits_of_the_backend_that_the_table_chose(server: Server, untuned_server: Server) -> None:
    assert same_bits(server, untuned_server)
