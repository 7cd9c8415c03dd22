"""The child process of a probe or a replay: runs one job and reports each step before it begins.

Started by :mod:`sglang_sm120.probing.children`; the job comes on standard input, the reports go to a pipe of their
own, because libraries write to standard output as they like. torch is imported inside the job: a torch that does not
load is a verdict as well.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from sglang_sm120.errors import FormatError, UnsupportedError

#: <linux/prctl.h>
_PR_SET_PDEATHSIG = 1


class WrongResult(Exception):
    """A number differs from the oracle by more than any right implementation can."""


def main() -> None:
    """Entry point: the report pipe's number and the parent's id as arguments, the job as JSON on standard input."""
    _end_with(int(sys.argv[2]))
    faulthandler.enable()
    # A probe expects crashes; a core file of a process with a CUDA context has gigabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = int(sys.argv[1])
    os.set_inheritable(pipe, False)
    with os.fdopen(pipe, "w", encoding="utf-8") as reports:

        def report(**message: str) -> None:
            reports.write(json.dumps(message) + "\n")
            reports.flush()

        status, reason = run_job(json.load(sys.stdin), report)
        report(status=status, reason=reason)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies: one that hangs would keep the card from then on."""
    # This process leads a session of its own, so that no signal of the terminal reaches it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def run_job(job: dict[str, Any], report: Callable[..., None]) -> tuple[str, str]:
    """Run a job and return the verdict with its reason; what ends the process is for the parent to judge.

    Args:
        job: as :meth:`sglang_sm120.probing.children.Job.to_json` makes it.
        report: called with ``step=`` before each step.
    """
    step, count, products, note = "import", 0, 0, ""
    try:
        report(step=step)
        place, function = job["factory"].split(":")
        operations = getattr(importlib.import_module(place), function)(job["subject"])
        torch = importlib.import_module("torch")
        place, function = job["steps"].split(":")
        steps = getattr(importlib.import_module(place), function)
        for step, action in steps(operations, job["plan"], torch.device(job["device"])):
            report(step=step)
            note = action() or note
            count += 1
            products += step.startswith(("GEMM", "experts"))
    except WrongResult as error:
        return "wrong", f"{step}: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is its verdict
        if _refuses(error) and not products:
            return "unsupported", f"{step}: {type(error).__name__}: {error}"
        # A server would meet a refusal of some shapes only in the middle of its work.
        # torch's class for memory is no MemoryError.
        memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        return "crash", f"{step}: {'out of memory' if memory else type(error).__name__}: {error}"
    return "ok", note or f"{count} steps"


def _refuses(error: Exception) -> bool:
    """Whether a backend says that it does not run here. FlashInfer does so by ValueError and a class of its own."""
    if isinstance(error, FormatError):
        return False
    named = type(error).__name__ == "BackendSupportedError"
    return named or isinstance(error, (ImportError, UnsupportedError, ValueError, NotImplementedError))
