"""SGLang's own linear methods with ``--fp4-gemm-backend sm120``: the kernels' sources run, emulated on the CPU.

Only the place that the compiled library comes from is replaced. The capability table is asked about an RTX card.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from cpu_host.kernels import build
from cpu_host.kernels.library import EmulatedLibrary
from sglang_sm120 import layout, native, ops, self_test
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, FormatError, SelfTestError, UnsupportedError
from sglang_sm120.host import patches_linear
from sglang_sm120.host.conventions import CONVENTIONS
from sglang_sm120.host.state import STATE
from tests.dispatch.machines import RTX, machine
from tests.host.conftest import Serving
from tests.host.linear_layers import layer_method, make_case, make_empty_layer
from tests.host.sm120_layers import check, make_sm120_case, quantize
from tests.support.nvfp4 import fresh_generator, random_activation, random_nvfp4_weight

KINDS = ["modelopt", "compressed-tensors"]
WEIGHT_ONLY = ["modelopt, weight-only", "compressed-tensors, weight-only"]


def card() -> HostFacts:
    return machine(RTX)


@pytest.fixture(scope="module")
def library() -> EmulatedLibrary:
    return EmulatedLibrary(build.library_path())


@pytest.fixture(autouse=True)
def sm120(library: EmulatedLibrary, serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", lambda device: (library, True))
    serving.decide("sm120", facts=card())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [0, 1, 9, 65])
def test_every_number_of_tokens_is_served(kind: str, m: int) -> None:
    generator = fresh_generator()
    case = make_sm120_case(kind, 256, [128], generator)
    check(case, random_activation(m, 256, torch.bfloat16, generator))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(8, 16), (24, 48), (200, 464), (136, 1856), (464, 176), (8, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_odd_shards_need_no_padding_of_their_tensors(kind: str, n: int, k: int, dtype: torch.dtype) -> None:
    generator = fresh_generator()
    case = make_sm120_case(kind, k, [n], generator, dtype=dtype)
    check(case, random_activation(5, k, dtype, generator), torch.randn(n, generator=generator).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [[128, 64, 64], [96, 32, 40]])
def test_fused_projections_keep_each_shards_own_scale(kind: str, widths: list[int]) -> None:
    generator = fresh_generator()
    case = make_sm120_case(kind, 192, widths, generator, same_scales=False)
    x = random_activation(9, 192, torch.bfloat16, generator)
    check(case, x, torch.randn(sum(widths), generator=generator).to(torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_shards_with_different_input_scales_quantize_by_themselves(kind: str) -> None:
    generator = fresh_generator()
    case = make_sm120_case(kind, 144, [128, 64, 72], generator, same_scales=False, input_decode=[0.002, 0.004, 0.001])
    check(case, random_activation(11, 144, torch.bfloat16, generator))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("widths", "k"), [([128, 128], 128), ([96, 40], 144)])
def test_weights_reload_into_the_same_memory(kind: str, widths: list[int], k: int) -> None:
    """144 / 2 bytes are no multiple of 16: there the parameter is a view of a padded buffer, and stays one."""
    generator = fresh_generator()
    case = make_sm120_case(kind, k, widths, generator, same_scales=False)
    addresses = {name: p.data_ptr() for name, p in case.layer.named_parameters()}
    x = random_activation(6, k, torch.bfloat16, generator)
    for _ in range(2):
        case.load([random_nvfp4_weight(n, k, generator) for n in widths])
        case.prepare()
        check(case, x)
    assert {name: p.data_ptr() for name, p in case.layer.named_parameters()} == addresses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [128, 144])
def test_weights_are_held_once_with_rows_at_multiples_of_16_bytes(kind: str, k: int) -> None:
    case = make_case(kind, k, [64], fresh_generator())
    weight = case.layer.weight if kind == "modelopt" else case.layer.weight_packed
    assert weight.shape == (64, k // 2)
    assert weight.stride(0) == {128: 64, 144: 80}[k]
    assert weight.untyped_storage().nbytes() == 64 * weight.stride(0)
    others = [p for p in case.layer.parameters() if p.dtype == torch.uint8 and p is not weight]
    assert others == []


def test_a_call_pads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_sm120_case("modelopt", 144, [64], fresh_generator())
    monkeypatch.setattr(layout, "align_rows", lambda packed: pytest.fail("weights are padded in a forward"))
    case.run(torch.ones(1, 144, dtype=torch.bfloat16))


@pytest.mark.parametrize("m", [0, 1, 70])
def test_activations_quantized_by_sglang_are_taken_as_they_are(m: int) -> None:
    generator = fresh_generator()
    case = make_sm120_case("modelopt", 128, [128, 64], generator, same_scales=False)
    x = random_activation(m, 128, torch.bfloat16, generator)
    packed, scales = ops.nvfp4_quantize(x, case.layer.input_scale_inv.data, True, "sm120")
    assert torch.equal(case.run((packed, scales)), case.run(x))


def test_a_view_whose_rows_start_anywhere_is_served() -> None:
    generator = fresh_generator()
    case = make_sm120_case("modelopt", 128, [64], generator)
    wide = random_activation(5, 143, torch.bfloat16, generator)
    check(case, wide[:, 3:131])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mutation", ["swizzle", "alpha", "nibbles"])
def test_a_planted_mistake_is_seen(kind: str, mutation: str) -> None:
    generator = fresh_generator()
    case = make_sm120_case(kind, 256, [128], generator)
    x = random_activation(8, 256, torch.bfloat16, generator)
    check(case, x)
    weight = case.layer.weight if kind == "modelopt" else case.layer.weight_packed
    if mutation == "swizzle":
        case.layer.weight_scale.data.copy_(layout.unswizzle_128x4(case.layer.weight_scale.data, 128, 16))
    elif mutation == "alpha":
        case.layer.sm120_alpha.data.mul_(1.01)
    else:
        weight.data.copy_((weight.data >> 4) | (weight.data << 4))
    with pytest.raises(AssertionError, match="out of bound"):
        check(case, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [20, 6])
def test_a_layer_that_does_not_fit_stops_the_load_by_name(kind: str, n: int) -> None:
    with pytest.raises(UnsupportedError, match=f"N={n}.*torch_reference"):
        make_case(kind, 64, [n], fresh_generator())


@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_run_one_by_one_must_fit_one_by_one(kind: str) -> None:
    """The sum of the widths is a multiple of 8 and the widths are not: right fused, not apart."""
    check(
        make_sm120_case(kind, 64, [12, 20], fresh_generator()),
        random_activation(2, 64, torch.bfloat16, fresh_generator()),
    )
    with pytest.raises(UnsupportedError, match="N=12"):
        make_case(kind, 64, [12, 20], fresh_generator(), input_decode=[0.002, 0.004])


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_weight_only_layers_stay_sglangs_own(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    method = layer_method(kind)
    layer = make_empty_layer(method, 128, [64])
    convention = next(c for c in CONVENTIONS if c.cls == type(method).__name__)
    getattr(layer, convention.weight_global).data.fill_(0.01)
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        assert patches_linear._backend_for(layer, convention) is None
    assert "W4A16" in caplog.text


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_weight_only_shards_of_different_scales_name_who_multiplies_them(kind: str) -> None:
    with pytest.raises(ConfigError, match="W4A16.*torch_reference"):
        make_case(kind, 128, [64, 64], fresh_generator(), same_scales=False)


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_forced_weight_only_shards_of_different_scales_stay_sglangs_own(kind: str, serving: Serving) -> None:
    """These kernels cannot multiply them at any price, so the layer would end the server at its first forward."""
    serving.decide("sm120", facts=card())
    assert STATE.decision is not None
    STATE.decision = replace(STATE.decision, allow_unsafe=True)
    method = layer_method(kind)
    layer = make_empty_layer(method, 128, [64, 64])
    convention = next(c for c in CONVENTIONS if c.cls == type(method).__name__)
    getattr(layer, convention.weight_global).data.copy_(torch.tensor([0.01, 0.02]))
    assert patches_linear._backend_for(layer, convention) is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_are_loaded_while_weights_are_prepared(
    kind: str, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under auto a layer may get them although the process did not choose them, and so has not loaded them."""
    loaded = []
    monkeypatch.setattr(native, "start", loaded.append)
    facts = replace(card(), probed={"sm120": "ok"})
    serving.decide("flashinfer_cutlass", explicit=False, facts=facts)
    case = make_case(kind, 64, [32, 64], fresh_generator(), same_scales=False)
    assert case.layer.sm120_prepared.backend == "sm120"
    assert loaded == [torch.device("cpu")]


TWO_LAUNCHES = ["nvfp4_quantize", "nvfp4_gemm"]


@pytest.mark.parametrize(
    ("m", "k", "taken"), [(16, 128, ["nvfp4_linear"]), (17, 128, TWO_LAUNCHES), (1, 4224, TWO_LAUNCHES)]
)
def test_few_tokens_and_little_weight_take_one_launch_and_have_the_same_bits(
    m: int, k: int, taken: list[str], library: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated card has 8 SMs, so at most 128 units: 4 row tiles of 33 are too many."""
    generator = fresh_generator()
    x = random_activation(m, k, torch.bfloat16, generator)
    weight = torch.randint(0, 256, (128, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0x30, 0x40, layout.padded_scale_shape(128, k // 16), dtype=torch.uint8, generator=generator)
    encode, alpha = torch.tensor(37.3), torch.tensor(0.01)
    codes, block_scales = native.quantize(x, encode, True)
    expected = native.gemm(codes, weight, block_scales, scales, alpha, None, x.dtype)
    launches: list[str] = []
    for name in ("nvfp4_linear", "nvfp4_quantize", "nvfp4_gemm"):
        original = getattr(library, name)
        monkeypatch.setattr(library, name, lambda *a, n=name, f=original: (launches.append(n), f(*a)))
    assert torch.equal(native.linear(x, weight, scales, encode, alpha, None), expected)
    assert launches == taken


def test_operands_that_break_the_rules_are_refused_by_name() -> None:
    x = torch.ones(2, 48, dtype=torch.bfloat16)
    codes, scales = quantize("cpu", x, torch.tensor(1.0), layout.ScaleLayout.LINEAR)
    swizzled = layout.swizzle_128x4(scales)
    with pytest.raises(FormatError, match="multiples of 16 bytes"):
        native.gemm(codes, torch.zeros(8, 24, dtype=torch.uint8), swizzled, swizzled, torch.ones(1), None, x.dtype)
    with pytest.raises(ConfigError, match="activation_scale=None"):
        native.linear(x, codes, swizzled, None, torch.ones(1), None)
    with pytest.raises(FormatError, match="K"):
        native.quantize(x[:, :40].contiguous(), torch.tensor(1.0), True)


@pytest.mark.parametrize("columns", [24, 256, 1024])
def test_the_self_test_passes_and_notices(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is wrong with one of the tiles for many tokens alone: 256 and 1,024 columns fill the emulated card."""
    self_test.run("sm120", "cpu")
    right = native.gemm

    def wrong(*args: object, **kwargs: object) -> torch.Tensor:
        out = right(*args, **kwargs)  # type: ignore[arg-type]
        if out.shape[1] == columns:
            out[-1, -1] += 1
        return out

    monkeypatch.setattr(native, "gemm", wrong)
    with pytest.raises(SelfTestError, match="sm120 gave"):
        self_test.run("sm120", "cpu")


@pytest.mark.parametrize("m", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_operators_match_their_fake_implementations(m: int, dtype: torch.dtype) -> None:
    """torch.compile plans with the fake ones; that a layer is one graph is tested on a GPU."""
    case = make_case("modelopt", 144, [64], fresh_generator(), dtype=dtype)
    layer, x = case.layer, torch.ones(m, 144, dtype=dtype)
    scale, alpha = layer.sm120_activation_scale[0].detach(), layer.sm120_alpha.detach()
    weight, weight_scale = layer.weight.detach(), layer.sm120_weight_scale_0.detach().view(torch.uint8)
    packed, block_scales = ops.nvfp4_quantize(x, scale, True, "sm120")
    calls = {
        ops.nvfp4_linear: (x, weight, weight_scale, scale, alpha, None, "sm120"),
        ops.nvfp4_gemm: (packed, weight, block_scales, weight_scale, alpha, None, dtype, "sm120"),
        ops.nvfp4_quantize: (x, scale, True, "sm120"),
    }
    for operator, arguments in calls.items():
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
