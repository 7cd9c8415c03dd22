"""What a card's arithmetic is, checked by programs of their own: the FP4 multiply and the conversion to e2m1."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from emulated import ROOT  # noqa: E402
from library import run_check  # noqa: E402

pytestmark = pytest.mark.gpu

#: The model of the instruction, written from the PTX tables alone.
MODEL = ("emulation/mma_model.cc", "emulation/formats.cc")
NATIVE = "csrc/ptx/mma_nvfp4.cuh"
DECODED = "csrc/ptx/mma_nvfp4_decoded.cuh"

# name: (text that occurs exactly once in the file, replacement); of the way that a card takes
MUTATIONS = {
    NATIVE: {
        "selector of A": ('"n"(kSelectA), "n"', '"n"(0), "n"'),
        "selector of B": ('"n"(kSelectB))', '"n"(0))'),
        "scales of A and B": ('"r"(scale_a), "r"(scale_b)', '"r"(scale_b), "r"(scale_a)'),
    },
    DECODED: {
        "lane of a row's scale": ("quad + 2 * kSelectA + 1), t", "quad + 2 * kSelectA), t"),
        "lane of a column's scale": ("quad + kSelectB), 0u", "quad + (kSelectB ^ 1)), 0u"),
        "scale of a k block": ("t < 2 ? 0x6420 : 0x7531", "t < 2 ? 0x7531 : 0x6420"),
        "half of a step": ("b.reg[half], half ?", "b.reg[half], !half ?"),
        "nibble of a code": ("join_signs(codes, codes >> 3)", "join_signs(codes, codes >> 7)"),
        "row of a scale": ("decode_scales(rows >> 16)", "decode_scales(rows)"),
        "sum so far": ("__fmaf_rn(sum[i], 16384.f, d.reg[i])", "sum[i] * 16384.f"),
    },
}


def test_the_multiply_is_the_instruction_of_the_tables(tmp_path: Path) -> None:
    status, output = run_check("mma_check.cu", tmp_path, sources=MODEL)
    assert status == 0, output


def test_a_wrong_multiply_is_noticed(tmp_path: Path) -> None:
    file = NATIVE if torch.cuda.get_device_capability()[0] == 12 else DECODED
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    text = (ROOT / file).read_text()
    for name, (old, new) in MUTATIONS[file].items():
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        (tmp_path / file).write_text(text.replace(old, new))
        status, _ = run_check("mma_check.cu", tmp_path, root=tmp_path, sources=MODEL)
        assert status == 1, name


def test_the_conversion_to_e2m1_is_right_for_every_float32(tmp_path: Path) -> None:
    status, output = run_check("e2m1_check.cu", tmp_path)
    assert status == 0, output
