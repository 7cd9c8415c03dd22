"""``sm120_tuned`` on a real server: it follows its table, and then computes what the chosen backend computes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from cpu_host.server import Server
from sglang_sm120.tuning.cases import shapes_of_model
from sglang_sm120.tuning.expert_cases import experts_of_model
from tests.e2e_gpu.answers import numbers
from tests.e2e_gpu.conftest import SERVED, TUNED, Served, Table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.timeout(1800),  # alone it waits for a tuning table and for the start of its servers
    pytest.mark.parametrize("served", [each for each in SERVED if each[0] == TUNED], indirect=True, ids="-".join),
]


def test_a_server_follows_the_table_and_leaves_it_as_it_is(
    server: Server, tuning_tables: Callable[[str], Table], served: Served
) -> None:
    table = tuning_tables(served[1])
    wanted = {shape.label for shape in shapes_of_model(str(table.model), 1)}
    wanted |= {shape.label for shape in experts_of_model(str(table.model), 1, 1)}
    told = re.findall(r"(N=\d+ K=\d+|\d+ experts, .*) bfloat16: (.+)$", server.log(), re.MULTILINE)
    assert dict(told) == dict.fromkeys(wanted, f"every M {table.value}"), server.tail()
    assert "has no entry for" not in server.log()
    assert table.path.read_bytes() == table.written


def test_answers_have_the_bits_of_the_backend_that_the_table_chose(server: Server, untuned_server: Server) -> None:
    assert numbers(server) == numbers(untuned_server)
