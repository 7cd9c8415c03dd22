"""The start-up checks run while SGLang loads a model, in the surroundings that it sets up for that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_sm120 import self_test


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64])
def default_type(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The model's type is torch's default type while its weights load."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_type")
def test_the_checks_do_not_depend_on_the_default_type() -> None:
    self_test.run("torch_reference", "cpu")
    self_test.run_moe("torch_reference", "cpu")
