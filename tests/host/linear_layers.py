"""Build one layer with a real linear method of SGLang, load random NVFP4 weights, say what it must compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_sm120 import reference
from sglang_sm120.layout import ScaleLayout
from tests.support.nvfp4 import Nvfp4Weight, random_nvfp4_weight

MODELOPT_CONFIG = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}


@dataclass
class Case:
    """A loaded layer, its SGLang method and the numbers it was loaded with.

    ``shards`` are the fused projections as they were before fusing, each with its own global scale;
    ``input_decode`` is the decode scale of the activation, one per shard. ``quantize`` is what the activations are
    quantized with (x, encode scale, linear layout) in the expected result: another rule than the oracle's must be the
    one under test, or the steps by which the two may differ would count as errors of the product.
    """

    layer: torch.nn.Module
    method: Any
    kind: str
    shards: list[Nvfp4Weight]
    input_decode: list[torch.Tensor]
    quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]] = reference.quantize

    @property
    def widths(self) -> list[int]:
        return [s.packed.shape[0] for s in self.shards]

    def load(self, shards: list[Nvfp4Weight]) -> None:
        """Write ``shards`` through the parameters' own weight loaders, as a (re)load does."""
        decode = torch.stack([s.global_decode_scale for s in shards])
        inputs = torch.stack(self.input_decode)
        packed = torch.cat([s.packed for s in shards])
        scales = torch.cat([s.linear_scales for s in shards]).view(torch.float8_e4m3fn)
        modelopt = self.kind.startswith("modelopt")
        names = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
        self._write(names[0], packed)
        self._write("weight_scale", scales)
        self._write(names[1], decode if modelopt else 1 / decode)
        input_name = "input_scale" if modelopt else "input_global_scale"
        if hasattr(self.layer, input_name):
            self._write(input_name, inputs if modelopt else 1 / inputs)
        self.shards = shards

    def _write(self, name: str, value: torch.Tensor) -> None:
        parameter = getattr(self.layer, name)
        parameter.weight_loader(parameter, value)

    def prepare(self) -> None:
        self.method.process_weights_after_loading(self.layer)

    def run(self, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        apply = self.method.apply if self.kind.startswith("modelopt") else self.method.apply_weights
        out: torch.Tensor = apply(self.layer, x, bias)
        return out

    def expected(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """float64 [M, N]: every shard computed by itself, from its own weight and its own scales."""
        out = torch.cat([seen @ weight.T for seen, weight in self._factors(x)], dim=1)
        return out if bias is None else out + bias.cpu().to(torch.float64)

    def magnitude(self, x: torch.Tensor) -> torch.Tensor:
        """float64 [M, N]: the sum of the products' magnitudes, by which the error of a float32 sum is bounded."""
        return torch.cat([seen.abs() @ weight.abs().T for seen, weight in self._factors(x)], dim=1)

    def _factors(self, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x = x.cpu()
        for shard, decode in zip(self.shards, self.input_decode, strict=True):
            yield x.to(torch.float64) if self.weight_only else self._quantized(x, decode), shard.dequantized()

    @property
    def weight_only(self) -> bool:
        return self.kind.endswith("weight-only")

    def _quantized(self, x: torch.Tensor, decode: torch.Tensor) -> torch.Tensor:
        # The layer stores float32 scales and so quantizes with the rounded reciprocal, as SGLang does.
        encode = (1 / decode).to(torch.float32)
        packed, scales = self.quantize(x, encode, ScaleLayout.LINEAR)
        one = torch.ones((), dtype=torch.float32)
        codes = reference.dequantize(packed, scales, one, ScaleLayout.LINEAR, *x.shape)
        return codes * (decode if self.kind.startswith("modelopt") else 1 / encode.double())


def make_case(
    kind: str,
    k: int,
    widths: Sequence[int],
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.bfloat16,
    same_scales: bool = True,
    input_decode: Sequence[float] | None = None,
    device: str = "cpu",
) -> Case:
    """Create, load and prepare a layer of ``kind`` with output shards of ``widths`` columns.

    ``kind``: ``modelopt``, ``compressed-tensors``, or either with ``, weight-only``.
    """
    shards = [random_nvfp4_weight(n, k, generator) for n in widths]
    if same_scales:
        common = shards[0].global_decode_scale
        shards = [Nvfp4Weight(s.packed, s.linear_scales, s.scales, common) for s in shards]
    decode = list(input_decode or [0.004] * len(widths))
    method = layer_method(kind)
    with torch.device(device):
        layer = make_empty_layer(method, k, widths, dtype)
    case = Case(layer, method, kind, shards, [torch.tensor(d) for d in decode])
    case.load(shards)
    case.prepare()
    return case


def layer_method(kind: str) -> Any:
    """SGLang's linear method or scheme of ``kind``."""
    import sglang.srt.layers.quantization.modelopt_quant as modelopt
    from sglang.srt.layers.quantization.compressed_tensors import schemes

    if kind == "modelopt":
        return modelopt.ModelOptFp4LinearMethod(modelopt.ModelOptFp4Config.from_config(MODELOPT_CONFIG))
    if kind == "modelopt, weight-only":
        return modelopt.ModelOptNvFp4A16LinearMethod(modelopt.ModelOptFp4Config.from_config(MODELOPT_CONFIG))
    if kind == "compressed-tensors":
        return schemes.CompressedTensorsW4A4Fp4()
    return schemes.CompressedTensorsW4A16Fp4()


def make_empty_layer(
    method: Any, k: int, widths: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> torch.nn.Module:
    """A layer with the parameters that ``method`` creates, not loaded."""

    def loader(parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)

    layer = torch.nn.Module()
    with _default_dtype(dtype):
        method.create_weights(
            layer=layer,
            input_size_per_partition=k,
            output_partition_sizes=list(widths),
            input_size=k,
            output_size=sum(widths),
            params_dtype=dtype,
            weight_loader=loader,
        )
    return layer


class _default_dtype:
    """Model code runs under the model's dtype, which some releases read instead of a parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exc: object) -> None:
        torch.set_default_dtype(self.before)
