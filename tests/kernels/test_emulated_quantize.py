"""The quantizer's source, run on the CPU: the exact rule gives the reference's bytes, the other stays near them.

Every byte of both outputs is written, padding included.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import emulated
import pytest
import torch

from sglang_sm120 import reference
from sglang_sm120.formats import decode_ue4m3, encode_ue4m3, nearest_e2m1_code, pack_e2m1
from sglang_sm120.layout import ScaleLayout

EXACT, RECIPROCAL = 0, 1


class EmulationError(RuntimeError):
    """The emulated machine or a sanitizer stopped the kernel."""


@pytest.fixture(scope="module")
def program(emulated_quantizer: Path) -> Path:
    """The quantizer compiled for the CPU."""
    return emulated_quantizer


def run(
    program: Path, folder: Path, x: torch.Tensor, scale: float, layout: ScaleLayout, rule: int, rows: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed codes and the scale buffer; ``rows`` per thread, 0 as the launcher chooses.

    Raises:
        EmulationError: the emulated machine refused what the kernel does.
    """
    m, k = x.shape
    linear = layout is ScaleLayout.LINEAR
    numbers = (m, k, x.stride(0), int(x.dtype == torch.float16), int(linear), rule, rows, 7)
    data = x.as_strided(((m - 1) * x.stride(0) + k,), (1,)).view(torch.uint8).numpy().tobytes()
    source, sink = folder / "x.bin", folder / "out.bin"
    source.write_bytes(struct.pack("<8q", *numbers) + struct.pack("<f", scale) + struct.pack("<q", len(data)) + data)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0"}
    done = subprocess.run([str(program), str(source), str(sink)], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise EmulationError(done.stderr[-3000:])
    out = torch.frombuffer(bytearray(sink.read_bytes()), dtype=torch.uint8)
    return out[: m * k // 2].view(m, k // 2), out[m * k // 2 :]


def nasty(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows with blocks of zeros, ties, subnormals, NaN, infinity and -0 in them."""
    gen = torch.Generator().manual_seed(m * 1009 + k)
    x = torch.randn(m, k, generator=gen) * torch.exp2(torch.randint(-12, 6, (m, 1), generator=gen).float())
    flat = x.view(-1, 16)
    specials = [
        torch.zeros(16),
        torch.full((16,), -0.0),
        torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2),
        torch.tensor([-6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0] * 2),
        torch.full((16,), float("nan")),
        torch.tensor([float("nan"), 1.0] * 8),
        torch.tensor([float("inf"), -1.0] * 8),
        torch.full((16,), 1e-7),
        torch.arange(16) * 1000.0,
        torch.tensor([1.0, -0.0] * 8),
    ]
    for i, special in enumerate(specials):
        if 3 * i < flat.shape[0]:
            flat[3 * i] = special
    return x.to(dtype)


def padded_rows(x: torch.Tensor, padding: int) -> torch.Tensor:
    """The same numbers in rows that are ``padding`` elements longer, those NaN."""
    m, k = x.shape
    wide = torch.full((m, k + padding), float("nan"), dtype=x.dtype)
    wide[:, :k] = x
    return wide[:, :k]


@pytest.mark.parametrize(("m", "k"), [(1, 16), (3, 80), (5, 1040), (33, 144), (129, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_the_exact_rule_is_the_reference(
    program: Path, tmp_path: Path, m: int, k: int, dtype: torch.dtype, layout: ScaleLayout
) -> None:
    x = nasty(m, k, dtype)
    for scale, rows in ((1.0, 1), (0.37, 4), (448.0, 0)):
        codes, scales = run(program, tmp_path, padded_rows(x, 24), scale, layout, EXACT, rows)
        expected_codes, expected_scales = reference.quantize(x, torch.tensor(scale), layout)
        assert torch.equal(scales, expected_scales.view(torch.uint8).flatten())
        assert torch.equal(codes, expected_codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_reciprocal_rule_has_the_same_special_cases(program: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    blocks = torch.tensor(
        [
            [0.0, -0.0] * 8,
            [nan] * 16,
            [nan, 2.0, -2.0, 0.0] * 4,
            [inf, -inf, 1.0, -1.0] * 4,
            [nan, -inf] * 8,
            [6.0, -0.0, 0.25, -0.75, 1.25, -1.75, 2.5, -5.0] * 2,
        ]
    ).to(dtype)
    for layout, rows in ((ScaleLayout.SWIZZLE_128X4, 1), (ScaleLayout.LINEAR, 4)):
        codes, scales = run(program, tmp_path, blocks, 1.0, layout, RECIPROCAL, rows)
        expected_codes, expected_scales = reference.quantize(blocks, torch.tensor(1.0), layout)
        assert torch.equal(scales, expected_scales.view(torch.uint8).flatten())
        assert torch.equal(codes, expected_codes)


def reciprocal_model(x: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The reciprocal rule's steps in their order, each rounded to float32; packed codes and linear scales."""
    blocks = x.float().view(x.shape[0], -1, 16)
    scale = torch.tensor(global_scale)
    amax = blocks.abs().amax(-1)
    scales = encode_ue4m3((scale * (amax * (1 / torch.tensor(6.0)))).double())
    factor = 1 / (decode_ue4m3(scales).float() * (1 / scale))
    codes = nearest_e2m1_code((blocks * factor.unsqueeze(-1)).double(), torch.ones((), dtype=torch.float64))
    return pack_e2m1(codes.masked_fill((scales == 0).unsqueeze(-1), 0).view(x.shape)), scales


#: An encode scale, and the first numbers of a block with which any other order of the steps, or a division in place
#: of a reciprocal, gives another scale (first row) or another code (second row).
ORDER_OF_STEPS = ((1.596058964729309, (6.34375, 1.0)), (1.6064256429672241, (4.6875, 3.890625)))


@pytest.mark.parametrize(("scale", "numbers"), ORDER_OF_STEPS)
def test_the_reciprocal_rule_takes_its_steps_in_order(
    program: Path, tmp_path: Path, scale: float, numbers: tuple[float, ...]
) -> None:
    x = torch.randn(5, 80, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[2, 16:32] = 0
    x[2, 16 : 16 + len(numbers)] = torch.tensor(numbers)
    expected_codes, expected_scales = reciprocal_model(x, scale)
    codes, scales = run(program, tmp_path, x, scale, ScaleLayout.LINEAR, RECIPROCAL)
    assert torch.equal(scales, expected_scales.view(torch.uint8).flatten())
    assert torch.equal(codes, expected_codes)


def test_rounding_by_addition_is_the_conversion_for_every_float32(build_folder: Path) -> None:
    if emulated.compiler() is None:
        pytest.skip("no C++ compiler")
    done = subprocess.run([str(emulated.build("tests/kernels/e2m1_check.cc", build_folder))], capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rows", [1, 4])
def test_the_reciprocal_rule_differs_by_one_step_at_most(program: Path, tmp_path: Path, rows: int) -> None:
    x = torch.randn(65, 464, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    codes, scales = run(program, tmp_path, x, 33.0, ScaleLayout.LINEAR, RECIPROCAL, rows)
    expected_codes, expected_scales = reference.quantize(x, torch.tensor(33.0), ScaleLayout.LINEAR)
    steps = (scales.int() - expected_scales.view(torch.uint8).flatten().int()).abs()
    assert int(steps.max()) <= 1
    assert float((steps > 0).float().mean()) < 0.001
    same = (steps == 0).view(65, 29).repeat_interleave(8, 1)
    for shift in (0, 4):
        ours, theirs = (codes >> shift & 15).int(), (expected_codes >> shift & 15).int()
        apart = ((ours & 7) - (theirs & 7)).abs()[same]
        assert int(apart.max()) <= 1
        assert float((apart > 0).float().mean()) < 0.001
        assert torch.equal(ours & 8, theirs & 8)
