"""Makes every process of a server a witness: it writes what it found there, then stops at the last moment before
weights would load. Python imports this from PYTHONPATH at the start of each process, spawned ones included.

SM120_MATRIX_EVIDENCE   folder for the evidence, one JSON file per value
SM120_MATRIX_WITHOUT    "boot" or "entry point": switch one of our two ways in off, so that the other is tested
"""

import os
import sys


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


if os.environ.get("SM120_MATRIX_EVIDENCE"):
    without = os.environ.get("SM120_MATRIX_WITHOUT")
    if without == "boot":
        _forget_boot_hook()
    elif without == "entry point":
        _hide_entry_points()
    sys.meta_path.insert(0, _Watch())
