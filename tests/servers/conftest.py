"""Fixtures of the real servers. A server takes half a minute to start, so tests of one server share it."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
