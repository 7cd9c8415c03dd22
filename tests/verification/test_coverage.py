"""How much of a server was checked: told truly, in memory that does not grow with the prompts."""

from __future__ import annotations

from sglang_sm120.verification.coverage import Coverage
from sglang_sm120.verification.judge import ROWS


def test_prompts_of_every_length_need_no_more_memory_than_some() -> None:
    coverage = Coverage()
    for m in range(1, 20_000):
        coverage.see("layer", m, in_step=True)
    assert coverage.seen <= ROWS + 8
    assert f"0 of {coverage.seen} pairs" in coverage.text
    assert f"M of steps beyond {ROWS} in 8 ranges" in coverage.text


def test_a_range_that_was_checked_once_says_nothing_about_a_graph_of_an_m_in_it() -> None:
    coverage = Coverage()
    coverage.check("layer", 300, in_step=True)
    coverage.see("layer", 310, in_step=True)
    assert (coverage.checked, coverage.seen) == (1, 1)
    assert not coverage.was_checked("layer", 300)
    coverage.see("layer", 512)  # captured, and not checked
    assert (coverage.checked, coverage.seen) == (1, 2)


def test_small_m_of_steps_and_of_captures_are_the_same_pairs() -> None:
    coverage = Coverage()
    coverage.check("layer", ROWS)
    coverage.see("layer", ROWS, in_step=True)
    assert coverage.text == "1 of 1 pairs of layer and M checked (1 layers, 1 calls)"
