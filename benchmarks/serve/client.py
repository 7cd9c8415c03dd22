"""A streaming client of SGLang's ``/generate``: many requests at once, the time of every part of every answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

#: The server sends the first token at once and then every so many: an event for each token of 64 streams would measure
#: the web server.
STREAM_INTERVAL = 16


@dataclass(frozen=True)
class Answer:
    """One request.

    Attributes:
        tokens: tokens that came back.
        first_s, last_s: seconds from sending the request to its first and its last token.
        error: what went wrong, empty if nothing did.
    """

    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    error: str = ""

    @property
    def per_token_s(self) -> float:
        """Seconds between two tokens after the first, on average."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class Burst:
    """Requests that were in flight together.

    Attributes:
        seconds: from the first request to the last token.
        answers: one for each request.
    """

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error]


def prompts(count: int, length: int, vocab: int, seed: object) -> list[list[int]]:
    """Prompts of random tokens; equal seeds give equal prompts."""
    source = random.Random(str(seed))
    return [[source.randrange(1, vocab) for _ in range(length)] for _ in range(count)]


async def stream(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], new_tokens: int) -> Answer:
    """Send one request and read its answer to the end. A failure of any kind is an answer with an error."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    began = time.perf_counter()
    tokens, first, last = 0, 0.0, 0.0
    try:
        async with session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                return Answer(error=f"HTTP {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return Answer(tokens, first, last, str(event["error"])[:200])
                tokens, last = int(event["meta_info"]["completion_tokens"]), time.perf_counter() - began
                first = first or last
    except (aiohttp.ClientError, asyncio.TimeoutError, json.JSONDecodeError) as error:
        return Answer(tokens, first, last, f"{type(error).__name__}: {error}"[:200])
    wrong = "" if tokens == new_tokens else f"{tokens} tokens instead of {new_tokens}"
    return Answer(tokens, first, last, wrong)


async def burst(
    url: str, asked: Sequence[Sequence[int]], new_tokens: int, concurrency: int, timeout_s: float = 120.0
) -> Burst:
    """Keep ``concurrency`` requests in flight until every prompt was answered."""
    waiting = list(reversed(asked))
    answers: list[Answer] = []

    async def worker(session: aiohttp.ClientSession) -> None:
        while waiting:
            answers.append(await stream(session, url, waiting.pop(), new_tokens))

    limits = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    # An answer's line can be longer than aiohttp's default buffer allows: it repeats every token so far.
    async with aiohttp.ClientSession(connector=connector, timeout=limits, read_bufsize=1 << 20) as session:
        began = time.perf_counter()
        await asyncio.gather(*(worker(session) for _ in range(concurrency)))
        return Burst(time.perf_counter() - began, tuple(answers))


async def hang_up(url: str, prompt: Sequence[int], new_tokens: int, timeout_s: float = 60.0) -> None:
    """Start an answer and close the connection once its first token came.

    Raises:
        RuntimeError: no token came.
    """
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    limits = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=limits, read_bufsize=1 << 20) as session,
        session.post(f"{url}/generate", json=body) as response,
    ):
        async for line in response.content:
            if line.startswith(b"data: {"):
                return
    raise RuntimeError("the stream ended before its first token")
