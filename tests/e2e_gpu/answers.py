"""Whether two servers answer the same prompts with the same bits."""

from __future__ import annotations

from benchmarks.serve import checkpoints, client
from cpu_host.server import Generation, Server

#: Tokens that every served model has.
VOCAB = min(geometry.vocab for geometry in checkpoints.GEOMETRIES.values())
#: A prefill of few rows, and one of many: other kernels multiply it.
PROMPTS = [client.prompts(1, length, VOCAB, "fixed")[0] for length in (48, 200)]


def same_bits(one: Server, other: Server) -> bool:
    """Compare tokens and log-probabilities of prompt and answer."""
    # SGLang's attention and bf16 GEMMs have other bits in another batch, and after a prefix that was cached.
    for server in (one, other):
        server.forget()
    return all(_numbers(one.generate(prompt, 8)) == _numbers(other.generate(prompt, 8)) for prompt in PROMPTS)


def _numbers(answer: Generation) -> tuple[list[int], list[float], list[float]]:
    return answer.tokens, answer.output, answer.prompt
