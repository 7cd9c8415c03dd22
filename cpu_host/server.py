"""Start a real SGLang server, talk to it, read what its scheduler counted, and stop it without a trace.

Standard library only, so that the demo and the tests of any environment can use it. A server binds to
127.0.0.1 and a free port and runs in its own session, by which all its processes are found again.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from cpu_host.runtime import EVIDENCE_VARIABLE, MUTATION_VARIABLE

_MARKER = "SM120_SERVER_ID"
#: What must not stand in the log of a server that was stopped: a dead child, or our own files in a traceback. Other
#: tracebacks are SGLang's way to go: 0.5.19, for one, logs the ``SystemExit: 0`` that it ends its event loop with.
_CRASH = re.compile(r"\bcrashed\b|Segmentation fault|core dumped|sglang_sm120/\S+\.py")


class ServerError(RuntimeError):
    """The server did not start or did not answer; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Launch:
    """How to start a server.

    Attributes:
        python: interpreter of the environment.
        model: checkpoint folder.
        workdir: where the log and the evidence go; also the working directory, so that no source tree is
            importable by accident.
        backend: value of ``--fp4-gemm-backend``, ``None`` leaves the option out.
        arguments: further command-line arguments.
        environ: further environment variables.
        command: what comes after the interpreter; ``sglang serve`` differs.
        cpu: run on the CPU.
    """

    python: Path
    model: Path
    workdir: Path
    backend: str | None = "torch_reference"
    arguments: Sequence[str] = ()
    environ: dict[str, str] = field(default_factory=dict)
    command: Sequence[str] = ("-m", "sglang.launch_server")
    cpu: bool = True

    def command_line(self, port: int) -> list[str]:
        options = ["--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(port)]
        options += ["--max-total-tokens", "2048", "--random-seed", "0"]
        if self.backend is not None:
            options += ["--fp4-gemm-backend", self.backend]
        if self.cpu:
            options += ["--device", "cpu", "--attention-backend", "torch_native"]
        return [str(self.python), *self.command, *options, *self.arguments]

    def environment(self) -> dict[str, str]:
        settings = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
        inherited = {k: v for k, v in os.environ.items() if k not in settings}
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        # Releases up to 0.5.10 compile small functions with torch.compile, which would call a C++ compiler.
        cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"} if self.cpu else {}
        evidence = {
            EVIDENCE_VARIABLE: str(self.workdir / "evidence"),
            MUTATION_VARIABLE: str(self.workdir / "mutation"),
        }
        return inherited | quiet | cpu | evidence | self.environ


@dataclass(frozen=True)
class Generation:
    """One answer of ``/generate``.

    Attributes:
        text, tokens: what was generated.
        output: log-probability of each generated token.
        prompt: log-probability of each prompt token after the first.
    """

    text: str
    tokens: list[int]
    output: list[float]
    prompt: list[float]


@dataclass(frozen=True)
class Evidence:
    """What the process that ran the model counted; see ``cpu_host.runtime.evidence``."""

    pid: int
    process: str
    backend: str
    forwards: int
    linears: dict[str, dict[str, int]]
    multiplied_by: dict[str, int]

    @property
    def calls(self) -> int:
        return sum(entry["calls"] for entry in self.linears.values())


def _parsed(text: str) -> Any:
    return json.loads(text) if text else None


def free_port() -> int:
    """A port that was free a moment ago, below 30000: some releases open another one 10000 above it."""
    while True:
        port = random.randint(20000, 29999)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Runs in the child before the server starts: a killed test run must not leave one behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """A running server; use it as a context manager."""

    def __init__(self, launch: Launch, *, timeout: float = 420.0, on_wait: Callable[[], None] = lambda: None) -> None:
        self.launch = launch
        self.timeout = timeout
        self._on_wait = on_wait
        self.port = free_port()
        self.ready_after = 0.0
        self._id = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._running_log = 0

    @property
    def log_path(self) -> Path:
        return self.launch.workdir / "server.log"

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def __enter__(self) -> Server:
        shutil.rmtree(self._evidence_folder(), ignore_errors=True)
        self.launch.workdir.mkdir(parents=True, exist_ok=True)
        self._log = self.log_path.open("wb")
        began = time.monotonic()
        self._process = subprocess.Popen(
            self.launch.command_line(self.port),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self.launch.workdir,
            env=self.launch.environment() | {_MARKER: self._id},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            self._wait_until_ready(began)
        except BaseException:
            self.stop()
            raise
        self.ready_after = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_ready(self, began: float) -> None:
        assert self._process is not None
        for polls in itertools.count():
            if self._process.poll() is not None:
                raise ServerError(f"the server exited with {self._process.returncode}\n{self.tail()}")
            with contextlib.suppress(ServerError):
                self.get("/health", timeout=20)  # 503 until SGLang's own warm-up request was answered
                return
            if time.monotonic() - began > self.timeout:
                raise ServerError(f"not ready after {self.timeout:.0f} s\n{self.tail()}")
            if polls % 25 == 0:
                self._on_wait()
            time.sleep(0.2)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(line[:300] for line in self.log().splitlines()[-lines:])

    # --- requests ------------------------------------------------------------------------------------------

    def get(self, path: str, *, timeout: float = 60) -> Any:
        return _parsed(self._request(urllib.request.Request(self._url(path)), timeout))

    def post(self, path: str, body: dict[str, Any], *, timeout: float = 120) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url(path), json.dumps(body).encode(), headers)
        return _parsed(self._request(request, timeout))

    def forget(self, *, timeout: float = 60) -> None:
        """Wait until no request runs, then empty the prefix cache: the next answer depends on its request alone."""
        url = self._url(f"/flush_cache?timeout={timeout}")
        self._request(urllib.request.Request(url, method="POST"), timeout + 10)

    def generate(self, prompt: Sequence[int], new_tokens: int, **extra: Any) -> Generation:
        """Greedy generation with log-probabilities of the prompt and of the output."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answer = self.post("/generate", body | extra)
        meta = answer["meta_info"]
        output = meta["output_token_logprobs"]
        return Generation(
            text=answer["text"],
            tokens=[entry[1] for entry in output],
            output=[entry[0] for entry in output],
            prompt=[entry[0] for entry in meta["input_token_logprobs"][1:]],
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _url(self, path: str) -> str:
        return self.url + path

    def _request(self, request: urllib.request.Request, timeout: float) -> str:
        # No proxy: a machine's proxy settings must not get between us and the loopback address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise ServerError(f"{request.full_url} answered {error.code}: {error.read().decode()[:2000]}") from error
        except OSError as error:
            raise ServerError(f"{request.full_url}: {error}\n{self.tail()}") from error

    def plant(self, mutation: str) -> None:
        """Make the following forwards wrong in a named way; an empty name makes them right again."""
        (self.launch.workdir / "mutation").write_text(mutation, encoding="ascii")

    # --- evidence and end ----------------------------------------------------------------------------------

    def evidence(self) -> list[Evidence]:
        """One record per process that ran the model."""
        files = sorted(self._evidence_folder().glob("*.json"))
        return [Evidence(**json.loads(file.read_text(encoding="utf-8"))) for file in files]

    def _evidence_folder(self) -> Path:
        return self.launch.workdir / "evidence"

    def processes(self) -> list[int]:
        """Every live process of this server: those of its session, and those that carry its marker.

        One sign would not do: a process may open a session of its own, and one that changes its title
        (SGLang's do) overwrites its environment.
        """
        if self._process is None:
            return []
        marker = f"{_MARKER}={self._id}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                    mine = int(session) == self._process.pid or marker in (entry / "environ").read_bytes().split(b"\0")
                    if mine and state != "Z":
                        found.append(int(entry.name))
        return found

    def stop(self) -> list[int]:
        """Ask the server to end, then end what is left; return the processes that had to be killed."""
        if self._process is None:
            return []
        self._running_log = len(self.log())
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        deadline = time.monotonic() + 5  # the children notice a moment later
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        leftover = self.processes()
        for pid in leftover:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        if self._log is not None:
            self._log.close()
        return leftover

    def crash_lines(self) -> list[str]:
        """What looks like a crash in the log since :meth:`stop`."""
        return [line for line in self.log()[self._running_log :].splitlines() if _CRASH.search(line)]
