"""Real servers on a GPU, in the environment that runs the tests: it has SGLang's CUDA build and this package.

Checkpoints of random weights are made on the GPU. All servers that the selected tests need are started at once and
share the card: a start is a minute of waiting, and one by one they would take longer than everything else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serve import checkpoints, contenders
from cpu_host.server import Server
from sglang_sm120 import env
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.moe_table import MOE_RUNNERS

#: What is served: the value, and which model. The table says which of our values there are.
SERVED = [(value, "dense") for value in ("sm120", "sm120_tuned") if value in BACKENDS]
if "sm120" in MOE_RUNNERS:
    SERVED.append(("sm120", "moe"))
#: Enough for every kind of layer; the benchmark, not this, needs a model of real depth.
LAYERS = {"dense": 6, "moe": 4}
#: The fixtures that are servers, with their environment variables.
ROLES: dict[str, dict[str, str]] = {"server": {}, "second_server": {}, "checked_server": {env.VERIFY: "1"}}
START_TIMEOUT = 400.0


@pytest.fixture(scope="session", params=SERVED, ids="-".join)
def served(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The value and the kind of model."""
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[contenders.Fleet]:
    """Every server that a selected test asks for; each must end without a trace."""
    wanted = {
        (role, *item.callspec.params["served"])
        for item in request.session.items
        if "served" in getattr(getattr(item, "callspec", None), "params", {})
        for role in ROLES
        if role in getattr(item, "fixturenames", ())
    }
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in {kind for _, _, kind in wanted}}
    for kind, folder in folders.items():
        checkpoints.make(folder, checkpoints.GEOMETRIES[kind].with_layers(LAYERS[kind]))
    launches = {}
    for role, value, kind in sorted(wanted):
        name = f"{role} {value} {kind}"
        workdir = tmp_path_factory.mktemp(name.replace(" ", "-"))
        settings = contenders.Settings(max_tokens=32768, memory=0.3)
        launches[name] = contenders.launch(value, folders[kind], workdir, settings, moe=kind == "moe")
        launches[name].environ.update(ROLES[role])
    with contenders.Fleet(launches, START_TIMEOUT) as running:
        yield running
        leftover = {name: server.stop() for name, server in running.servers.items()}
    assert not any(leftover.values()), leftover
    crashes = {name: server.crash_lines() for name, server in running.servers.items()}
    assert not any(crashes.values()), crashes


def _find(fleet: contenders.Fleet, role: str, served: tuple[str, str]) -> Server:
    name = " ".join((role, *served))
    if name in fleet.problems:
        pytest.fail(f"{name} did not start:\n{contenders.last_lines(fleet.problems[name], 40)}", pytrace=False)
    return fleet.servers[name]


@pytest.fixture
def server(fleet: contenders.Fleet, served: tuple[str, str]) -> Server:
    """The server of a value."""
    return _find(fleet, "server", served)


@pytest.fixture
def second_server(fleet: contenders.Fleet, served: tuple[str, str]) -> Server:
    """Another one that was started in the same way."""
    return _find(fleet, "second_server", served)


@pytest.fixture
def checked_server(fleet: contenders.Fleet, served: tuple[str, str]) -> Server:
    """One that compares every dense FP4 layer with the oracle."""
    return _find(fleet, "checked_server", served)


def table_digest() -> str:
    """The hash of the tuning table that servers are told to read, empty if none is named."""
    path = os.environ.get(env.TUNING_TABLE)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
