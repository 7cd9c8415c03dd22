"""All hooks or none: what happens when this SGLang, another plugin or another copy of us is in the way.

Each case is a fresh process with the real SGLang, of which one file was edited (see ``shadow``).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_sm120 import env
from sglang_sm120.host import installation
from tests.host.shadow import run_python, shadow_sglang

pytestmark = pytest.mark.long

FP4_UTILS = "srt/layers/quantization/fp4_utils.py"
MODELOPT = "srt/layers/quantization/modelopt_quant.py"
CT = "srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py"
CHOICES = "srt/arg_groups/choices.py"

#: One rename per seam that could happen in a new release.
BROKEN = {
    "choices": ("srt/server_args.py", "FP4_GEMM_RUNNER_BACKEND_CHOICES", "FP4_DENSE_BACKEND_CHOICES"),
    "enum": (FP4_UTILS, "class Fp4GemmRunnerBackend", "class Fp4DenseBackend"),
    "resolution": (FP4_UTILS, "def initialize_fp4_gemm_config()", "def initialize_fp4_gemm_config(config)"),
    "gemm": (MODELOPT, "flashinfer_fp4_gemm(\n            input, weight,", "flashinfer_fp4_gemm(\n            weight,"),
    "weights (ModelOpt)": (MODELOPT, "class ModelOptFp4LinearMethod", "class ModelOptNvfp4LinearMethod"),
    "apply (compressed-tensors)": (CT, "def apply_weights(", "def apply_linear("),
    "admission (compressed-tensors)": (CT, "def get_min_capability(cls)", "def min_capability(cls)"),
    "pre-emption": (
        "kernels/ops/gemm/__init__.py",
        "def try_qwen3x_nvfp4_gemm(\n    input:",
        "def try_qwen3x_nvfp4_gemm(\n    x:",
    ),
    "moe runner": (
        "srt/arg_groups/overrides.py",
        "def _moe_runner_backend_quant_constraints(view: Any)",
        "def _moe_runner_backend_quant_constraints(view: Any, platform: Any)",
    ),
    "moe layer (unquantized)": (
        "srt/layers/quantization/unquant.py",
        "class UnquantizedFusedMoEMethod(",
        "class UnquantizedExpertsMethod(",
    ),
}

REPORT = """
import json, sys
import sglang
from sglang_sm120 import verify
import sglang.srt.layers.quantization.modelopt_quant as mq
import sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 as ct
touched = [
    f"{owner.__name__}.{name}"
    for owner in (mq, ct, mq.__dict__.get("ModelOptFp4LinearMethod", mq), ct.CompressedTensorsW4A4Fp4)
    for name, value in vars(owner).items()
    if hasattr(getattr(value, "__func__", value), "__sm120_seam__")
]
print(json.dumps({"states": sorted({s.state for s in verify()}), "touched": touched, "file": sglang.__file__}))
"""


def report(stdout: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("seam", BROKEN)
def test_a_broken_seam_stops_a_server_that_needs_us(seam: str, tmp_path: Path) -> None:
    path, old, new = BROKEN[seam]
    shadow = shadow_sglang(tmp_path, {path: (old, new)})
    run = run_python("import sglang", "--fp4-gemm-backend", "torch_reference", path=shadow)
    assert run.returncode == 1
    message = run.stderr.strip().splitlines()
    assert len(message) == 1, run.stderr
    assert seam in message[0]
    assert "0.5.23" in message[0]
    assert "torch_reference" in message[0]
    assert "SGLANG_SM120_DISABLE=1" in message[0]
    assert "upgrade" in message[0]


@pytest.mark.parametrize("again", ["import sglang", "import sglang_sm120; sglang_sm120.install()"])
def test_a_program_that_catches_the_stop_is_stopped_again(again: str, tmp_path: Path) -> None:
    path, old, new = BROKEN["gemm"]
    shadow = shadow_sglang(tmp_path, {path: (old, new)})
    code = f"""
for attempt in range(2):
    try:
        {again}
    except SystemExit as stop:
        print("stopped:", stop)
"""
    run = run_python(code, "--fp4-gemm-backend", "torch_reference", path=shadow)
    assert run.stdout.count("stopped: sglang-sm120") == 2, run.stderr


@pytest.mark.parametrize(
    ("seam", "argv"),
    [
        ("resolution", ()),
        ("gemm", ("--fp4-gemm-backend", "flashinfer_cutlass")),
        ("apply (compressed-tensors)", ("--fp4-gemm-backend=auto",)),
    ],
)
def test_a_broken_seam_leaves_every_other_server_untouched(seam: str, argv: tuple[str, ...], tmp_path: Path) -> None:
    path, old, new = BROKEN[seam]
    shadow = shadow_sglang(tmp_path, {path: (old, new)})
    run = run_python(REPORT, *argv, path=shadow)
    assert run.returncode == 0, run.stderr
    assert str(shadow) in str(report(run.stdout)["file"])
    assert report(run.stdout)["touched"] == []
    assert report(run.stdout)["states"] == ["off"]
    warnings = [line for line in run.stderr.splitlines() if "sglang-sm120" in line]
    assert len(warnings) == 1
    assert seam in warnings[0]
    assert "runs unchanged" in warnings[0]


def test_every_form_of_asking_is_recognised(tmp_path: Path) -> None:
    path, old, new = BROKEN["resolution"]
    shadow = shadow_sglang(tmp_path, {path: (old, new)})
    asked = [
        run_python("import sglang", "--fp4-gemm-backend=flashinfer_b12x", path=shadow),
        run_python("import sglang", path=shadow, SGLANG_SM120_FP4_GEMM_BACKEND="flashinfer_auto"),
    ]
    assert [run.returncode for run in asked] == [1, 1]
    assert (
        run_python(
            "import sglang", "--fp4-gemm-backend", "torch_reference", path=shadow, SGLANG_SM120_DISABLE="1"
        ).returncode
        == 0
    )


@pytest.mark.parametrize(("version", "outcome"), [("0.5.8", "older"), ("0.6.0", "tested up to")])
def test_releases_outside_the_window_say_so_once(version: str, outcome: str, tmp_path: Path) -> None:
    shadow = shadow_sglang(tmp_path, {FP4_UTILS: ("import torch", "import torch  # the same code")}, version=version)
    run = run_python(REPORT, path=shadow)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stderr.splitlines() if "sglang-sm120" in line]
    assert len(lines) == 1
    assert outcome in lines[0]
    # Absent: seams of code that only earlier releases have.
    expected = ["off"] if outcome == "older" else ["absent", "armed", "live"]
    assert report(run.stdout)["states"] == expected


def test_a_release_that_is_unknown_and_matches_serves_our_values(tmp_path: Path) -> None:
    shadow = shadow_sglang(tmp_path, {FP4_UTILS: ("import torch", "import torch  # the same code")}, version="0.5.99")
    code = "import sys, sglang.srt.server_args as s\nprint('torch_reference' in s.FP4_GEMM_RUNNER_BACKEND_CHOICES)"
    run = run_python(code, "--fp4-gemm-backend", "torch_reference", path=shadow)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "True"


def test_two_versions_of_the_plugin_stop_a_server_that_needs_one(tmp_path: Path) -> None:
    other = tmp_path / "sglang_sm120-0.0.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-sm120\nVersion: 0.0.9\n")
    run = run_python("import sglang", "--fp4-gemm-backend", "torch_reference", path=tmp_path)
    assert run.returncode == 1
    assert "two versions" in run.stderr
    assert "0.0.9" in run.stderr
    run = run_python(REPORT, path=tmp_path)
    assert run.returncode == 0
    assert "two versions" in run.stderr
    assert report(run.stdout)["touched"] == []


def test_a_whitelist_without_us_switches_us_off_and_says_so() -> None:
    run = run_python(REPORT, SGLANG_PLUGINS="other")
    assert run.returncode == 0
    assert report(run.stdout)["touched"] == []
    assert "SGLANG_PLUGINS" in run.stderr
    run = run_python("import sglang", "--fp4-gemm-backend", "flashinfer_b12x", SGLANG_PLUGINS="other")
    assert run.returncode == 1
    assert "SGLANG_PLUGINS" in run.stderr
    assert report(run_python(REPORT, SGLANG_PLUGINS="other, sm120").stdout)["states"] == ["absent", "armed", "live"]


def test_the_switch_leaves_no_trace_in_the_process() -> None:
    code = "import sys, sglang; print([m for m in sys.modules if m.startswith('sglang_sm120.host')])"
    run = run_python(code, SGLANG_SM120_DISABLE="1")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("[]")


def test_installing_twice_wraps_once() -> None:
    code = """
import sglang
import sglang.srt.layers.quantization.modelopt_quant as mq
from sglang_sm120 import install
from sglang_sm120.host.plugin import register
before = mq.ModelOptFp4LinearMethod.apply, len(mq.get_fp4_gemm_runner_backend().__class__)
install(); register(); install()
assert (mq.ModelOptFp4LinearMethod.apply, len(mq.get_fp4_gemm_runner_backend().__class__)) == before
import sglang.srt.server_args as s
assert s.FP4_GEMM_RUNNER_BACKEND_CHOICES.count("torch_reference") == 1
"""
    run = run_python(code)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("error", ["AttributeError", "RuntimeError"])
def test_a_patch_that_fails_half_way_takes_everything_back(error: str) -> None:
    code = (
        f"""
import sys
from sglang_sm120.host import patches_linear
def fail(*args, **kwargs): raise {error}("planted")
patches_linear.wrap_apply = fail
import sglang.srt.layers.quantization.fp4_utils as fp4_utils
"""
        + REPORT
        + """
import sglang.srt.server_args as s
assert "torch_reference" not in s.FP4_GEMM_RUNNER_BACKEND_CHOICES
assert "TORCH_REFERENCE" not in fp4_utils.Fp4GemmRunnerBackend.__members__
"""
    )
    run = run_python(code)
    assert run.returncode == 0, run.stderr
    assert report(run.stdout)["touched"] == []
    assert report(run.stdout)["states"] == ["off"]
    assert "planted" in run.stderr
    run = run_python(code, "--fp4-gemm-backend", "torch_reference")
    assert run.returncode == 1
    assert "planted" in run.stderr


PRETEND_RTX = """
import sglang_sm120.host.installation as installation
installation.compute_capabilities = lambda: [(12, 0)]
"""


def test_under_auto_on_sm12x_a_broken_seam_stops_servers_and_nothing_else(tmp_path: Path) -> None:
    path, old, new = BROKEN["resolution"]
    shadow = shadow_sglang(tmp_path, {path: (old, new)})
    run = run_python(PRETEND_RTX + "import sglang, sglang.srt.server_args", path=shadow)
    assert run.returncode == 0, run.stderr
    serve = PRETEND_RTX + "import sglang.srt.managers.scheduler"
    run = run_python(serve, path=shadow)
    assert run.returncode == 1
    assert "auto on an SM12x GPU" in run.stderr
    for switch in ({"SGLANG_SM120_AUTO": "0"}, {"SGLANG_PLUGINS": "other"}, {"SGLANG_SM120_DISABLE": "1"}):
        assert run_python(serve, path=shadow, **switch).returncode == 0, switch


def test_of_several_flags_the_last_counts_as_it_does_for_argparse(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["x", "--fp4-gemm-backend", "flashinfer_b12x", "--fp4-gemm-backend=flashinfer_cutlass"]
    monkeypatch.setattr("sys.argv", flags)
    assert installation.asked_value() == "flashinfer_cutlass"
    assert installation.named() is None
    monkeypatch.setattr("sys.argv", [*flags, "--fp4-gemm-backend", "torch_reference"])
    assert installation.named() is not None


def test_a_switch_that_cannot_be_understood_says_so_every_time() -> None:
    code = """
for attempt in range(2):
    try:
        import sglang
    except Exception as error:
        print(type(error).__name__, error)
"""
    run = run_python(code, SGLANG_SM120_DISABLE="maybe")
    assert run.stdout.count("ConfigError SGLANG_SM120_DISABLE='maybe'") == 2


def test_no_value_that_cannot_be_understood_is_lost_in_sglangs_plugin_loader() -> None:
    """The loader logs the exceptions of a plugin and starts the server without it. Without the boot hook it is the only
    way in."""
    code = """
import os, sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "sglang_sm120._boot"]
import sglang.srt.plugins as plugins
from sglang_sm120 import env
for variable in env.VARIABLES:
    if variable.kind == "backend":
        continue  # any text is a value until the scheduler asks the table, and nothing catches that
    os.environ[variable.name] = "not/absolute, no number, no switch"
    plugins._plugins_loaded = False
    try:
        plugins.load_plugins()
        print("started with", variable.name)
    except SystemExit as stop:
        print("stopped:", stop)
    del os.environ[variable.name]
plugins._plugins_loaded = False
plugins.load_plugins()
"""
    run = run_python(code)
    assert run.returncode == 0, run.stderr
    assert "started with" not in run.stdout
    stopped = [line for line in run.stdout.splitlines() if line.startswith("stopped: SGLANG_SM120_")]
    assert len(stopped) == sum(variable.kind != "backend" for variable in env.VARIABLES)


def test_a_server_that_is_to_be_checked_depends_on_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the hooks do not fit it must not serve unchecked."""
    monkeypatch.setattr("sys.argv", ["x"])
    assert installation.named() is None
    monkeypatch.setenv(env.VERIFY, "8")
    assert installation.named() == f"{env.VERIFY}=8 asks for a checked server"


@pytest.mark.parametrize("early", [True, False])
def test_modules_imported_before_and_after_install_end_up_the_same(early: bool) -> None:
    """The entry point runs when the scheduler module is imported already, the boot hook before everything."""
    first = "import sglang.srt.managers.scheduler as sch\n" if early else ""
    last = "" if early else "import sglang.srt.managers.scheduler as sch\n"
    code = f"""
import sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "sglang_sm120._boot"]
{first}from sglang_sm120.host.plugin import register
register()
{last}assert sch.initialize_fp4_gemm_config.__sm120_seam__ == "resolution"
from sglang_sm120 import verify
from sglang_sm120.host.installer import require_live
require_live()
assert {{s.state for s in verify()}} <= {{"live", "absent"}}
"""
    run = run_python(code)
    assert run.returncode == 0, run.stderr


def test_sglangs_hook_registry_and_ours_live_together() -> None:
    """Another plugin wraps the same method through SGLang's own registry; both run."""
    code = """
import torch
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
seen = []
def around(original, *args, **kwargs):
    seen.append("other")
    return original(*args, **kwargs)
method = "sglang.srt.layers.quantization.modelopt_quant.ModelOptFp4LinearMethod.apply"
HookRegistry.register(method, around, HookType.AROUND)
load_plugins()
HookRegistry.apply_hooks()
import sglang.srt.layers.quantization.modelopt_quant as mq
from sglang_sm120 import verify
from types import SimpleNamespace
from sglang_sm120.host import layers
layers.forward = lambda layer, x, bias: "ours"
out = mq.ModelOptFp4LinearMethod.apply(SimpleNamespace(), SimpleNamespace(sm120_prepared=1), 0)
assert (out, seen) == ("ours", ["other"]), (out, seen)
assert all(s.state in ("live", "armed", "absent") for s in verify()), verify()
"""
    run = run_python(code)
    assert run.returncode == 0, run.stderr
