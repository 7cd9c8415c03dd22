"""What holds for every request on every machine, whatever is installed there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sm120.backends import BACKENDS, available_values, verdict
from sglang_sm120.backends.record import CAPABILITIES, HostFacts
from sglang_sm120.backends.table import FLASHINFER_NAMES
from sglang_sm120.backends.verdict import is_native
from sglang_sm120.dispatch import Request, layer_backend, resolve
from sglang_sm120.errors import Sm120Error

VERSIONS = {
    "sglang": ["0.5.9", "0.5.10", "0.5.11", "0.5.12.post1", "0.5.15", "0.5.16", "0.5.23", "0.6.0", "main"],
    "flashinfer": ["0.6.3", "0.6.6", "0.6.7", "0.6.9", "0.6.18", "0.7.0", "0.7.1.dev1", "0.7.4", "0.9.0", ""],
    "cuda": ["12.6", "12.8", "12.9", "13.0", "13.2"],
    "cuda_toolkit": ["12.8", "12.9", "13.0"],
    "cudnn": ["8.9.5", "9.10.1", "9.10.2", "9.20.0"],
    "cutlass_dsl": ["4.3.4", "4.4.2", "4.5.0", "4.8.0"],
}
ANY_VALUE = st.sampled_from(["auto", *BACKENDS, "cutlass", "cute-dsl", "trtllm", "b12x", "nonsense", ""]) | st.text(
    max_size=12
)


@st.composite
def machines(draw: st.DrawFn) -> HostFacts:
    capability = draw(st.sampled_from([None, (7, 5), (8, 9), (11, 0), (12, 3), *CAPABILITIES]))
    versions = {key: draw(st.none() | st.sampled_from(choices)) for key, choices in VERSIONS.items()}
    return HostFacts(
        capability,
        {key: version for key, version in versions.items() if version is not None},
        draw(st.dictionaries(st.sampled_from(FLASHINFER_NAMES), st.booleans())),
    )


requests = st.builds(
    Request,
    server_value=st.sampled_from(["auto", *BACKENDS]) | st.text(max_size=12),
    env_value=st.none() | ANY_VALUE,
    deprecated_value=st.none() | ANY_VALUE,
    take_auto=st.booleans(),
    allow_unsafe=st.booleans(),
)


@settings(max_examples=600, deadline=None)
@given(requests, machines())
def test_no_unfit_backend_is_ever_chosen_and_nothing_foreign_is_raised(request: Request, facts: HostFacts) -> None:
    try:
        decision = resolve(request, facts)
    except Sm120Error:
        return
    if decision.backend is None:
        return
    record = BACKENDS[decision.backend]
    sglangs_own = is_native(record, facts) and not facts.is_sm12x
    if not request.allow_unsafe and not sglangs_own:
        assert verdict(decision.backend, facts).status == "ok"
    if not decision.explicit:
        assert record.provider == "flashinfer"
        assert verdict(decision.backend, facts).status == "ok"


@settings(max_examples=400, deadline=None)
@given(
    requests,
    machines(),
    st.integers(1, 40000),
    st.integers(1, 40000),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.booleans(),
)
def test_every_layer_gets_a_backend_that_serves_it_or_an_error(
    request: Request, facts: HostFacts, n: int, k: int, out_dtype: str, differ: bool
) -> None:
    try:
        decision = resolve(request, facts)
        value = layer_backend(decision, facts, name="layer", n=n, k=k, out_dtype=out_dtype, fused_scales_differ=differ)
    except Sm120Error:
        return
    if decision.backend is None:
        assert value == "auto"
        return
    if decision.explicit:
        assert value == decision.backend, "a named backend is never replaced"
    sm12x = facts.is_sm12x and facts.capability in CAPABILITIES
    if sm12x and not request.allow_unsafe:
        assert verdict(value, facts, n=n, k=k, out_dtype=out_dtype).status == "ok"
        assert BACKENDS[value].exact_fused_scales or not differ


@settings(max_examples=200, deadline=None)
@given(machines())
def test_the_reference_is_always_available(facts: HostFacts) -> None:
    assert "torch_reference" in available_values(facts)
