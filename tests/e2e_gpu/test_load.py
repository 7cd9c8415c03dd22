"""A served model answers under load, to clients that hang up, and after a restart."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.serve import client
from cpu_host.server import Server
from tests.e2e_gpu.answers import PROMPTS, VOCAB, Numbers, numbers
from tests.e2e_gpu.conftest import Loads, Served

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]


@pytest.mark.parametrize("concurrency", [1, 8, 64])
@pytest.mark.timeout(1800)
def test_not_one_request_fails_under_load(server: Server, served: Served, loads: Loads, concurrency: int) -> None:
    load = loads(concurrency)[served]
    assert load.errors == [], server.tail()
    print(f"{load.tokens} tokens in {load.bursts} bursts at {concurrency}")


def test_clients_that_hang_up_leave_the_others_alone(server: Server) -> None:
    async def mixed() -> client.Burst:
        leaving = [client.hang_up(server.url, PROMPTS[0], 2000) for _ in range(12)]
        staying = client.burst(server.url, client.prompts(12, 30, VOCAB, "staying"), 100, 12)
        return (await asyncio.gather(staying, *leaving))[0]

    assert asyncio.run(mixed()).errors == []
    # Others connect again and are served in full.
    again = asyncio.run(client.burst(server.url, client.prompts(64, 30, VOCAB, "again"), 20, 64))
    assert again.errors == []


@pytest.mark.timeout(1800)
def test_a_server_that_is_started_again_gives_the_same_answer(
    before_restart: dict[Served, list[Numbers]], server: Server, served: Served
) -> None:
    """Under ``sm120_tuned`` with the same tuning table."""
    assert numbers(server) == before_restart[served]
