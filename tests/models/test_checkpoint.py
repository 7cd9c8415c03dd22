"""Faults planted into real checkpoints: each is found, named with its tensor, and none other is reported."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cpu_host.checkpoints import Format, Spec, make
from sglang_sm120.errors import ConfigError
from sglang_sm120.models.checkpoint import check_checkpoint, tensor_names
from sglang_sm120.models.findings import MAX_PER_CODE

LAYER = "model.layers.1"
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors, str], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One sound checkpoint of each format."""
    root = tmp_path_factory.mktemp("sound")
    formats: tuple[Format, ...] = ("modelopt", "compressed-tensors", "modelopt-w4a16", "compressed-tensors-w4a16")
    return {kind: make(root / kind, Spec(format=kind)) for kind in formats}


def planted(sound: Path, folder: Path, edit: Edit, name: str) -> Path:
    shutil.copytree(sound, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors, name)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def codes(report: dict[str, Any], severity: str = "error") -> set[tuple[str, str]]:
    return {(f["code"], f["tensor"]) for f in report["findings"] if f["severity"] == severity}


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors", "modelopt-w4a16", "compressed-tensors-w4a16"])
def test_a_sound_checkpoint_has_no_finding(kind: str, sound: dict[str, Path]) -> None:
    report = check_checkpoint(sound[kind], tp=1)
    assert report["ok"]
    assert codes(report) | codes(report, "warning") == set()
    assert report["modules"]["nvfp4"] == 14  # two layers, seven projections each
    assert ("not-quantized", "lm_head") in codes(report, "info")


def scalar(value: float) -> Edit:
    def edit(tensors: Tensors, name: str) -> None:
        tensors[name] = torch.full_like(tensors[name], value)

    return edit


def byte(value: int) -> Edit:
    def edit(tensors: Tensors, name: str) -> None:
        tensors[name].view(torch.uint8)[3, 5] = value

    return edit


def gone(tensors: Tensors, name: str) -> None:
    del tensors[name]


def all_zero(tensors: Tensors, name: str) -> None:
    tensors[name].view(torch.uint8).zero_()


def short_scales(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:, :-1].contiguous()


def bf16_scales(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].to(torch.bfloat16)


def not_packed(tensors: Tensors, name: str) -> None:
    n, half = tensors[name].shape
    tensors[name] = torch.ones(n, 2 * half, dtype=torch.bfloat16)
    for scale in ("weight_scale", "weight_scale_2", "input_scale"):
        del tensors[f"{name.removesuffix('.weight')}.{scale}"]


def packed_head(tensors: Tensors, name: str) -> None:
    n, k = tensors[name].shape
    tensors[name] = torch.zeros(n, k // 2, dtype=torch.uint8)
    tensors["lm_head.weight_scale"] = torch.ones(n, k // 16).to(torch.float8_e4m3fn)
    tensors["lm_head.weight_scale_2"] = torch.tensor(0.01)


#: The kind of checkpoint, the code of the finding, the tensor below the layer, what is planted into it.
FAULTS: list[tuple[Format, str, str, Edit]] = [
    ("modelopt", "scale-not-finite", "mlp.up_proj.weight_scale_2", scalar(math.inf)),
    ("modelopt", "scale-not-finite", "mlp.down_proj.input_scale", scalar(math.nan)),
    ("modelopt", "scale-zero", "self_attn.o_proj.input_scale", scalar(0.0)),
    ("modelopt", "scale-negative", "self_attn.o_proj.weight_scale_2", scalar(-0.1)),
    ("modelopt", "scale-absurd", "mlp.down_proj.weight_scale_2", scalar(1e20)),
    ("modelopt", "block-scale-nan", "mlp.up_proj.weight_scale", byte(0x7F)),
    ("modelopt", "block-scale-negative", "mlp.up_proj.weight_scale", byte(0x85)),
    ("modelopt", "global-scale-missing", "mlp.down_proj.weight_scale_2", gone),
    ("modelopt", "input-scale-missing", "mlp.down_proj.input_scale", gone),
    ("modelopt", "block-scales-missing", "mlp.down_proj.weight_scale", gone),
    ("modelopt", "block-scale-shape", "mlp.up_proj.weight_scale", short_scales),
    ("modelopt", "block-scale-dtype", "mlp.up_proj.weight_scale", bf16_scales),
    ("modelopt", "configuration-disagrees", "mlp.up_proj.weight", not_packed),
    ("compressed-tensors", "scale-not-finite", "mlp.down_proj.weight_global_scale", scalar(math.inf)),
    ("compressed-tensors", "scale-zero", "mlp.down_proj.input_global_scale", scalar(0.0)),
    ("compressed-tensors", "block-scale-nan", "self_attn.q_proj.weight_scale", byte(0xFF)),
    ("compressed-tensors", "input-scale-missing", "mlp.down_proj.input_global_scale", gone),
    ("compressed-tensors", "global-scale-missing", "mlp.down_proj.weight_global_scale", gone),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}: {fault[1]} in {fault[2]}")
def test_a_planted_fault_is_the_only_error(
    fault: tuple[Format, str, str, Edit], sound: dict[str, Path], tmp_path: Path
) -> None:
    kind, code, tensor, edit = fault
    report = check_checkpoint(planted(sound[kind], tmp_path / "x", edit, f"{LAYER}.{tensor}"))
    assert not report["ok"]
    assert codes(report) == {(code, f"{LAYER}.{tensor}")}
    (finding,) = (f for f in report["findings"] if f["severity"] == "error")
    assert finding["what"]
    assert finding["fix"]


@pytest.mark.parametrize(
    ("kind", "shard", "scale", "named"),
    [
        ("modelopt", "self_attn.k_proj", "weight_scale_2", "self_attn.{q_proj/k_proj/v_proj}"),
        ("modelopt", "mlp.gate_proj", "weight_scale_2", "mlp.{gate_proj/up_proj}"),
        ("compressed-tensors", "mlp.up_proj", "weight_global_scale", "mlp.{gate_proj/up_proj}"),
    ],
)
def test_fused_projections_with_different_scales(
    kind: str, shard: str, scale: str, named: str, sound: dict[str, Path], tmp_path: Path
) -> None:
    report = check_checkpoint(planted(sound[kind], tmp_path / "x", scalar(9.0), f"{LAYER}.{shard}.{scale}"))
    assert codes(report) == {("fused-scales-differ", f"{LAYER}.{named}.{scale}")}
    (finding,) = (f for f in report["findings"] if f["code"] == "fused-scales-differ")
    assert "9" in finding["value"].split(", ")
    assert "torch_reference" in finding["fix"]


@pytest.mark.parametrize(
    ("kind", "scale"), [("modelopt", "weight_scale_2"), ("compressed-tensors", "weight_global_scale")]
)
@pytest.mark.parametrize("gate_and_up", [("gate_proj", "up_proj"), ("w1", "w3")])
def test_gate_and_up_of_an_expert_with_different_scales(
    kind: Format, scale: str, gate_and_up: tuple[str, str], tmp_path: Path
) -> None:
    sound = make(tmp_path / "sound", Spec(format=kind, experts=2))
    expert, (gate, up) = f"{LAYER}.mlp.experts.1", gate_and_up

    def edit(tensors: Tensors, name: str) -> None:
        tensors[f"{expert}.up_proj.{scale}"] *= 1.25
        for old in [old for old in tensors if ".experts." in old]:
            new = old.replace(".gate_proj.", f".{gate}.").replace(".up_proj.", f".{up}.")
            tensors[new] = tensors.pop(old)

    report = check_checkpoint(planted(sound, tmp_path / "x", edit, ""))
    assert codes(report) == {("fused-scales-differ", f"{expert}.{{{gate}/{up}}}.{scale}")}
    (finding,) = (f for f in report["findings"] if f["code"] == "fused-scales-differ")
    assert "by a factor of 1.25" in finding["what"]
    assert "SGLang takes the first one's for both" in finding["fix"]


def test_a_packed_tensor_that_the_configuration_excludes(sound: dict[str, Path], tmp_path: Path) -> None:
    report = check_checkpoint(planted(sound["modelopt"], tmp_path / "x", packed_head, "lm_head.weight"))
    assert codes(report) == {("configuration-disagrees", "lm_head.weight")}


def test_a_layer_of_zeros_is_a_warning(sound: dict[str, Path], tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.up_proj.weight_scale"
    report = check_checkpoint(planted(sound["modelopt"], tmp_path / "x", all_zero, name))
    assert report["ok"]
    assert codes(report, "warning") == {("block-scales-zero", name)}


def test_different_input_scales_of_a_fused_projection_are_a_warning(sound: dict[str, Path], tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.gate_proj.input_scale"
    report = check_checkpoint(planted(sound["modelopt"], tmp_path / "x", scalar(0.5), name))
    assert report["ok"]
    assert codes(report, "warning") == {("fused-inputs-differ", f"{LAYER}.mlp.{{gate_proj/up_proj}}.input_scale")}


class TestSharding:
    def test_sizes_that_do_not_divide(self, sound: dict[str, Path]) -> None:
        found = codes(check_checkpoint(sound["modelopt"], tp=3))
        layers = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        assert found == {("shards-badly", f"model.layers.*.{name}") for name in layers}

    def test_a_rank_without_whole_blocks_is_an_error(self, sound: dict[str, Path]) -> None:
        report = check_checkpoint(sound["modelopt"], tp=16)
        errors = {(f["tensor"], f["value"]) for f in report["findings"] if f["severity"] == "error"}
        assert errors == {("model.layers.*.self_attn.o_proj", "K=8")}
        warnings = {f["value"] for f in report["findings"] if f["severity"] == "warning"}
        assert warnings == {"N=8", "N=16", "K=16"}


class TestSeveralFiles:
    def split(self, folder: Path, sound: Path) -> dict[str, str]:
        """Two shards and an index, as exporters of large models write them."""
        shutil.copytree(sound, folder)
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for file, members in halves.items():
            save_file({name: tensors[name] for name in members}, folder / file)
        weight_map = {name: file for file, members in halves.items() for name in members}
        self.write(folder, weight_map)
        return weight_map

    def write(self, folder: Path, weight_map: dict[str, Any]) -> None:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def test_modules_that_lie_in_two_files(self, sound: dict[str, Path], tmp_path: Path) -> None:
        self.split(tmp_path / "x", sound["modelopt"])
        for path in (tmp_path / "x", tmp_path / "x" / "model.safetensors.index.json"):
            report = check_checkpoint(path)
            assert report["ok"]
            assert (report["files"], report["warnings"]) == (2, 0)

    def test_names_are_read_with_and_without_an_index(self, sound: dict[str, Path], tmp_path: Path) -> None:
        weight_map = self.split(tmp_path / "x", sound["modelopt"])
        assert tensor_names(tmp_path / "x") == tensor_names(sound["modelopt"]) == set(weight_map)
        assert tensor_names(tmp_path) is None

    def test_what_the_index_promises_and_nobody_has(self, sound: dict[str, Path], tmp_path: Path) -> None:
        weight_map = self.split(tmp_path / "x", sound["modelopt"])
        weight_map["model.extra"] = "model-1.safetensors"
        first = next(name for name, file in weight_map.items() if file == "model-1.safetensors")
        weight_map[first] = "model-2.safetensors"
        del weight_map["model.norm.weight"]
        self.write(tmp_path / "x", weight_map)
        report = check_checkpoint(tmp_path / "x")
        assert codes(report) == {("tensor-missing", "model.extra")}
        assert codes(report, "warning") == {("index-wrong", first), ("not-in-index", "model.norm.weight")}

    def test_a_file_that_is_missing_or_cut_off(self, sound: dict[str, Path], tmp_path: Path) -> None:
        weight_map = self.split(tmp_path / "x", sound["modelopt"])
        path = tmp_path / "x" / "model-2.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
        report = check_checkpoint(tmp_path / "x")
        assert ("file-broken", "model-2.safetensors") in codes(report)
        path.unlink()
        report = check_checkpoint(tmp_path / "x")
        assert ("file-broken", "model-2.safetensors") in codes(report)
        assert sum(code == "tensor-missing" for code, _ in codes(report)) == sum(
            f == path.name for f in weight_map.values()
        )

    @pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", 3])
    def test_an_index_that_points_elsewhere(self, name: Any, sound: dict[str, Path], tmp_path: Path) -> None:
        self.split(tmp_path / "x", sound["modelopt"])
        self.write(tmp_path / "x", {"a": name})
        with pytest.raises(ConfigError, match="weight_map"):
            check_checkpoint(tmp_path / "x")

    def test_a_tensor_that_is_stored_twice(self, sound: dict[str, Path], tmp_path: Path) -> None:
        folder = tmp_path / "x"
        shutil.copytree(sound["modelopt"], folder)
        save_file({"lm_head.weight": torch.zeros(2, 2)}, folder / "old.safetensors")
        assert ("stored-twice", "lm_head.weight") in codes(check_checkpoint(folder))


class TestLarge:
    def test_many_faults_of_one_kind_are_counted_and_not_kept(self, tmp_path: Path) -> None:
        number = MAX_PER_CODE + 50
        tensors = {f"model.layers.{i}.mlp.x.input_scale": torch.tensor(math.inf) for i in range(number)}
        save_file(tensors, tmp_path / "x.safetensors")
        report = check_checkpoint(tmp_path / "x.safetensors")
        assert report["errors"] == number
        assert {"code": "scale-not-finite", "severity": "error", "count": number} in report["counts"]
        assert len(report["findings"]) == MAX_PER_CODE

    def test_memory_does_not_grow_with_the_data(self, tmp_path: Path) -> None:
        scales = torch.ones(4096, 8192, dtype=torch.float8_e4m3fn)  # 32 MiB
        scales.view(torch.uint8)[-1, -1] = 0x7F
        save_file({"a.weight_scale": scales}, tmp_path / "x.safetensors")
        tracemalloc.start()
        try:
            report = check_checkpoint(tmp_path / "x.safetensors")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert codes(report) == {("block-scale-nan", "a.weight_scale")}
        assert report["scale_bytes"] == 32 << 20
        assert peak < 6 << 20

    def test_progress_ends_at_the_number_of_bytes(self, sound: dict[str, Path]) -> None:
        seen: list[tuple[int, int]] = []
        report = check_checkpoint(sound["modelopt"], progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (report["scale_bytes"], report["scale_bytes"])
        assert seen == sorted(seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_in_every_float_type(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([0.5, math.inf, 2.0, 0.0], dtype=dtype)
    save_file({"a.weight_scale_2": values}, tmp_path / "x.safetensors")
    report = check_checkpoint(tmp_path / "x.safetensors")
    assert codes(report) == {("scale-not-finite", "a.weight_scale_2"), ("scale-zero", "a.weight_scale_2")}


@pytest.mark.parametrize("make_path", [lambda p: p, lambda p: p / "none", lambda p: p / "config.json"])
def test_a_path_without_a_checkpoint(make_path: Callable[[Path], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="PATH="):
        check_checkpoint(make_path(tmp_path))
