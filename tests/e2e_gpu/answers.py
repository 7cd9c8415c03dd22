"""What servers answer to the same prompts, bit for bit."""

from __future__ import annotations

from benchmarks.serve import checkpoints, client
from cpu_host.server import Server

Numbers = tuple[list[int], list[float], list[float]]

#: Tokens that every served model has.
VOCAB = min(geometry.vocab for geometry in checkpoints.GEOMETRIES.values())
#: A prefill of few rows, and one of many: other kernels multiply it.
PROMPTS = [client.prompts(1, length, VOCAB, "fixed")[0] for length in (48, 200)]


def numbers(server: Server) -> list[Numbers]:
    """Tokens, and the log-probabilities of answer and prompt."""
    # SGLang's attention and bf16 GEMMs have other bits in another batch, and after a prefix that was cached.
    server.forget()
    answers = [server.generate(prompt, 8) for prompt in PROMPTS]
    return [(answer.tokens, answer.output, answer.prompt) for answer in answers]
