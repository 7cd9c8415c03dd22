"""Let the installed SGLang's own parser judge the arguments of a launch command, in a process of its own.

``python -m sglang_sm120.host.parse_command ARGUMENTS...`` ends with 0 if the parser takes them, and with argparse's 2
and its message if not. Importing SGLang takes seconds and may touch a GPU, so a command line never does it itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from sglang_sm120 import programs

_SECONDS = 300
_MODULE = "sglang_sm120.host.parse_command"


def parse(arguments: Sequence[str]) -> None:
    """Parse with SGLang's parser; ends the process with 2 if it objects."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    parser.parse_args(arguments)


def objection(arguments: Sequence[str], python: str = sys.executable) -> str | None:
    """Return why the SGLang of ``python`` does not take the arguments, ``None`` if it does."""
    command = [python, "-m", _MODULE, *arguments]
    try:
        done = programs.run(command, _SECONDS)
    except subprocess.TimeoutExpired:
        return f"its parser did not answer within {_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"its parser ended with exit code {done.returncode}"


if __name__ == "__main__":
    parse(sys.argv[1:])
