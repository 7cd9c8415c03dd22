"""Fixtures of the core tests: fresh data, and the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.support.nvfp4 import fresh_generator


@pytest.fixture
def generator() -> torch.Generator:
    return fresh_generator()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")
