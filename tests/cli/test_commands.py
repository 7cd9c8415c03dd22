"""The commands as a user runs them, on sound and on broken installations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120 import __version__
from sglang_sm120.backends import BACKENDS
from tests.cli.bare import ROOT, Bare, codes

ENTRY_KEYS = {
    "value",
    "available",
    "status",
    "reason",
    "remedy",
    "source",
    "warnings",
    "summary",
    "multiplies",
    "offered_by",
}


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    return Bare(tmp_path / "packages")


def _here(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this very environment."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG")}
    command = [sys.executable, "-m", "sglang_sm120.cli.main", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, check=False, timeout=120
    )


class TestBackends:
    def test_json(self) -> None:
        done = _here("backends", "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["schema"] == 1
        assert [entry["value"] for entry in report["backends"]] == list(BACKENDS)
        for entry in report["backends"]:
            assert set(entry) == ENTRY_KEYS
            assert entry["status"] in ("ok", "refused", "unsupported")
            assert entry["available"] == (entry["status"] == "ok")
            assert entry["reason"]
            assert entry["available"] or entry["remedy"]
        reference = next(e for e in report["backends"] if e["value"] == "torch_reference")
        assert reference["available"]
        assert reference["offered_by"] == "sglang_sm120"

    def test_text_names_every_value_with_reason_and_source(self) -> None:
        done = _here("backends", COLUMNS="200")
        assert done.returncode == 0, done.stderr
        for value in BACKENDS:
            assert value in done.stdout
        assert "Source: tests/host/test_linear_methods.py" in done.stdout

    def test_runs_without_torch_sglang_and_flashinfer(self, bare: Bare) -> None:
        done = bare.run("backends", "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert [e["value"] for e in report["backends"] if e["available"]] == ["torch_reference", "sm120_tuned"]
        assert report["versions"].keys() <= {"driver"}


class TestDoctor:
    def test_sees_this_environment(self) -> None:
        done = _here("doctor", "--json")
        report = json.loads(done.stdout)
        assert done.returncode == (0 if report["ok"] else 1)
        assert report["package"] == __version__
        assert {"sglang", "torch"} <= set(report["versions"])
        seams = report["hooks"]["seams"]
        assert seams
        assert set(seams.values()) == {"matches"}
        assert all(finding["fix"] for finding in report["findings"])
        assert report["decision"] is not None

    def test_text_has_every_finding_with_its_fix(self) -> None:
        report = json.loads(_here("doctor", "--json").stdout)
        text = _here("doctor", COLUMNS="100").stdout
        assert text.count("  fix: ") == len(report["findings"])
        assert "SGLANG_SM120_ALLOW_UNSAFE = 0 (default)" in text

    def test_says_where_a_setting_comes_from(self) -> None:
        report = json.loads(
            _here("doctor", "--json", SGLANG_SM120_FP4_GEMM_BACKEND="torch_reference", SGLANG_SM120_AUTO="off").stdout
        )
        settings = {s["name"]: (s["value"], s["origin"]) for s in report["settings"]}
        assert settings["SGLANG_SM120_FP4_GEMM_BACKEND"] == ("torch_reference", "environment")
        assert settings["SGLANG_SM120_AUTO"] == ("0", "environment")
        assert settings["SGLANG_SM120_ALLOW_UNSAFE"] == ("0", "default")
        assert report["decision"]["backend"] == "torch_reference"
        assert report["decision"]["origin"] == "environment"

    def test_leaves_no_trace(self, bare: Bare) -> None:
        before = sorted(bare.folder.parent.rglob("*"))
        bare.run("doctor")
        assert sorted(bare.folder.parent.rglob("*")) == before


class TestBrokenInstallations:
    def test_nothing_but_this_package(self, bare: Bare) -> None:
        report, code = bare.doctor()
        assert code == 1
        assert {"torch-missing", "sglang-missing"} <= codes(report, "stop")
        assert "flashinfer-missing" in codes(report, "warning")

    def test_a_torch_that_cannot_be_imported(self, bare: Bare) -> None:
        bare.add("torch", "torch", "2.14.1", "raise OSError('libcudart.so.13: cannot open shared object file')")
        report, code = bare.doctor()
        assert code == 1
        (finding,) = (f for f in report["findings"] if f["code"] == "torch-missing")
        assert "libcudart.so.13" in finding["message"]

    def test_a_half_removed_distribution(self, bare: Bare) -> None:
        (bare.folder / "flashinfer_python-0.7.2.dist-info").mkdir()
        report, code = bare.doctor()
        assert code == 1
        assert "flashinfer-missing" in codes(report)

    def test_a_renamed_function_in_sglang(self, bare: Bare) -> None:
        utils = "srt/layers/quantization/fp4_utils.py"
        bare.add_real_sglang(file=utils, old="def initialize_fp4_gemm_config(", new="def init_fp4_config(")
        report, code = bare.doctor()
        assert code == 1
        assert "seam-differs" in codes(report, "stop")
        assert any("initialize_fp4_gemm_config" in state for state in report["hooks"]["seams"].values())

    def test_an_sglang_that_is_too_old(self, bare: Bare) -> None:
        bare.add("sglang", "sglang", "0.5.8")
        report, code = bare.doctor()
        assert code == 1
        assert "sglang-old" in codes(report, "stop")

    def test_a_newer_sglang_with_all_hooks_is_a_warning(self, bare: Bare) -> None:
        bare.add_real_sglang("0.5.99")
        report, _ = bare.doctor()
        assert "sglang-new" in codes(report, "warning")
        assert "seam-differs" not in codes(report)

    def test_a_flashinfer_older_than_sglang_asks_for(self, bare: Bare) -> None:
        bare.add_metadata("sglang", "0.5.23", requires="flashinfer_python[cu13]==0.7.2")
        bare.add_metadata("flashinfer-python", "0.6.3")
        report, code = bare.doctor()
        assert code == 1
        (finding,) = (f for f in report["findings"] if f["code"] == "flashinfer-old")
        assert "0.7.2" in finding["fix"]

    @pytest.mark.parametrize(("version", "severity"), [("0.0.1", "stop"), (__version__, "warning")])
    def test_two_copies(self, version: str, severity: str, bare: Bare, tmp_path: Path) -> None:
        other = tmp_path / "other" / "sglang_sm120"
        other.mkdir(parents=True)
        (other / "__init__.py").write_text(f'__version__ = "{version}"\n', encoding="utf-8")
        bare.path.append(tmp_path / "other")
        report, _ = bare.doctor()
        assert "two-copies" in codes(report, severity)
        assert "two-copies" in codes(report)

    def test_without_the_start_up_file(self, bare: Bare) -> None:
        report, code = bare.doctor()
        assert code == 1
        assert report["hooks"]["pth_active"] is False
        assert "pth-inactive" in codes(report, "stop")

    def test_a_package_without_its_host_folder(self, bare: Bare, tmp_path: Path) -> None:
        """An installation that was interrupted."""
        copy = tmp_path / "partial" / "sglang_sm120"
        copy.mkdir(parents=True)
        for entry in (ROOT / "sglang_sm120").iterdir():
            if entry.name not in ("host", "_boot.py", "__pycache__"):
                (copy / entry.name).symlink_to(entry)
        bare.path[:] = [copy.parent]
        bare.add_metadata("sglang", "0.5.23")
        report, code = bare.doctor()
        assert code == 1
        assert "seams-unknown" in codes(report, "stop")
        assert "No module named" in report["hooks"]["note"]

    def test_bad_settings(self, bare: Bare) -> None:
        bare.environment.update(SGLANG_SM120_ALLOW_UNSAFE="maybe", SGLANG_SM120_ALOW_UNSAFE="1")
        report, code = bare.doctor()
        assert code == 1
        assert "bad-setting" in codes(report, "stop")
        assert "unknown-variable" in codes(report, "warning")

    def test_a_variable_that_refuses_the_start(self, bare: Bare) -> None:
        bare.environment.update(SGLANG_SM120_FP4_GEMM_BACKEND="flashinfer_b12x")
        report, code = bare.doctor()
        assert code == 1
        (finding,) = (f for f in report["findings"] if f["code"] == "start-refused")
        assert "torch_reference" in finding["message"]

    def test_a_cache_that_others_may_write_to(self, bare: Bare, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        cache.mkdir()
        cache.chmod(0o777)
        bare.environment["SGLANG_SM120_CACHE_DIR"] = str(cache)
        report, _ = bare.doctor()
        assert "cache" in codes(report, "warning")


class TestRedaction:
    def test_no_name_path_or_token_of_this_machine_is_in_the_json(self, bare: Bare, tmp_path: Path) -> None:
        home = tmp_path / "home" / "annabel"
        home.mkdir(parents=True)
        bare.add("torch", "torch", "2.14.1", f"raise OSError('{home}/lib/libtorch.so: token=abc123 for hf_AbCdEfGhIj')")
        bare.environment.update(
            HOME=str(home),
            USER="annabel",
            SGLANG_SM120_CACHE_DIR="/secret/place/cache",
            SGLANG_SM120_FP4_GEMM_BACKEND="hf_AbCdEfGhIj",
        )
        done = bare.run("doctor", "--json")
        report: dict[str, Any] = json.loads(done.stdout)
        for secret in ("annabel", "hf_AbCdEfGhIj", "abc123", "/secret", str(tmp_path), os.uname().nodename):
            assert secret not in done.stdout, secret
        assert any(f["code"] == "torch-missing" for f in report["findings"])


class TestUsage:
    def test_version(self) -> None:
        done = _here("--version")
        assert (done.returncode, done.stdout.strip()) == (0, __version__)

    @pytest.mark.parametrize("arguments", [("backends", "--nonsense"), ("nonsense",), ("doctor", "extra")])
    def test_misuse_exits_with_2(self, arguments: tuple[str, ...]) -> None:
        assert _here(*arguments).returncode == 2

    def test_help_lists_the_commands(self) -> None:
        done = _here("--help")
        assert done.returncode == 0
        assert "backends" in done.stdout
        assert "doctor" in done.stdout
