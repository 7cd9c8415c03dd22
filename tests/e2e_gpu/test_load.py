"""A served model answers under load, to clients that hang up, and after a restart."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.serve import checkpoints, client
from cpu_host.server import Generation, Server
from tests.e2e_gpu.conftest import table_digest

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]
VOCAB = min(geometry.vocab for geometry in checkpoints.GEOMETRIES.values())
PROMPT = client.prompts(1, 48, VOCAB, "fixed")[0]


@pytest.mark.parametrize("concurrency", [1, 8, 64])
@pytest.mark.timeout(1800)
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


def test_clients_that_hang_up_leave_the_others_alone(server: Server) -> None:
    async def mixed() -> client.Burst:
        leaving = [client.hang_up(server.url, PROMPT, 2000) for _ in range(12)]
        staying = client.burst(server.url, client.prompts(12, 30, VOCAB, "staying"), 100, 12)
        return (await asyncio.gather(staying, *leaving))[0]

    assert asyncio.run(mixed()).errors == []
    # Others connect again and are served in full.
    again = asyncio.run(client.burst(server.url, client.prompts(64, 30, VOCAB, "again"), 20, 64))
    assert again.errors == []


def test_a_server_that_is_started_again_gives_the_same_answer(server: Server, second_server: Server) -> None:
    """With the tuning table that the first one was given, if there is one, and which neither has changed."""
    table = table_digest()
    # SGLang's attention and bf16 GEMMs have other bits in another batch, and after a prefix that was cached.
    for each in (server, second_server):
        each.forget()
    assert numbers(second_server.generate(PROMPT, 8)) == numbers(server.generate(PROMPT, 8))
    assert table_digest() == table


def numbers(answer: Generation) -> tuple[list[int], list[float], list[float]]:
    return answer.tokens, answer.output, answer.prompt
