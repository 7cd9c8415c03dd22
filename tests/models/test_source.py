"""Where a configuration is found, and that nobody goes to the network for it."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120.errors import ConfigError
from sglang_sm120.models import source as room
from sglang_sm120.models.architecture import read_model
from sglang_sm120.models.source import load_source, presets

CONFIG = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def write(folder: Path, config: Any, name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return folder


def test_a_folder_and_its_config_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", CONFIG)
    for path in (folder, folder / "config.json"):
        found = load_source(str(path))
        assert (found.origin, found.folder, found.config["hidden_size"]) == ("folder", folder, 64)
        assert found.quantization is None


def test_the_text_model_of_a_multimodal_one(tmp_path: Path) -> None:
    inner = {**CONFIG, "model_type": "qwen3_5_text"}
    folder = write(tmp_path / "m", {"model_type": "qwen3_5", "text_config": inner, "tie_word_embeddings": False})
    found = load_source(str(folder))
    assert found.config["model_type"] == "qwen3_5_text"
    assert found.config["tie_word_embeddings"] is False


def test_where_the_quantization_is_written(tmp_path: Path) -> None:
    """As SGLang reads it: config.json comes first."""
    folder = write(tmp_path / "m", CONFIG)
    write(folder, {"quantization": {"quant_algo": "NVFP4"}}, "hf_quant_config.json")
    assert load_source(str(folder)).quantization == {"quantization": {"quant_algo": "NVFP4"}}
    write(folder, {**CONFIG, "quantization_config": {"quant_method": "fp8"}})
    assert load_source(str(folder)).quantization == {"quant_method": "fp8"}


def test_a_hub_id_that_was_downloaded(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--nvidia--Qwen3-32B-NVFP4"
    write(repository / "snapshots" / "abc", CONFIG)
    write(repository / "refs", "abc\n", "main")
    found = load_source("nvidia/Qwen3-32B-NVFP4")
    assert (found.origin, found.config["hidden_size"]) == ("hub cache", 64)


def test_a_hub_id_that_was_not_downloaded_is_a_preset_where_there_is_one() -> None:
    found = load_source("nvidia/Qwen3-32B-NVFP4")
    assert (found.origin, found.label) == ("preset", "qwen3-32b")
    assert found.sources


def test_an_unknown_model_is_one_error_with_the_presets_in_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load_source("nobody/nothing")
    for name in presets():
        assert name in str(caught.value)
    assert "hf download nobody/nothing" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"), [("{", "is no JSON"), ("[1]", "a JSON object is needed"), ("[" * 100_000, "is no JSON")]
)
def test_a_broken_configuration(text: str, why: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", text)
    with pytest.raises(ConfigError, match=why):
        load_source(str(folder))


@pytest.mark.parametrize("model", ["~no-such-user/m", "a" * 5000, "", "\udcff"])
def test_a_name_that_no_file_can_have_is_an_unknown_model(model: str) -> None:
    with pytest.raises(ConfigError, match="MODEL="):
        load_source(model)


def test_another_file_than_config_json_does_not_stand_for_its_neighbour(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", CONFIG)
    write(folder, CONFIG, "other.json")
    with pytest.raises(ConfigError, match=r"other\.json.*name the folder"):
        load_source(str(folder / "other.json"))


def test_a_configuration_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="no regular file"):
        load_source(str(tmp_path))


def test_a_damaged_hub_cache_is_none(tmp_path: Path) -> None:
    refs = tmp_path / "hub" / "models--nobody--nothing" / "refs"
    refs.mkdir(parents=True)
    for revision in (b"\xff\xfe", b"a" * 5000):
        (refs / "main").write_bytes(revision)
        with pytest.raises(ConfigError, match="not in the local Hugging Face cache"):
            load_source("nobody/nothing")


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_source(str(tmp_path))


def test_a_file_that_is_too_large_for_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_CONFIG_BYTES", 10)
    folder = write(tmp_path / "m", CONFIG)
    with pytest.raises(ConfigError, match="at most 10 bytes"):
        load_source(str(folder))


class TestFields:
    @pytest.mark.parametrize("value", [-1, "64", True, 1.5, 1 << 50])
    def test_a_size_that_is_none(self, value: object, tmp_path: Path) -> None:
        folder = write(tmp_path / "m", {**CONFIG, "hidden_size": value})
        with pytest.raises(ConfigError, match="hidden_size of .*positive integer"):
            read_model(load_source(str(folder)))

    @pytest.mark.parametrize("name", ["num_hidden_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers"])
    def test_more_layers_than_can_be_listed(self, name: str, tmp_path: Path) -> None:
        config = {**presets()["qwen3.8-27b"]["config"]}
        if name.startswith("num_nextn"):
            config.pop("mtp_num_hidden_layers", None)
        folder = write(tmp_path / "m", {**config, name: 1 << 39})
        with pytest.raises(ConfigError, match=f"{name} of .*at most 4096"):
            read_model(load_source(str(folder)))

    def test_no_interval_of_full_attention_is_the_usual_one(self, tmp_path: Path) -> None:
        config = {**presets()["qwen3.8-27b"]["config"]}
        config.pop("layer_types", None)
        models = []
        for interval in (0, 4):
            folder = write(tmp_path / str(interval), {**config, "full_attention_interval": interval})
            models.append(read_model(load_source(str(folder))).layers)
        assert models[0] == models[1]

    def test_a_size_that_is_missing(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "m", CONFIG)
        with pytest.raises(ConfigError, match="has no vocab_size"):
            read_model(load_source(str(folder)))

    def test_a_model_type_that_is_not_known(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "m", {**CONFIG, "model_type": "mamba9"})
        with pytest.raises(ConfigError, match=r"model_type='mamba9'.*qwen3_5_moe"):
            read_model(load_source(str(folder)))
