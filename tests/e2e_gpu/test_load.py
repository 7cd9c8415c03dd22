"""A served model answers under load, to clients that hang up, and after a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from benchmarks.serve import checkpoints, client
from cpu_host.server import Generation, Server
from tests.e2e_gpu.conftest import SERVED, START_TIMEOUT, MakeLaunch, table_digest

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]
VOCAB = min(geometry.vocab for geometry in checkpoints.GEOMETRIES.values())
PROMPT = client.prompts(1, 48, VOCAB, "fixed")[0]


@pytest.fixture(scope="module", params=SERVED, ids=lambda p: f"{p[0]}-{'moe' if p[1] else 'dense'}")
def served(request: pytest.FixtureRequest) -> tuple[str, bool]:
    chosen: tuple[str, bool] = request.param
    return chosen


@pytest.fixture(scope="module")
def server(served: tuple[str, bool], make_launch: MakeLaunch) -> Iterator[Server]:
    with Server(make_launch(*served), timeout=START_TIMEOUT) as running:
        yield running


@pytest.mark.parametrize("concurrency", [1, 8, 64])
@pytest.mark.timeout(1200)
def test_not_one_request_fails_under_load(server: Server, request: pytest.FixtureRequest, concurrency: int) -> None:
    end = time.monotonic() + request.config.getoption("--e2e-seconds")
    tokens, rounds = 0, 0
    while rounds == 0 or time.monotonic() < end:
        # Lengths differ, so that requests come and go at different steps.
        asked = [client.prompts(1, 1 + (37 * i) % 150, VOCAB, (rounds, i))[0] for i in range(2 * concurrency)]
        burst = asyncio.run(client.burst(server.url, asked, 40 + rounds % 30, concurrency))
        assert burst.errors == [], server.tail()
        tokens += sum(answer.tokens for answer in burst.answers)
        rounds += 1
    print(f"{tokens} tokens in {rounds} bursts at {concurrency}")
    assert server.crash_lines() == []


def test_clients_that_hang_up_leave_the_others_alone(server: Server) -> None:
    async def mixed() -> client.Burst:
        leaving = [client.hang_up(server.url, PROMPT, 2000) for _ in range(12)]
        staying = client.burst(server.url, client.prompts(12, 30, VOCAB, "staying"), 100, 12)
        return (await asyncio.gather(staying, *leaving))[0]

    assert asyncio.run(mixed()).errors == []
    # What was left behind is gone: a server full of it could not take this many at once.
    again = asyncio.run(client.burst(server.url, client.prompts(64, 30, VOCAB, "again"), 20, 64))
    assert again.errors == []


def test_a_restarted_server_gives_the_same_answer(
    server: Server, served: tuple[str, bool], make_launch: MakeLaunch
) -> None:
    """With the tuning table that it was given the first time, if there is one."""
    table = table_digest()
    first = server.generate(PROMPT, 8)
    with Server(make_launch(*served), timeout=START_TIMEOUT) as other:
        second = other.generate(PROMPT, 8)
        assert other.stop() == []
    assert other.crash_lines() == []
    assert table_digest() == table
    assert numbers(second) == numbers(first)


def numbers(answer: Generation) -> tuple[list[int], list[float], list[float]]:
    return answer.tokens, answer.output, answer.prompt
