"""Other programs are run for so long and no longer, whatever they leave behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_sm120 import programs

#: Starts a program that inherits the pipes and lives on in a session of its own, where no kill of a group finds it.
LEAVES_ONE_BEHIND = """
import subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open(sys.argv[1], "w").write(str(left.pid))
time.sleep(60)
"""


def test_a_program_that_hangs_ends_in_time_though_its_child_holds_the_pipes(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    began = time.monotonic()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            programs.run([sys.executable, "-c", LEAVES_ONE_BEHIND, str(noted)], 3)
        assert time.monotonic() - began < 30
    finally:
        subprocess.run(["kill", "-9", noted.read_text()], check=True)


def test_what_it_started_is_killed_with_it(tmp_path: Path) -> None:
    late = tmp_path / "late"
    child = f"import time; time.sleep(4); open({str(late)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run([sys.executable, "-c", program], 2)
    time.sleep(4)
    assert not late.exists()


def test_status_and_both_streams_come_back() -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    apart = programs.run([sys.executable, "-c", script], 60)
    assert (apart.returncode, apart.stdout, apart.stderr) == (3, "out\n", "err\n")
    together = programs.run([sys.executable, "-u", "-c", script], 60, one_stream=True)
    assert (together.stdout, together.stderr) == ("out\nerr\n", None)


def test_folder_and_environment_are_the_callers(tmp_path: Path) -> None:
    script = "import os; print(os.getcwd(), os.environ['GIVEN'])"
    done = programs.run([sys.executable, "-c", script], 60, folder=tmp_path, environ={"GIVEN": "yes"})
    assert done.stdout.split() == [str(tmp_path), "yes"]
