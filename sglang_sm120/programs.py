"""Run another program for its output, for so long and no longer. Standard library only."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def run(
    command: Sequence[str],
    seconds: float,
    *,
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    one_stream: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its exit status and output.

    After its own kill ``subprocess.run`` waits until nobody holds the pipes, which a child of the program may do for
    ever. Here what the program started is killed with it, and nothing but the program is waited for.

    Args:
        command: program and arguments.
        seconds: after so long it is killed.
        folder: working directory.
        environ: its environment; this process's if ``None``.
        one_stream: errors come in ``stdout``, where the program wrote them, and ``stderr`` is ``None``.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it took longer.
    """
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if one_stream else subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, output, errors)
