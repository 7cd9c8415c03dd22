"""Real servers on a GPU, in the environment that runs the tests: it has SGLang's CUDA build and this package.

Checkpoints of random weights are made on the GPU. All servers that the selected tests need are started at once and
share the card: a start is a minute of waiting, and one by one they would take longer than everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from benchmarks.serve import checkpoints, contenders, tuning
from cpu_host.server import Launch, Server
from sglang_sm120 import env
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.moe_table import MOE_RUNNERS
from tests.e2e_gpu.answers import VOCAB, Numbers, numbers
from tests.e2e_gpu.load import Load, put

#: A value, and which kind of model it serves.
Served = tuple[str, str]
#: What is served. The table says which of our values there are.
SERVED: list[Served] = [
    (value, kind)
    for kind, table in (("dense", BACKENDS), ("moe", MOE_RUNNERS))
    for value in ("sm120", "sm120_tuned")
    if value in table
]
#: Enough for every kind of layer; the benchmark, not this, needs a model of real depth.
LAYERS = {"dense": 6, "moe": 4}
#: The fixtures that are servers, with their environment variables.
ROLES: dict[str, dict[str, str]] = {"server": {}, "checked_server": {env.VERIFY: "1"}}
#: The value whose tuning table is made here, and the only one that the table can choose.
TUNED, CHOSEN = "sm120_tuned", "sm120"
START_TIMEOUT = 400.0
#: What each server did under a number of requests in flight.
Loads = Callable[[int], dict[Served, Load]]


@dataclass(frozen=True)
class Table:
    """The tuning table that servers are given.

    Attributes:
        path: where it lies.
        model: the checkpoint whose shapes it holds.
        value: the only backend that was measured.
        written: its bytes before any server read it.
    """

    path: Path
    model: Path
    value: str
    written: bytes


@pytest.fixture(scope="session", params=SERVED, ids="-".join)
def served(request: pytest.FixtureRequest) -> Served:
    """The value and the kind of model."""
    chosen: Served = request.param
    return chosen


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by kind, each made when it is first asked for."""

    @cache
    def make(kind: str) -> Path:
        geometry = checkpoints.GEOMETRIES[kind].with_layers(LAYERS[kind])
        return checkpoints.make(tmp_path_factory.mktemp(kind), geometry)

    return make


@pytest.fixture(scope="session")
def tuning_tables(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Table]:
    """Tables by kind of model, each made when it is first asked for: before a server is there to disturb the times."""
    probe = cache(tuning.probe)

    @cache
    def make(kind: str) -> Table:
        path = tmp_path_factory.mktemp("tuning") / "table.json"
        probe(CHOSEN)
        tuning.tune(models(kind), path, CHOSEN)
        return Table(path, models(kind), CHOSEN, path.read_bytes())

    return make


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest,
    models: Callable[[str], Path],
    tuning_tables: Callable[[str], Table],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[contenders.Fleet]:
    """Every server that a selected test asks for; each must end without a trace."""
    launches, problems = {}, {}
    for role, value, kind in sorted(wanted(request.session.items)):
        settings = contenders.Settings(max_tokens=32768)
        name = " ".join((role, value, kind))
        workdir = tmp_path_factory.mktemp(name.replace(" ", "-"))
        launch = contenders.launch(value, models(kind), workdir, settings, moe=kind == "moe")
        launch.environ.update(ROLES[role])
        try:
            if value == TUNED:
                launch.environ[env.TUNING_TABLE] = str(tuning_tables(kind).path)
        except RuntimeError as error:
            problems[name] = str(error)
        else:
            launches[name] = launch
    with together(launches) as running:
        running.problems.update(problems)
        yield running


@contextmanager
def together(launches: Mapping[str, Launch]) -> Iterator[contenders.Fleet]:
    """Servers that are started at once; each must end without a trace."""
    with contenders.Fleet(dict(launches), START_TIMEOUT) as running:
        yield running
        leftover = {name: server.stop() for name, server in running.servers.items()}
    assert not any(leftover.values()), leftover
    crashes = {name: server.crash_lines() for name, server in running.servers.items()}
    assert not any(crashes.values()), crashes


def wanted(items: list[pytest.Item]) -> set[tuple[str, str, str]]:
    """Role, value and kind of model of every server that tests ask for."""
    found = set()
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        names = getattr(item, "fixturenames", ())
        if "served" in parameters:
            value, kind = parameters["served"]
            found |= {(role, value, kind) for role in ROLES if role in names}
            if "untuned_server" in names:
                found.add(("server", CHOSEN, kind))
    return found


def _plain(fleet: contenders.Fleet) -> dict[Served, str]:
    """The names of the servers that run without anything special."""
    named = {name: name.split() for name in fleet.servers}
    return {(value, kind): name for name, (role, value, kind) in named.items() if role == "server"}


def find(fleet: contenders.Fleet, name: str) -> Server:
    """A server by name; the test fails with the end of its log if it did not start."""
    if name in fleet.problems:
        pytest.fail(f"{name} did not start:\n{contenders.last_lines(fleet.problems[name], 40)}", pytrace=False)
    return fleet.servers[name]


@pytest.fixture
def server(fleet: contenders.Fleet, served: Served) -> Server:
    """The server of a value."""
    return find(fleet, " ".join(("server", *served)))


@pytest.fixture(scope="session")
def before_restart(fleet: contenders.Fleet) -> dict[Served, list[Numbers]]:
    """What every server answered before all of them were ended and started again."""
    running = _plain(fleet)
    answers = {served: numbers(fleet.servers[name]) for served, name in running.items()}
    fleet.restart(running.values())
    return answers


@pytest.fixture
def checked_server(fleet: contenders.Fleet, served: Served) -> Server:
    """One that compares every dense FP4 layer with the oracle."""
    return find(fleet, " ".join(("checked_server", *served)))


@pytest.fixture
def untuned_server(fleet: contenders.Fleet, served: Served) -> Server:
    """The same model served by the value that the tuning table chooses."""
    return find(fleet, f"server {CHOSEN} {served[1]}")


@pytest.fixture(scope="session")
def loads(fleet: contenders.Fleet, request: pytest.FixtureRequest) -> Loads:
    """Loads every server at the same time, once for each concurrency: the card is busy with all of them."""
    seconds = request.config.getoption("--e2e-seconds")

    @cache
    def under(concurrency: int) -> dict[Served, Load]:
        urls = {served: fleet.servers[name].url for served, name in _plain(fleet).items()}
        with ThreadPoolExecutor(len(urls)) as pool:
            running = {served: pool.submit(put, url, concurrency, seconds, VOCAB) for served, url in urls.items()}
        return {served: future.result() for served, future in running.items()}

    return under
