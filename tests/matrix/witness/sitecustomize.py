"""Makes every process of a server a witness: it writes what it found there, then stops at the last moment before
weights would load. Python imports this from PYTHONPATH at the start of each process, spawned ones included.

SM120_MATRIX_EVIDENCE   folder for the evidence, one JSON file per value
SM120_MATRIX_WITHOUT    "boot" or "entry point": switch one of our two ways in off, so that the other is tested

The detokenizer does nothing before weights load but import SGLang, which is a third of the processor time of a start:
its process is started and stays idle.
"""

import os
import signal
import sys

_IDLE = "SM120_MATRIX_IDLE"


def _forget_boot_hook() -> None:
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "sglang_sm120._boot"]


def _hide_entry_points() -> None:
    from importlib import metadata

    original = metadata.entry_points

    def entry_points(**selection: object) -> object:
        if selection.get("group") == "sglang.srt.plugins":
            selection = {**selection, "name": "nothing has this name"}
        return original(**selection)

    metadata.entry_points = entry_points


class _Watch:
    """Waits for our resolution module and puts the witness behind its last step."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "sglang_sm120.host.state":  # resolution imports it, so that it is about to be complete
            sys.meta_path.remove(self)
            sys.path.insert(0, os.path.join(os.path.dirname(__file__)))
            import witness

            witness.arm()


def _idle_detokenizer() -> None:
    """Let the process whose target is SGLang's detokenizer start with :data:`_IDLE`."""
    from multiprocessing.process import BaseProcess

    original = BaseProcess.start

    def start(self: BaseProcess) -> None:
        if getattr(self._target, "__name__", "") != "run_detokenizer_process":
            original(self)
            return
        # Nobody reads what is sent to the process, so that it must fit into a pipe.
        self._target, self._args, self._kwargs = signal.pause, (), {}
        os.environ[_IDLE] = "1"
        try:
            original(self)
        finally:
            del os.environ[_IDLE]

    BaseProcess.start = start


if os.environ.get("SM120_MATRIX_EVIDENCE"):
    while _IDLE in os.environ and "--multiprocessing-fork" in sys.orig_argv:
        signal.pause()
    _idle_detokenizer()
    without = os.environ.get("SM120_MATRIX_WITHOUT")
    if without == "boot":
        _forget_boot_hook()
    elif without == "entry point":
        _hide_entry_points()
    sys.meta_path.insert(0, _Watch())
