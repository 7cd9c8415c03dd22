#!/usr/bin/env python3
"""Serve a tiny NVFP4 model with a real SGLang server and this package, and check what it answers.

    python3 tools/demo.py          (the same as: make demo)

Needs Python >= 3.11 and a package index, no GPU. The first part makes the environment and runs this file again
with its interpreter; the rest is ``demo_steps.py``. Exit code 0 means that every check passed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cpu_host.runtime import has_nvidia_driver  # noqa: E402
from tools import envs  # noqa: E402
from tools.demo_screen import Screen  # noqa: E402

_BEGAN = "SM120_DEMO_BEGAN"


def main() -> int:
    if _BEGAN in os.environ:
        from tools import demo_steps

        return demo_steps.run(Screen(float(os.environ[_BEGAN])))
    began = time.time()
    screen = Screen(began)
    screen.title("sglang-sm120 demo: an NVFP4 model served by SGLang")
    gpu = has_nvidia_driver()
    what = "all its dependencies (several gigabytes)" if gpu else "what a server on the CPU needs"
    screen.step("Environment", f"SGLang {envs.NEWEST} and {what}, below {envs.cache_dir()}")
    try:
        python = envs.ensure("gpu" if gpu else "dev")
    except envs.EnvError as error:
        screen.failed(str(error))
        return 1
    screen.done()
    command = [str(python), "-W", "ignore", __file__]
    return subprocess.run(command, env=os.environ | {_BEGAN: str(began)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
