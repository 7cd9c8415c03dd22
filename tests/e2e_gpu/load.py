"""Load that lasts: bursts of requests of many lengths, one after the other."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from benchmarks.serve import client


@dataclass(frozen=True)
class Load:
    """What one server answered.

    Attributes:
        tokens: how many came back.
        bursts: how many rounds of requests that took.
        errors: of the burst that ended the load, empty if every request was answered in full.
    """

    tokens: int
    bursts: int
    errors: list[str]


def put(url: str, concurrency: int, seconds: float, vocab: int) -> Load:
    """Keep ``concurrency`` requests in flight for some seconds, or until one fails; one burst at least."""
    end = time.monotonic() + seconds
    tokens, bursts = 0, 0
    while bursts == 0 or time.monotonic() < end:
        # Lengths differ, so that requests come and go at different steps.
        asked = [client.prompts(1, 1 + (37 * i) % 150, vocab, (bursts, i))[0] for i in range(2 * concurrency)]
        burst = asyncio.run(client.burst(url, asked, 40 + bursts % 30, concurrency))
        tokens += sum(answer.tokens for answer in burst.answers)
        bursts += 1
        if burst.errors:
            return Load(tokens, bursts, burst.errors)
    return Load(tokens, bursts, [])
