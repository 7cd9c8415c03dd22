"""From times to a choice, and what is measured at all."""

from __future__ import annotations

import pytest

from sglang_sm120.backends import BACKENDS
from sglang_sm120.errors import ConfigError
from sglang_sm120.models.source import presets
from sglang_sm120.probing.run import PROBEABLE
from sglang_sm120.tuning.cases import ROWS, Shape, read_rows, read_shapes, shapes_of_model
from sglang_sm120.tuning.choice import Timing, choose, summary
from sglang_sm120.tuning.limits import floor
from sglang_sm120.tuning.run import candidates, served_by
from tests.dispatch.machines import RTX, machine


def timing(median: float, spread: float) -> Timing:
    return Timing(median, median - spread / 2, median + spread / 2)


def test_a_clear_winner_wins_wherever_it_stands_in_the_table() -> None:
    times = {"flashinfer_cutlass": timing(20, 1), "sm120": timing(10, 1), "flashinfer_b12x": timing(15, 1)}
    assert choose(times) == "sm120"


def test_a_difference_within_the_spread_goes_to_the_more_trusted() -> None:
    times = {"sm120": timing(10, 2), "flashinfer_b12x": timing(11.9, 2), "flashinfer_cutlass": timing(14.1, 2)}
    assert choose(times) == "flashinfer_b12x"
    times["flashinfer_cutlass"] = timing(13.9, 2)
    assert choose(times) == "flashinfer_cutlass"


def test_the_order_in_which_times_come_does_not_matter() -> None:
    times = {value: timing(10 + i * 0.1, 5) for i, value in enumerate(reversed(BACKENDS))}
    assert choose(times) == choose(dict(reversed(times.items()))) == next(iter(BACKENDS))


def test_summary_is_median_and_quartiles() -> None:
    assert summary([5, 1, 3, 2, 4]) == Timing(3, 2, 4)
    assert summary([7.5]) == Timing(7.5, 7.5, 7.5)
    # One call that the system interrupted does not move the choice.
    assert summary([1, 1, 1, 1, 1, 1, 1, 900]).spread == 0


def test_shapes_of_every_preset_can_reach_a_kernel() -> None:
    """Some presets have no dense NVFP4 layer; at least one has some."""
    found = {preset: shapes_of_model(preset, 2) for preset in presets()}
    assert found["qwen3.5-397b-a17b"] == []
    assert any(found.values())
    for shapes in found.values():
        assert len({(s.n, s.k) for s in shapes}) == len(shapes)
        assert all(s.layers and s.n % 32 == 0 and s.k % 32 == 0 for s in shapes)


def test_shapes_and_rows_are_read() -> None:
    assert [(s.n, s.k) for s in read_shapes(["4096x7168", "1X16"])] == [(4096, 7168), (1, 16)]
    assert read_rows("") == ROWS
    assert read_rows("16,1,16") == (1, 16)
    assert {1, 24, 48, 96, 8192} <= set(ROWS)


@pytest.mark.parametrize("text", ["4096", "4096x", "0x16", "16x8", "16x24x3", "-1x16", "16x17", "axb", ""])
def test_a_bad_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--shape="):
        read_shapes([text])


@pytest.mark.parametrize("text", ["0", "1,,2", "a", "1;2", "-1", "1,0"])
def test_bad_rows_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rows="):
        read_rows(text)


def test_only_what_passed_its_probe_is_measured() -> None:
    facts = machine(RTX)
    facts.probed.update({"flashinfer_cutlass": "ok", "flashinfer_b12x": "wrong"})
    taken, left_out = candidates([], facts)
    assert taken == ["flashinfer_cutlass"]
    assert set(left_out) == set(PROBEABLE) - {"flashinfer_cutlass"}
    assert left_out["flashinfer_b12x"] == "probe says wrong"
    assert "not probed" in left_out["flashinfer_cutedsl"]
    assert "10.x" in left_out["flashinfer_trtllm"]
    with pytest.raises(ConfigError, match="sglang-sm120 probe first"):
        candidates(["flashinfer_b12x"], facts)
    with pytest.raises(ConfigError, match="--backend='marlin'"):
        served_by(["marlin"], [Shape(32, 32)], [])


def test_the_limit_is_the_longer_of_memory_and_arithmetic() -> None:
    limits = {"bytes_per_second": 1e12, "fp4_per_second": 1e15}
    weight = 4096 * 4096 * 0.5625
    assert floor(1, 4096, 4096, limits) == (pytest.approx((weight + 4 * 4096) / 1e6), "DRAM")
    assert floor(8192, 4096, 4096, limits) == (pytest.approx(2 * 8192 * 4096 * 4096 / 1e9), "FP4")
    assert floor(8192, 4096, 4096, {"bytes_per_second": 1e12}) is not None
    assert floor(1, 4096, 4096, {}) is None
