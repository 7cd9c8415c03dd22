"""Real SGLang servers for tests: which environment, which options, and the log-probability check."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import Qwen3ForCausalLM

from cpu_host.checkpoints import Spec
from cpu_host.hf_reference import Comparison, compare
from cpu_host.server import Generation, Launch, Server
from tools import envs

#: Sixty different-looking tokens; long enough that a mean over them is steady.
PROMPT = [(37 * i * i + 11 * i + 5) % 511 + 1 for i in range(60)]
NEW_TOKENS = 8


@cache
def interpreter(environment: str) -> Path:
    """Interpreter of an environment of ``tools/envs.py``, made or refreshed on first use."""
    return envs.ensure(environment)


def launch(
    spec: Spec, folder: Path, workdir: Path, *, environment: str = "dev", arguments: Sequence[str] = (), **options: Any
) -> Launch:
    """The options of a test server. Without a prefix cache, so that every request computes its whole prompt."""
    quantization = ["--quantization", "modelopt_fp4"] if spec.format.startswith("modelopt") else []
    extra = [*quantization, "--disable-radix-cache", *arguments]
    return Launch(interpreter(environment), folder, workdir, arguments=extra, **options)


def ask(server: Server, **extra: Any) -> Generation:
    return server.generate(PROMPT, NEW_TOKENS, **extra)


def judge(answer: Generation, reference: Qwen3ForCausalLM) -> Comparison:
    """Compare every log-probability of an answer to :data:`PROMPT` with the reference model's."""
    return compare(reference, PROMPT, answer.tokens, [*answer.prompt, *answer.output])
