"""Environment variables are typed, and the cache folder is safe to load code from."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sglang_sm120 import env
from sglang_sm120.errors import ConfigError

SWITCHES = {env.DISABLE: env.disabled, env.AUTO: env.take_auto, env.ALLOW_UNSAFE: env.allow_unsafe}
DEFAULTS = {env.DISABLE: False, env.AUTO: True, env.ALLOW_UNSAFE: False}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.parametrize("name", SWITCHES)
class TestSwitches:
    @pytest.mark.parametrize(("text", "expected"), [("1", True), ("True", True), ("on", True), ("yes", True)])
    def test_on(self, name: str, text: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(name, text)
        assert SWITCHES[name]() is expected

    @pytest.mark.parametrize("text", ["0", "false", "OFF", "no", " 0 "])
    def test_off(self, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(name, text)
        assert SWITCHES[name]() is False

    @pytest.mark.parametrize("text", [None, "", "  "])
    def test_not_set(self, name: str, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        if text is not None:
            monkeypatch.setenv(name, text)
        assert SWITCHES[name]() is DEFAULTS[name]

    @pytest.mark.parametrize("text", ["maybe", "2", "tru"])
    def test_anything_else_is_an_error_that_says_what_to_write(
        self, name: str, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"{name}='{text}'.*true.*false"):
            SWITCHES[name]()


def test_backends_are_returned_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.fp4_gemm_backend() is None
    assert env.deprecated_backend() is None
    monkeypatch.setenv(env.FP4_GEMM_BACKEND, "flashinfer_b12x ")
    monkeypatch.setenv(env.DEPRECATED_BACKEND, "cute-dsl")
    assert env.fp4_gemm_backend() == "flashinfer_b12x"
    assert env.deprecated_backend() == "cute-dsl"


def test_the_deprecated_variable_is_hidden_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.DEPRECATED_BACKEND, "b12x")

    def fail_inside() -> None:
        with env.without_deprecated_backend():
            assert env.DEPRECATED_BACKEND not in os.environ
            raise KeyError

    pytest.raises(KeyError, fail_inside)
    assert os.environ[env.DEPRECATED_BACKEND] == "b12x"
    monkeypatch.delenv(env.DEPRECATED_BACKEND)
    with env.without_deprecated_backend():
        pass
    assert env.DEPRECATED_BACKEND not in os.environ


def test_misspelt_names_are_found() -> None:
    environ = {"SGLANG_SM120_ALOW_UNSAFE": "1", env.AUTO: "0", "SGLANG_PLUGINS": "x"}
    assert env.unknown_variables(environ) == ["SGLANG_SM120_ALOW_UNSAFE"]


class TestCache:
    def test_default_follows_xdg(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert env.cache_path() == tmp_path / "sglang-sm120"

    @pytest.mark.parametrize("xdg", ["", "relative/path"])
    def test_an_unusable_xdg_is_ignored(self, xdg: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert env.cache_path() == tmp_path / ".cache" / "sglang-sm120"

    def test_created_for_the_user_only_whatever_the_umask(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "a" / "b"))
        old = os.umask(0)
        try:
            path = env.cache_dir()
        finally:
            os.umask(old)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert env.cache_dir() == path

    @pytest.mark.parametrize("text", ["cache", "~no-such-user/cache"])
    def test_relative_path(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(env.CACHE_DIR, text)
        with pytest.raises(ConfigError, match="absolute"):
            env.cache_path()

    def test_others_may_write(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
        with pytest.raises(ConfigError, match="chmod go-w"):
            env.cache_dir()

    def test_of_another_user(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
        monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        with pytest.raises(ConfigError, match="another user"):
            env.cache_dir()

    def test_a_file_is_in_the_way(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "file"))
        with pytest.raises(ConfigError, match=env.CACHE_DIR):
            env.cache_dir()
        monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "file" / "below"))
        with pytest.raises(ConfigError, match=env.CACHE_DIR):
            env.cache_dir()

    def test_no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> Path:
            raise RuntimeError("no home")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", fail)
        with pytest.raises(ConfigError, match=env.CACHE_DIR):
            env.cache_path()


def test_every_variable_that_cannot_be_understood_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env.require_readable()
    monkeypatch.setenv(env.AUTO, "maybe")
    monkeypatch.setenv(env.TUNING_TABLE, "table.json")
    with pytest.raises(ConfigError, match=rf"{env.AUTO}='maybe' .*{env.TUNING_TABLE}='table.json' "):
        env.require_readable()


def test_a_home_folder_that_nobody_asked_for_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    env.require_readable()


def test_every_variable_has_a_reader() -> None:
    assert [variable for variable, _, _ in env.readings()] == list(env.VARIABLES)


class TestVerification:
    @pytest.mark.parametrize(("text", "expected"), [(None, 0), ("", 0), ("0", 0), (" 64 ", 64), ("1000000", 1_000_000)])
    def test_a_number_of_steps(self, text: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
        if text is not None:
            monkeypatch.setenv(env.VERIFY, text)
        assert env.verify_every() == expected

    @pytest.mark.parametrize("text", ["-1", "1.5", "on", "1000001", "٣", "1e3", "1" * 5000])
    def test_anything_else_says_what_to_write(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(env.VERIFY, text)
        with pytest.raises(ConfigError, match=f"{env.VERIFY}='.*whole number from 0 to 1000000"):
            env.verify_every()

    def test_a_file_is_named_by_an_absolute_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert env.report_path() is None
        monkeypatch.setenv(env.REPORT, "~/served.json")
        assert env.report_path() == Path.home() / "served.json"
        monkeypatch.setenv(env.REPORT, "served.json")
        with pytest.raises(ConfigError, match=f"{env.REPORT}='served.json'.*absolute"):
            env.report_path()
