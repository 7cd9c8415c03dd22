"""The old operators with ``sm120``: the kernels' sources run, emulated on the CPU."""

from __future__ import annotations

import pytest
import torch

from cpu_host.kernels import build
from cpu_host.kernels.library import EmulatedLibrary
from sglang_sm120 import native
from tests.sgl_kernel_ops.cases import make_sorted
from tests.sgl_kernel_ops.checks import check_experts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_are_multiplied_one_by_one(
    dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = EmulatedLibrary(build.library_path())
    monkeypatch.setattr(native, "_library", lambda device: (library, True))
    # Weights of 48 elements a row have to be copied to rows that start at multiples of 16 bytes.
    for k, counts in ((96, (0, 9, 0, 1)), (48, (2, 0))):
        check_experts(make_sorted(generator, k=k, counts=counts, dtype=dtype), "sm120")
