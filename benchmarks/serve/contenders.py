"""What is compared: servers of one SGLang on one checkpoint that differ in their FP4 backend."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.serve.client import STREAM_INTERVAL
from cpu_host.runtime import EVIDENCE_VARIABLE, MUTATION_VARIABLE
from cpu_host.server import Launch, Server, ServerError

#: Options by contender, for a dense and for a MoE model. ``humming`` is SGLang's own way to those kernels; its package
#: may be missing, and then that is the result.
OPTIONS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "sm120": (("--fp4-gemm-backend", "sm120"), ("--moe-runner-backend", "sm120")),
    "sm120_tuned": (("--fp4-gemm-backend", "sm120_tuned"), ("--moe-runner-backend", "sm120_tuned")),
    "marlin": (("--fp4-gemm-backend", "marlin"), ("--moe-runner-backend", "marlin")),
    "humming": (("--quantization", "humming"), ("--moe-runner-backend", "humming")),
}
#: What the names of a contender's kernels contain; SGLang may serve something else than what was asked for.
KERNELS = {
    "sm120": re.compile(r"sm120::"),
    "marlin": re.compile(r"marlin", re.IGNORECASE),
    "humming": re.compile(r"humming", re.IGNORECASE),
}
MODELOPT = ("--quantization", "modelopt_fp4")


@dataclass(frozen=True)
class Settings:
    """What every server of a comparison has in common.

    Attributes:
        max_requests: largest concurrency; CUDA graphs of decode are captured up to it.
        max_tokens: tokens that the KV cache holds.
        extra: further options.
    """

    max_requests: int = 64
    max_tokens: int = 65536
    extra: tuple[str, ...] = ()

    def options(self) -> list[str]:
        # FlashInfer's attention and sampling need packages that a test machine may lack, and are not what is measured.
        # The cache's size is given. SGLang takes whatever servers that start beside this one allocate for its own and
        # refuses to start if that exceeds the share, which is large therefore.
        return [
            *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
            *("--max-total-tokens", str(self.max_tokens), "--mem-fraction-static", "0.9"),
            *("--max-running-requests", str(self.max_requests), "--cuda-graph-max-bs-decode", str(self.max_requests)),
            *("--stream-interval", str(STREAM_INTERVAL), "--disable-radix-cache"),
            *self.extra,
        ]


def options(name: str, moe: bool) -> list[str]:
    """The options that make a contender what it is."""
    dense, experts = OPTIONS[name]
    chosen = [*dense, *(experts if moe else ())]
    return chosen if "--quantization" in chosen else [*MODELOPT, *chosen]


def launch(
    name: str, model: Path, workdir: Path, settings: Settings, *, moe: bool = False, cpu: bool = False
) -> Launch:
    """How a contender is started, by this interpreter and with its PYTHONPATH."""
    # The counters of cpu_host would write a file after each forward.
    environ = {EVIDENCE_VARIABLE: "", MUTATION_VARIABLE: ""}
    if "PYTHONPATH" in os.environ:
        environ["PYTHONPATH"] = os.pathsep.join(
            str(Path(entry).absolute()) for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry
        )
    arguments = [*settings.options(), *options(name, moe)]
    return Launch(Path(sys.executable), model, workdir, None, arguments, environ, cpu=cpu)


class Fleet:
    """Servers that are started together and live until the context ends.

    Attributes:
        servers: those that started, by name.
        problems: why the others did not, by name: the end of the log.
    """

    def __init__(self, launches: dict[str, Launch], timeout_s: float) -> None:
        self._launches, self._timeout_s = launches, timeout_s
        self._pool = ThreadPoolExecutor(max(1, len(launches)))
        self.servers: dict[str, Server] = {}
        self.problems: dict[str, str] = {}

    def __enter__(self) -> Fleet:
        self._wait({name: partial(self._start, launch) for name, launch in self._launches.items()})
        return self

    def restart(self, names: Iterable[str]) -> None:
        """End servers and start each again in the same way, all at once. One that leaves a trace is a problem."""
        self._wait({name: partial(self._start_again, self.servers.pop(name)) for name in list(names)})

    def _wait(self, starts: Mapping[str, Callable[[], Server]]) -> None:
        # A server ends with the thread that started it, so these threads live as long as the servers do.
        waiting = {name: self._pool.submit(start) for name, start in starts.items()}
        for name, future in waiting.items():
            try:
                self.servers[name] = future.result()
            except ServerError as error:
                self.problems[name] = str(error)
            except BaseException:
                self.__exit__()
                raise

    def _start(self, launch: Launch) -> Server:
        return Server(launch, timeout=self._timeout_s).__enter__()

    def _start_again(self, server: Server) -> Server:
        killed = server.stop()
        if killed or server.crash_lines():
            raise ServerError(f"it did not end cleanly: {len(killed)} processes killed, {server.crash_lines()}")
        return self._start(server.launch)

    def __exit__(self, *_: object) -> None:
        for server in self.servers.values():
            server.stop()
        self._pool.shutdown()


def impostors(profiles: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Contenders whose profiles show none of their kernels, with the kernel that takes most of their time instead.

    Args:
        profiles: by contender and concurrency, as :func:`benchmarks.serve.profile.summary` returns them.
    """
    found = {}
    for name, by_concurrency in profiles.items():
        kernels = [kernel["name"] for profile in by_concurrency.values() for kernel in profile.get("kernels", ())]
        if kernels and name in KERNELS and not any(KERNELS[name].search(kernel) for kernel in kernels):
            most = re.split(r"[<(]", kernels[0].removeprefix("void "))[0]
            found[name] = f"SGLang served it with other kernels; most of the time went to {most}"
    return found


def last_lines(text: str, count: int = 12) -> str:
    """The end of a log, for a message."""
    return "\n".join(text.splitlines()[-count:])


def reason(problem: str) -> str:
    """The line of a server's last words that says most: its last error, without the time in front."""
    lines: Iterable[str] = [line.strip() for line in problem.splitlines() if "Error" in line or "error:" in line]
    return ([*lines] or [problem.strip().splitlines()[-1]])[-1][-300:]
