"""What ends or stops a process before any number is computed. No torch, so that these children start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def make(subject: str) -> None:
    """The factory that a test names in its job: ``subject`` is what happens."""
    if subject == "exit":
        os._exit(3)
    if subject == "short sleep":
        time.sleep(60)  # whoever waits for its end must not wait for ever
    elif subject == "sleep":
        Path(os.environ["SM120_TEST_FOLDER"], "pid").write_text(str(os.getpid()))
    elif subject == "grandchild":
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["SM120_TEST_FOLDER"], "pid").write_text(str(process.pid))
    else:
        os.kill(os.getpid(), signal.Signals[subject])
    time.sleep(600)
