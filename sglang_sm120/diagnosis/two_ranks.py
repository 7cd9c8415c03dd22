"""Whether two GPUs can talk to each other: the first all-reduce hangs where P2P is broken (nccl#1999)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

#: Imports of torch, NCCL's start and one all-reduce; a sound machine needs some ten seconds.
SECONDS = 90.0
#: After it was killed, a process inside a driver that hangs does not end.
_SECONDS_TO_END = 10.0
#: In front of every child. It leads a session of its own, so that no signal of the terminal reaches it, and a rank that
#: hangs would keep its GPU from then on: the kernel kills it when its parent dies. 1 is PR_SET_PDEATHSIG.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[4]):
    os._exit(1)
"""
_CHILD = """
import sys
import torch
import torch.distributed as distributed

backend, rank = sys.argv[1], int(sys.argv[2])
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)
distributed.init_process_group(backend, init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
numbers = torch.full((1 << 20,), rank + 1.0, device=device)
distributed.all_reduce(numbers)
wrong = numbers[numbers != 3.0]
sys.exit(f"the sum of 1 and 2 is {wrong[0].item()} in {len(wrong)} places" if len(wrong) else 0)
"""


def exchange(backend: str, timeout: float = SECONDS, child: str = _CHILD) -> str:
    """Let two processes add 4 MiB of numbers; return what went wrong in one line, empty if nothing did.

    Args:
        backend: of torch.distributed: ``nccl`` with GPUs 0 and 1, ``gloo`` without.
        timeout: seconds for both; they are killed then, with everything they started.
        child: the program of a rank; its arguments are the backend, the rank, a file for the meeting and our id.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(2)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                arguments = [_GUARD + child, backend, str(rank), f"{folder}/meeting", str(os.getpid())]
                ranks.append(_start(arguments, log))
            late = _wait(ranks, time.monotonic() + timeout)
            codes = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS_TO_END)
        for rank, code in enumerate(codes):
            if code:
                return f"rank {rank} ended with {code}: {_last_line(logs[rank])}"
        return f"no answer for {timeout:g} s" if late else ""


def _start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    # A rank finds what this process finds, and nothing in the current folder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with log.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=log.parent,
            env=environment,
            start_new_session=True,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all ranks have ended, or one has failed; return whether time ran out first."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            return False
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.05)
    return False


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "no message"
