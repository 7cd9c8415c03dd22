"""Fixtures of this folder; its tests need torch and nothing of SGLang."""

from __future__ import annotations

import pytest
import torch

from tests.support.nvfp4 import fresh_generator


@pytest.fixture
def generator() -> torch.Generator:
    return fresh_generator()
