"""The steps of the demo after its environment: checkpoint, server, requests, checks, end."""

from __future__ import annotations

import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from cpu_host import checkpoints, hf_reference
from cpu_host.server import Generation, Launch, Server, ServerError
from sglang_sm120 import device
from sglang_sm120.backends.verdict import automatic_choice
from tools.demo_screen import Screen

SPEC = checkpoints.Spec(format="modelopt")
TEXT = "the quick brown fox jumps over the lazy dog. hello world, this is a"
NEW_TOKENS = 16


def run(screen: Screen) -> int:
    """Run every step; the exit code is 0 if every check passed."""
    screen.fact("", f"Python {platform.python_version()}, torch {torch.__version__}, SGLang {version('sglang')}")
    with tempfile.TemporaryDirectory(prefix="sglang-sm120-demo-") as folder:
        try:
            _steps(screen, Path(folder))
        except ServerError as error:
            screen.failed(str(error))
    screen.end()
    return 1 if screen.failures else 0


def _steps(screen: Screen, folder: Path) -> None:
    screen.step("Checkpoint", "Qwen3 with random weights, ModelOpt NVFP4, made here", number=2)
    model = checkpoints.make(folder / "model", SPEC)
    size = sum(file.stat().st_size for file in model.iterdir())
    screen.fact("size", f"{size / 1e6:.1f} MB, 2 layers, hidden 128")
    screen.done()

    backend, cpu = _best_backend()
    arguments = ["--quantization", "modelopt_fp4"]
    # A captured graph replays kernels without Python, where calls are counted.
    arguments += [] if cpu else ["--disable-cuda-graph"]
    launch = Launch(Path(sys.executable), model, folder / "server", backend=backend, arguments=arguments, cpu=cpu)
    screen.step("Server", f"python -m sglang.launch_server --quantization modelopt_fp4 --fp4-gemm-backend {backend}")
    server = Server(launch, on_wait=lambda: screen.waiting("loading SGLang in three processes"))
    with server:
        screen.fact("address", f"http://127.0.0.1:{server.port}, {'CPU' if cpu else torch.cuda.get_device_name()}")
        screen.done()
        answer = _requests(screen, server)
        _checks(screen, server, model, backend, answer)
        screen.step("End", "SIGTERM")
        leftover = server.stop()
    screen.check(not leftover, "processes", f"{len(leftover)} left over")
    crashes = server.crash_lines()
    screen.check(not crashes, "log", "no crash lines" if not crashes else crashes[0])
    screen.done()


def _best_backend() -> tuple[str, bool]:
    """The backend to show and whether the server runs on the CPU."""
    if not torch.cuda.is_available():
        return "torch_reference", True
    choice = automatic_choice(device.collect_facts())
    return choice[0].backend if choice else "torch_reference", False


def _requests(screen: Screen, server: Server) -> tuple[list[int], Generation]:
    screen.step("Requests", f'"{TEXT}"')
    completion = server.post(
        "/v1/completions", {"model": "demo", "prompt": TEXT, "max_tokens": NEW_TOKENS, "temperature": 0}
    )
    screen.fact("/v1/completions", repr(completion["choices"][0]["text"]))
    prompt = server.post("/tokenize", {"model": "demo", "prompt": TEXT})["tokens"]
    answer = server.generate(prompt, NEW_TOKENS)
    screen.fact("/generate", f"{len(prompt)} tokens in, {len(answer.tokens)} out: {answer.tokens}")
    screen.fact("", repr(answer.text))
    screen.done()
    return prompt, answer


def _checks(screen: Screen, server: Server, model: Path, backend: str, asked: tuple[list[int], Generation]) -> None:
    prompt, answer = asked
    screen.step("Checks", "counted by the process that runs the model, judged by a model that shares no code with it")
    for record in server.evidence():
        linears = checkpoints.linears_per_forward(SPEC)
        screen.check(record.backend == backend, "backend", f"{record.backend}, in process {record.pid}")
        for shape, entry in sorted(record.linears.items()):
            screen.fact(f"  {shape}", f"{entry['calls']} calls, {entry['rows']} rows")
        expected = linears * record.forwards
        text = f"{record.calls} = {linears} linears x {record.forwards} forwards"
        screen.check(record.calls == expected, "calls", text if record.calls == expected else f"{text} is {expected}")
    served = [*answer.prompt, *answer.output]
    comparison = hf_reference.compare(hf_reference.load(model), prompt, answer.tokens, served)
    screen.check(comparison.agrees, "log-probabilities", f"{len(served)} against dequantized Hugging Face weights:")
    screen.fact("", str(comparison))
    screen.done()
