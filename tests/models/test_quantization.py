"""Formats of modules: the same answer as SGLang's own configuration classes give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120.errors import ConfigError
from sglang_sm120.models.quantization import read_quantization

LAYERS = "model.language_model.layers"

#: Lists as exporters write them: plain names, stars, names without the prefix of the language model.
EXCLUSIONS = [
    ["lm_head"],
    ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    ["*.self_attn*", "*.mlp.shared_expert*", "*.mlp.gate", "lm_head", "mtp*"],
    ["model.layers.0.self_attn*", "model.layers.61*"],
    ["model.layers.0*", "lm_head"],
]
MODULES = [
    "lm_head",
    *(
        f"model.layers.{i}.{module}"
        for i in (0, 1, 10, 61)
        for module in ("self_attn.o_proj", "mlp.down_proj", "mlp.gate", "mlp.shared_expert.down_proj")
    ),
    "mtp.layers.0.mlp.down_proj",
    "mtp.fc",
]


def modelopt(exclude: list[str], **more: Any) -> dict[str, Any]:
    return {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": exclude, **more}}


class TestAgainstSglang:
    @pytest.mark.parametrize("exclude", EXCLUSIONS)
    def test_modelopt_exclusions(self, exclude: list[str]) -> None:
        from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
        from sglang.srt.layers.quantization.utils import is_layer_skipped

        theirs = ModelOptFp4Config.from_config(modelopt(exclude))
        ours = read_quantization(modelopt(exclude))
        for name in MODULES:
            skipped = is_layer_skipped(name, theirs.exclude_modules, {}) or theirs.is_layer_excluded(name)
            assert (ours.format_of(name) == "bf16") == skipped, name

    def test_a_mixed_checkpoint(self) -> None:
        from sglang.srt.layers.quantization.modelopt_quant import ModelOptMixedPrecisionConfig

        layers = {
            f"{LAYERS}.3.self_attn.o_proj": {"quant_algo": "FP8"},
            f"{LAYERS}.3.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            f"{LAYERS}.3.mlp.shared_expert.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
        }
        section = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["lm_head"]}
        theirs = ModelOptMixedPrecisionConfig.from_config({"quantization": section})
        ours = read_quantization({"quantization": section})
        expected = {None: "bf16", "FP8": "fp8", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4_w4a16"}
        for module in ("self_attn.o_proj", "mlp.experts", "mlp.shared_expert.down_proj", "linear_attn.out_proj"):
            name = f"model.layers.3.{module}"
            assert ours.format_of(name) == expected[theirs.resolve_quant_algo(name)], name
        assert ours.format_of(f"{LAYERS}.3.mlp.experts.17.up_proj") == "nvfp4_w4a16"
        assert ours.method == "modelopt_mixed"

    @pytest.mark.parametrize("kind", ["modelopt", "modelopt-w4a16", "compressed-tensors", "compressed-tensors-w4a16"])
    def test_the_method_is_what_sglang_detects(self, kind: Any, tmp_path: Path) -> None:
        """On checkpoints as exporters write them, by SGLang's own ModelConfig."""
        from sglang.srt.configs.model_config import ModelConfig

        from cpu_host.checkpoints import Spec, make
        from sglang_sm120.models.source import load_source

        folder = make(tmp_path / kind, Spec(format=kind))
        ours = read_quantization(load_source(str(folder)).quantization)
        assert ours.method == ModelConfig(str(folder)).quantization
        fp4 = "nvfp4_w4a16" if kind.endswith("w4a16") else "nvfp4"
        assert ours.format_of("model.layers.1.mlp.gate_proj") == fp4
        assert ours.format_of("lm_head") == "bf16"

    def test_compressed_tensors_targets_and_exceptions(self) -> None:
        from sglang.srt.layers.quantization.compressed_tensors.utils import should_ignore_layer

        ignore = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$", "model.layers.0.mlp.down_proj"]
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 4}}
        section = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ignore}
        ours = read_quantization(section)
        for name in MODULES:
            assert (ours.format_of(name) == "bf16") == should_ignore_layer(name, ignore=ignore), name


class TestFormats:
    def test_a_checkpoint_without_quantization(self) -> None:
        found = read_quantization(None)
        assert (found.method, found.format_of("model.layers.0.mlp.up_proj")) == (None, "bf16")

    def test_targets_by_expression(self) -> None:
        weights = {"num_bits": 4, "type": "float", "group_size": 16}
        section = {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "experts": {"targets": ["re:.*experts.*"], "weights": weights, "input_activations": {"num_bits": 4}},
                "attention": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}},
            },
        }
        found = read_quantization(section)
        assert found.format_of("model.layers.1.mlp.experts.3.up_proj") == "nvfp4"
        assert found.format_of("model.layers.1.self_attn.q_proj") == "fp8"
        assert found.format_of("model.layers.1.mlp.gate") == "bf16"

    @pytest.mark.parametrize(
        "key", [{"kv_cache_quant_algo": "FP8"}, {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}]
    )
    def test_scales_for_an_fp8_cache(self, key: dict[str, Any]) -> None:
        assert read_quantization(modelopt([], **key)).kv_cache_fp8
        assert not read_quantization(modelopt([])).kv_cache_fp8

    @pytest.mark.parametrize(
        ("section", "named"),
        [
            ({"quant_method": "modelopt", "quant_algo": "NVFP2"}, "quant_algo='NVFP2'"),
            ({"quant_method": "magic"}, "quant_method='magic'"),
            ({"quantization": 4}, "quantization=4"),
            ([4], "quantization_config=[4]"),
            ({"quant_algo": "MIXED_PRECISION", "quantized_layers": 4}, "quantized_layers=4"),
            ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": 4}}, "quantized_layers.lm_head=4"),
            ({"quant_algo": "NVFP4", "exclude_modules": "lm_head"}, "exclude_modules='lm_head'"),
            ({"quant_algo": "NVFP4", "exclude_modules": [4]}, "exclude_modules=[4]"),
            ({"quant_method": "fp8", "ignored_layers": {"a": 1}}, "ignored_layers="),
            ({"config_groups": [4]}, "config_groups=[4]"),
            ({"config_groups": {"g": 4}}, "config_groups.g=4"),
            ({"config_groups": {"g": {"weights": 4}}}, "weights=4"),
            ({"config_groups": {"g": {"weights": {"num_bits": [4], "type": {}}}}}, "config_groups="),
            ({"config_groups": {"g": {"targets": "Linear", "weights": {"num_bits": 8, "type": "int"}}}}, "targets="),
            ({"config_groups": {}, "ignore": "lm_head"}, "ignore='lm_head'"),
            ({"config_groups": {}, "ignore": ["re:a{99999999999}"]}, "ignore="),
            ({"config_groups": {"g": {"weights": {"num_bits": 3, "type": "int"}}}}, "config_groups="),
            ({"config_groups": {"g": {"targets": ["re:("], "weights": {"num_bits": 8, "type": "int"}}}}, "ignore="),
        ],
    )
    def test_what_is_not_known_is_named(self, section: Any, named: str) -> None:
        with pytest.raises(ConfigError) as caught:
            read_quantization(section)
        assert named in str(caught.value)

    def test_other_methods_quantize_all_but_a_list(self) -> None:
        section = json.loads(
            '{"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["model.layers.0.mlp.gate"]}'
        )
        found = read_quantization(section)
        assert found.format_of("model.layers.0.mlp.gate") == "bf16"
        assert found.format_of("model.layers.0.mlp.gate_proj") == "int4"
