"""Which backend a process gets: precedence, ``auto``, guards, and what stays with SGLang."""

from __future__ import annotations

import pytest

from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import Capability, HostFacts
from sglang_sm120.dispatch import Request, resolve, sglang_default
from sglang_sm120.errors import ConfigError, UnsupportedError
from tests.dispatch.machines import AMPERE, B200, B300, CARDS, HOPPER, PINS, RTX, SPARK, machine, released

SM12X = pytest.mark.parametrize("card", [RTX, SPARK], ids=str)
OTHER_CARDS = pytest.mark.parametrize("card", [AMPERE, HOPPER, B200, B300, None], ids=str)


class TestPrecedence:
    def test_default_is_auto(self) -> None:
        decision = resolve(Request("auto"), machine(RTX))
        assert (decision.backend, decision.origin, decision.explicit) == ("flashinfer_cutlass", "default", False)

    def test_deprecated_variable_beats_the_default(self) -> None:
        decision = resolve(Request("auto", deprecated_value="cudnn"), machine(RTX))
        assert (decision.backend, decision.origin, decision.explicit) == (
            "flashinfer_cudnn",
            "deprecated variable",
            True,
        )

    def test_our_variable_beats_the_deprecated_one(self) -> None:
        decision = resolve(Request("auto", env_value="flashinfer_b12x", deprecated_value="cudnn"), machine(RTX))
        assert (decision.backend, decision.origin, decision.explicit) == ("flashinfer_b12x", "environment", True)
        assert any("SGLANG_FLASHINFER_FP4_GEMM_BACKEND='cudnn' is ignored" in text for text in decision.warnings)

    def test_the_command_line_beats_both_and_says_so(self) -> None:
        request = Request("torch_reference", env_value="flashinfer_b12x", deprecated_value="cudnn")
        decision = resolve(request, machine(RTX))
        assert (decision.backend, decision.origin, decision.explicit) == ("torch_reference", "command line", True)
        assert len(decision.warnings) == 2

    def test_agreeing_sources_give_no_warning(self) -> None:
        request = Request("flashinfer_b12x", env_value="flashinfer_b12x")
        assert resolve(request, machine(RTX)).warnings == ()

    def test_our_variable_may_say_auto(self) -> None:
        decision = resolve(Request("auto", env_value="auto", deprecated_value="cudnn"), machine(RTX))
        assert (decision.backend, decision.origin, decision.explicit) == ("flashinfer_cutlass", "environment", False)

    def test_an_unused_value_is_not_validated(self) -> None:
        request = Request("torch_reference", env_value="nonsense", deprecated_value="nonsense")
        assert resolve(request, machine(RTX)).backend == "torch_reference"

    def test_the_default_of_0_5_9_counts_as_the_command_line(self) -> None:
        facts = released(B200, "0.5.9")
        assert sglang_default(facts) == "flashinfer_cutlass"
        decision = resolve(Request("flashinfer_cutlass", env_value="torch_reference"), facts)
        assert (decision.backend, decision.origin) == (None, "command line")
        assert any("add --fp4-gemm-backend auto" in text for text in decision.warnings)

    @pytest.mark.parametrize("sglang", [version for version in PINS if version != "0.5.9"])
    def test_the_default_of_every_other_release_is_auto(self, sglang: str) -> None:
        assert sglang_default(released(RTX, sglang)) == "auto"


class TestDeprecatedVariable:
    @pytest.mark.parametrize(
        ("written", "meant"),
        [
            ("cutlass", "flashinfer_cutlass"),
            ("flashinfer_cutlass", "flashinfer_cutlass"),
            ("cudnn", "flashinfer_cudnn"),
            ("flashinfer_cudnn", "flashinfer_cudnn"),
            ("cute-dsl", "flashinfer_cutedsl"),
            ("cutedsl", "flashinfer_cutedsl"),
            ("flashinfer_cute-dsl", "flashinfer_cutedsl"),
            ("flashinfer_cutedsl", "flashinfer_cutedsl"),
            ("b12x", "flashinfer_b12x"),
            ("flashinfer_b12x", "flashinfer_b12x"),
            ("flashinfer_auto", "flashinfer_auto"),
        ],
    )
    def test_old_spellings(self, written: str, meant: str) -> None:
        decision = resolve(Request("auto", deprecated_value=written), machine(RTX))
        assert decision.backend == meant
        assert any(f"write --fp4-gemm-backend {meant} instead" in text for text in decision.warnings)

    def test_auto_stays_auto(self) -> None:
        decision = resolve(Request("auto", deprecated_value="auto"), machine(RTX))
        assert (decision.backend, decision.explicit) == ("flashinfer_cutlass", False)

    @pytest.mark.parametrize("spelling", ["trtllm", "flashinfer_trtllm"])
    def test_it_is_guarded_like_the_flag(self, spelling: str) -> None:
        with pytest.raises(UnsupportedError, match="SGLANG_FLASHINFER_FP4_GEMM_BACKEND"):
            resolve(Request("auto", deprecated_value=spelling), machine(RTX))

    @SM12X
    @pytest.mark.parametrize("written", ["marlin", "sm120", "CUTLASS", "torch_reference", "x"])
    def test_unknown_values_are_refused_with_the_legal_ones(self, written: str, card: Capability) -> None:
        with pytest.raises(ConfigError, match="b12x.*cutlass.*flashinfer_cutlass"):
            resolve(Request("auto", deprecated_value=written), machine(card))

    @pytest.mark.parametrize("card", [c for c in CARDS if c not in (RTX, SPARK)], ids=str)
    @pytest.mark.parametrize("written", ["trtllm", "cutlass", "flashinfer_cudnn", "x"])
    def test_a_leftover_changes_nothing_on_other_cards(self, written: str, card: Capability | None) -> None:
        decision = resolve(Request("auto", deprecated_value=written), machine(card))
        assert (decision.backend, decision.explicit, decision.warnings) == (None, False, ())


class TestAuto:
    @pytest.mark.parametrize(
        ("sglang", "cuda", "expected"),
        [
            ("0.5.9", "13.0", "flashinfer_cudnn"),  # FlashInfer 0.6.3 has the race of its CUTLASS GEMM
            ("0.5.10", "13.0", "flashinfer_cudnn"),  # these releases of SGLang take cuDNN themselves
            ("0.5.11", "12.9", "flashinfer_cudnn"),
            ("0.5.12", "13.0", "flashinfer_cudnn"),
            ("0.5.14", "13.0", "flashinfer_cutlass"),
            ("0.5.16", "12.9", "flashinfer_cutlass"),
            ("0.5.21", "13.0", "flashinfer_cutlass"),
            ("0.5.22", "13.0", "flashinfer_cutlass"),
            ("0.5.23", "12.9", "flashinfer_cutlass"),
        ],
    )
    @SM12X
    def test_takes_what_the_table_names(self, sglang: str, cuda: str, expected: str, card: Capability) -> None:
        decision = resolve(Request("auto"), released(card, sglang, cuda))
        assert decision.backend == expected
        assert not decision.explicit
        assert "#" in decision.reason  # the source of the preference

    @SM12X
    def test_an_old_cudnn_leaves_cutlass(self, card: Capability) -> None:
        facts = machine(card, sglang="0.5.12", flashinfer="0.6.11.post1", cudnn="9.7.1")
        assert resolve(Request("auto"), facts).backend == "flashinfer_cutlass"

    @SM12X
    def test_never_takes_code_of_ours(self, card: Capability) -> None:
        facts = machine(card, flashinfer=None)
        with pytest.raises(UnsupportedError, match="pip install .flashinfer-python.*torch_reference"):
            resolve(Request("auto"), facts)

    @SM12X
    def test_unsafe_leaves_a_hopeless_machine_to_sglang(self, card: Capability) -> None:
        decision = resolve(Request("auto", allow_unsafe=True), machine(card, flashinfer=None))
        assert decision.backend is None
        assert any("flashinfer" in text for text in decision.warnings)

    @SM12X
    def test_warnings_of_the_choice_are_passed_on(self, card: Capability) -> None:
        decision = resolve(Request("auto"), machine(card, sglang="0.5.12", flashinfer="0.6.12"))
        assert any("vllm#52540" in text for text in decision.warnings)

    @SM12X
    def test_can_be_left_to_sglang(self, card: Capability) -> None:
        decision = resolve(Request("auto", take_auto=False), machine(card))
        assert decision.backend is None
        assert "SGLANG_SM120_AUTO=0" in decision.reason

    @OTHER_CARDS
    def test_is_sglangs_on_other_cards(self, card: Capability | None) -> None:
        assert resolve(Request("auto"), machine(card)).backend is None

    def test_is_sglangs_on_an_sm12x_that_the_table_does_not_know(self) -> None:
        assert resolve(Request("auto"), machine((12, 3))).backend is None


class TestGuards:
    @SM12X
    @pytest.mark.parametrize(
        ("value", "facts_without"),
        [
            ("flashinfer_trtllm", {}),
            ("flashinfer_cutedsl", {"flashinfer": "0.7.0"}),
            ("flashinfer_cutedsl", {"cuda": "12.9"}),
            ("flashinfer_b12x", {"flashinfer": "0.6.18", "cuda": "12.9"}),
            ("flashinfer_b12x", {"flashinfer": "0.6.8.post1"}),
            ("flashinfer_cutlass", {"flashinfer": "0.6.6"}),
            ("flashinfer_auto", {"flashinfer": "0.6.6"}),
            ("flashinfer_cudnn", {"cudnn": "9.10.1"}),
            ("cutlass", {"sglang": "0.5.14", "cuda_toolkit": "12.6"}),
        ],
    )
    def test_refusals(self, value: str, facts_without: dict[str, str], card: Capability) -> None:
        facts = machine(card, **facts_without)
        with pytest.raises(UnsupportedError) as caught:
            resolve(Request(value), facts)
        text = str(caught.value)
        assert text.startswith(f"--fp4-gemm-backend='{value}' cannot be used: ")
        assert "SGLANG_SM120_ALLOW_UNSAFE=1" in text
        alternative = text.split("use --fp4-gemm-backend ")[1].split()[0]
        assert resolve(Request(alternative), facts).backend == alternative

        forced = resolve(Request(value, allow_unsafe=True), facts)
        assert (forced.backend, forced.explicit) == (value, True)
        assert text in forced.warnings

    @pytest.mark.parametrize(("value", "sglang"), [("cutlass", "0.5.16"), ("cutlass", "0.5.9"), ("marlin", "0.5.12")])
    @pytest.mark.parametrize("card", CARDS, ids=str)
    def test_what_the_installed_sglang_does_not_have_cannot_be_forced(
        self, value: str, sglang: str, card: Capability | None
    ) -> None:
        with pytest.raises(UnsupportedError) as caught:
            resolve(Request("auto", env_value=value, allow_unsafe=True), machine(card, sglang=sglang))
        assert "ALLOW_UNSAFE" not in str(caught.value)

    @SM12X
    @pytest.mark.parametrize("value", ["flashinfer_cutlass", "flashinfer_cudnn", "flashinfer_auto"])
    def test_missing_flashinfer(self, value: str, card: Capability) -> None:
        with pytest.raises(UnsupportedError, match="FlashInfer .*it is not installed.*torch_reference"):
            resolve(Request(value), machine(card, flashinfer=None))

    @SM12X
    def test_broken_flashinfer_says_why(self, card: Capability) -> None:
        facts = machine(card, flashinfer=None)
        facts.problems["flashinfer"] = "0.7.2 is installed, but importing it fails (ImportError: no libcudart)"
        with pytest.raises(UnsupportedError, match="no libcudart"):
            resolve(Request("flashinfer_cutlass"), facts)

    @SM12X
    def test_the_reference_always_runs(self, card: Capability) -> None:
        facts = HostFacts(card)
        assert resolve(Request("torch_reference"), facts).backend == "torch_reference"

    @OTHER_CARDS
    @pytest.mark.parametrize("value", ["flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl", "marlin"])
    def test_the_flag_with_a_value_of_sglang_is_left_to_it_on_other_cards(
        self, value: str, card: Capability | None
    ) -> None:
        decision = resolve(Request(value), machine(card))
        assert (decision.backend, decision.warnings) == (None, ())

    @OTHER_CARDS
    def test_values_of_ours_are_judged_on_every_card(self, card: Capability | None) -> None:
        with pytest.raises(UnsupportedError):
            resolve(Request("flashinfer_b12x"), machine(card))
        assert resolve(Request("torch_reference"), machine(card)).backend == "torch_reference"

    def test_a_value_is_ours_where_the_installed_sglang_lacks_it(self) -> None:
        with pytest.raises(UnsupportedError):
            resolve(Request("flashinfer_cutedsl"), machine(HOPPER, sglang="0.5.11"))
        assert resolve(Request("flashinfer_cutedsl"), machine(HOPPER, sglang="0.5.12")).backend is None

    @OTHER_CARDS
    def test_a_variable_is_judged_on_every_card(self, card: Capability | None) -> None:
        """SGLang's argument parser has not seen it, so nobody else would."""
        with pytest.raises(UnsupportedError, match="SGLANG_SM120_FP4_GEMM_BACKEND"):
            resolve(Request("auto", env_value="cutlass"), machine(card))

    @pytest.mark.parametrize("card", CARDS, ids=str)
    def test_a_variable_with_an_unknown_value_lists_the_legal_ones(self, card: Capability | None) -> None:
        with pytest.raises(ConfigError) as caught:
            resolve(Request("auto", env_value="sm999"), machine(card))
        assert all(value in str(caught.value) for value in ("auto", *BACKENDS))

    @pytest.mark.parametrize("card", CARDS, ids=str)
    def test_values_of_other_plugins_are_left_alone(self, card: Capability | None) -> None:
        decision = resolve(Request("their_backend"), machine(card))
        assert (decision.backend, decision.explicit) == (None, True)


def test_a_refusal_names_an_alternative_once() -> None:
    """On the CPU what helps and what to take instead are the same value."""
    with pytest.raises(UnsupportedError) as refused:
        resolve(Request("sm120"), machine(None))
    assert str(refused.value).count("torch_reference") == 1
