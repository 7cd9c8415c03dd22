"""A tuning table for one model, made with the commands that users have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: Values of M on both sides of where the kernels of ``sm120`` change.
ROWS = (1, 8, 16, 64, 256)


def probe(value: str) -> None:
    """Check a backend on this card; ``tune`` measures only what passed.

    Raises:
        RuntimeError: it did not pass; the message ends with what the command printed.
    """
    _command("probe", value)


def tune(model: Path, output: Path, value: str, rows: Sequence[int] = ROWS) -> None:
    """Measure one backend on the dense shapes of a model, so that the table in ``output`` can choose no other.

    Raises:
        RuntimeError: the command failed; the message ends with what it printed.
    """
    listed = ",".join(map(str, rows))
    _command("tune", str(model), "--backend", value, "--rows", listed, "--output", str(output))


def _command(*arguments: str) -> None:
    # A child: what it holds of the GPU is free again when servers start.
    command = [sys.executable, "-m", "sglang_sm120.cli.main", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"sglang-sm120 {arguments[0]} exited with {done.returncode}:\n{done.stdout[-2000:]}")
