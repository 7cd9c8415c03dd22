"""What servers are asked, and what they answer to the same prompts, bit for bit."""

from __future__ import annotations

import asyncio

from benchmarks.serve import checkpoints, client
from cpu_host.server import Server

Numbers = tuple[list[int], list[float], list[float]]

#: Tokens that every served model has.
VOCAB = min(geometry.vocab for geometry in checkpoints.GEOMETRIES.values())
#: A prefill of few rows, and one of many: other kernels multiply it.
PROMPTS = [client.prompts(1, length, VOCAB, "fixed")[0] for length in (48, 200)]
#: Lengths of prompts on both sides of where the kernels change: one token, few, many.
LENGTHS = (1, 7, 33, 64, 65, 200)


def numbers(server: Server) -> list[Numbers]:
    """Tokens, and the log-probabilities of answer and prompt."""
    # SGLang's attention and bf16 GEMMs have other bits in another batch, and after a prefix that was cached.
    server.forget()
    answers = [server.generate(prompt, 8) for prompt in PROMPTS]
    return [(answer.tokens, answer.output, answer.prompt) for answer in answers]


def ask_many_lengths(server: Server) -> list[str]:
    """Send prompts of all :data:`LENGTHS` one by one, then 16 at once; return what failed of these."""
    for length in LENGTHS:
        server.generate(client.prompts(1, length, VOCAB, length)[0], 3)
    return asyncio.run(client.burst(server.url, client.prompts(16, 20, VOCAB, "together"), 6, 16)).errors
