"""Run one job in a child process and turn whatever happens to it into a verdict. No torch in this process."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol

from sglang_sm120.probing.record import STATUSES, Outcome
from sglang_sm120.records import is_unprintable

logger = logging.getLogger(__name__)

PRODUCTION_FACTORY = "sglang_sm120.probing.operations:of_subject"
PROBE_STEPS = "sglang_sm120.probing.steps:planned"
_CHILD = "import sys; sys.path[:] = filter(None, sys.path); from sglang_sm120.probing.child import main; main()"
#: After its verdict a child may still tear down CUDA; longer than this is a hang.
_SECONDS_TO_END = 30.0
#: A killed process ends at once, unless it waits inside a driver that hangs: then no signal reaches it.
_SECONDS_TO_DIE = 10.0
_LONGEST_REASON = 300


class Problems(Protocol):
    """What the steps of a job read, as far as this process knows."""

    def to_json(self) -> dict[str, Any]:
        """The problems as they are sent to the child."""


@dataclass(frozen=True)
class Job:
    """What a child has to do.

    Attributes:
        subject: a value of the table, or ``quantizer``.
        plan: the problems.
        device: ``cuda`` or ``cpu``.
        factory: ``module:function`` that makes the operations of the subject; tests plant faults through it.
        steps: ``module:function(operations, plan as JSON, device)`` that yields the name of each step and what it runs.
    """

    subject: str
    plan: Problems
    device: str
    factory: str = PRODUCTION_FACTORY
    steps: str = PROBE_STEPS

    def to_json(self) -> dict[str, Any]:
        """The job as it is sent to the child."""
        return {**vars(self), "plan": self.plan.to_json()}


def run(job: Job, timeout: float) -> Outcome:
    """Run ``job`` in a process of its own and judge it.

    Args:
        job: what to do.
        timeout: seconds for all of it, imports and compilation included.
    """
    begin = time.monotonic()
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as errors, os.fdopen(reader, "rb") as reports:
        try:
            process = _start(job, writer, errors)
        finally:
            os.close(writer)
        try:
            messages, in_time = _listen(reports, begin + timeout)
            if in_time:
                # The pipe is closed when the child ends; what it started may live on and is killed below.
                left = min(_SECONDS_TO_END, max(begin + timeout - time.monotonic(), 1.0))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(left)
            code = process.poll()
        finally:
            # The child leads a group of its own, so that compilers it started end with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            left_behind = not _died(process)
        status, reason = _judge(messages, code, timeout, _last_line(errors))
    if left_behind:
        reason += f"; its process {process.pid} cannot be killed, the driver holds it"
    if status not in STATUSES:
        status, reason = "crash", f"reported an unknown verdict {status!r}"
    return Outcome(status, one_line(reason), round(time.monotonic() - begin, 2))


def _start(job: Job, writer: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    # The child finds what this process finds, and nothing in the current folder.
    same = ["-S"] if sys.flags.no_site else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, *same, "-c", _CHILD, str(writer), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=(writer,),
        start_new_session=True,
        env=environment,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:  # a child that died at once says so by its exit code
        pipe.write(json.dumps(job.to_json()).encode())
    return process


def _died(process: subprocess.Popen[bytes]) -> bool:
    """Wait for a process that was killed, but not for ever; one that stays is left to the system, with one line."""
    try:
        process.wait(_SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        logger.warning(
            "Process %d was killed and has not ended after %g s: it waits inside the driver and may hold its GPU until "
            "the machine restarts.",
            process.pid,
            _SECONDS_TO_DIE,
        )
        return False
    return True


def _listen(reports: IO[bytes], deadline: float) -> tuple[list[dict[str, Any]], bool]:
    """Collect the child's messages until it closes the pipe; the flag is false if time ran out first."""
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reports, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                break
            chunk = os.read(reports.fileno(), 65536)
            if not chunk:
                return _messages(text), True
            text += chunk
    return _messages(text), False


def _messages(text: bytes) -> list[dict[str, Any]]:
    # A child that was killed may leave half a line.
    complete = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in complete.splitlines()]


def _judge(messages: list[dict[str, Any]], code: int | None, timeout: float, last_line: str) -> tuple[Any, str]:
    step = next((message["step"] for message in reversed(messages) if "step" in message), "start")
    final = messages[-1] if messages and "status" in messages[-1] else None
    if code is None:
        place = "after its verdict" if final else f"in step {step}"
        return "timeout", f"no answer for {timeout:g} s, {place}"
    if code != 0:
        place = "after its verdict" if final else f"{step}"
        return "crash", f"{place}: {_death(code)}{f': {last_line}' if last_line and code > 0 else ''}"
    if final is None:
        return "crash", f"{step}: ended without a verdict{f': {last_line}' if last_line else ''}"
    return final["status"], final["reason"]


def _death(code: int) -> str:
    if code > 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system's out-of-memory killer does this)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def _last_line(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 8192))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def one_line(text: str) -> str:
    """A reason as it is shown and recorded: compilers write colours, which no record may hold."""
    line = " ".join("".join(c for c in text if c.isspace() or not is_unprintable(c)).split())
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"
