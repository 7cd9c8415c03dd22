"""Real servers on a GPU, in the environment that runs the tests: it has SGLang's CUDA build and this package.

Checkpoints of random weights are made on the GPU; every test of a file shares them, and a server where it can.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.serve import checkpoints, contenders
from cpu_host.server import Launch
from sglang_sm120 import env
from sglang_sm120.backends import BACKENDS, MOE_RUNNERS

#: What is served: the value, and whether the model has experts. The table says which of our values there are.
SERVED = [(value, False) for value in ("sm120", "sm120_tuned") if value in BACKENDS]
if "sm120" in MOE_RUNNERS:
    SERVED.append(("sm120", True))
#: Enough for every kind of layer; the benchmark, not this, needs a model of real depth.
LAYERS = {"dense": 6, "moe": 4}
START_TIMEOUT = 300.0

MakeLaunch = Callable[..., Launch]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """The checkpoint with or without experts, made when it is first asked for."""
    root = tmp_path_factory.mktemp("checkpoints")

    def find(moe: bool) -> Path:
        kind = "moe" if moe else "dense"
        if not (root / kind / "model.safetensors.index.json").is_file():
            checkpoints.make(root / kind, checkpoints.GEOMETRIES[kind].with_layers(LAYERS[kind]))
        return root / kind

    return find


@pytest.fixture(scope="session")
def make_launch(checkpoint: Callable[[bool], Path], tmp_path_factory: pytest.TempPathFactory) -> MakeLaunch:
    """How a value is served here, with further environment variables."""

    def make(value: str, moe: bool, **environ: str) -> Launch:
        chosen = contenders.launch(
            value, checkpoint(moe), tmp_path_factory.mktemp("server"), contenders.Settings(), moe=moe
        )
        chosen.environ.update(environ)
        return chosen

    return make


def table_digest() -> str:
    """The hash of the tuning table that servers are told to read, empty if none is named."""
    path = os.environ.get(env.TUNING_TABLE)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
