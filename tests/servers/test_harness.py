"""The tools that judge servers are judged here, without one."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from pathlib import Path

import pytest
import torch

from cpu_host import checkpoints, nvfp4
from cpu_host.checkpoints import Spec
from cpu_host.runtime import standins
from cpu_host.server import Launch
from tools import envs

ROOT = Path(__file__).resolve().parents[2]


def test_every_pin_is_exact() -> None:
    for file in envs.REQUIREMENTS.glob("*.txt"):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), f"{file.name}: {line}"


def test_every_release_has_its_transformers() -> None:
    for transformers in envs.RELEASES.values():
        assert (envs.REQUIREMENTS / f"transformers-{transformers}.txt").is_file()


@pytest.mark.parametrize("module", ["nvfp4", "checkpoints", "hf_reference"])
def test_the_judge_shares_no_code_with_the_package(module: str) -> None:
    tree = ast.parse((ROOT / "cpu_host" / f"{module}.py").read_text(encoding="utf-8"))
    imported = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    imported += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not [name for name in imported if name.startswith("sglang")]


def test_rounding_goes_to_the_nearest_and_ties_to_even() -> None:
    # One block whose scale is exactly 1: the largest magnitude is 6 and the global scale 1.
    row = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, 0.26, 0.74, 4.99, 5.01, -6.0, 0.0, -2.4]
    codes, scale_codes = nvfp4.quantize(torch.tensor([row], dtype=torch.float64), 1.0)
    values = nvfp4.dequantize(codes, scale_codes, 1.0)[0].tolist()
    assert values == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, 0.5, 0.5, 4.0, 6.0, -6.0, 0.0, -2.0]
    assert torch.equal(nvfp4.unpack(nvfp4.pack(codes)), codes)


def test_scales_agree_with_torch_and_saturate() -> None:
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    blocks = (6 * exact).reshape(-1, 1).repeat(1, 16)
    assert nvfp4.quantize(blocks, 1.0)[1][:, 0].tolist() == list(range(127))
    assert nvfp4.quantize(torch.full((1, 16), 1e9), 1.0)[1].item() == 126
    codes, scale_codes = nvfp4.quantize(torch.zeros(1, 16), 1.0)
    assert scale_codes.item() == 0
    assert not codes.any()


def test_a_checkpoint_is_the_same_each_time(tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()

    first, again, other = (
        digest(checkpoints.make(tmp_path / name, Spec(seed=seed))) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again != other


def test_stand_ins_import_and_do_not_pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = standins._Finder(frozenset({"triton", "sgl_kernel"}))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] in ("triton", "sgl_kernel")]:
        monkeypatch.delitem(sys.modules, name)

    import triton.language as tl
    from sgl_kernel import some_kernel

    assert "cpu" not in tl.backends  # torch asks such a question; an endless stand-in would hang it
    assert isinstance(tl.dtype, type)  # torch.compile puts it into ``isinstance``
    with pytest.raises(NotImplementedError, match="some_kernel"):
        some_kernel(1)


def test_a_server_sees_nothing_of_the_caller_but_what_it_should(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    launch = Launch(Path(sys.executable), tmp_path, tmp_path)
    assert "PYTHONPATH" not in launch.environment()
    assert "127.0.0.1" in launch.command_line(20000)
