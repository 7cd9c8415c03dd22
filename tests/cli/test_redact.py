"""Text that is pasted into an issue says nothing about the machine or the user."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import sglang_sm120
from sglang_sm120 import redact
from sglang_sm120.redact import redacted

PACKAGE = str(Path(sglang_sm120.__file__).parent)


@pytest.fixture(autouse=True)
def _ann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("USER", "ann")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7")
    monkeypatch.setattr(redact, "_site_packages", lambda: ["/opt/venv/lib/python3.12/site-packages"])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{PACKAGE}/cli/main.py is old", "<package>/cli/main.py is old"),
        ("in /opt/venv/lib/python3.12/site-packages/torch/lib", "in <site-packages>/torch/lib"),
        ("the folder /home/ann/.cache/x.", "the folder ~/.cache/x."),
        ("/home/anna/x belongs to another", "<path> belongs to another"),
        ("PYTHONPATH=/srv/a/lib:/srv/b", "PYTHONPATH=<path>:<path>"),
        ("error at:/srv/a/x.py", "error at:<path>"),
        ("MODEL='/srv/my models/x' is 'N'/'K'", "MODEL='<path>' is 'N'/'K'"),
        ("file:///srv/a/x.whl", "file://<path>"),
        ("HF_TOKEN=abcdef AWS_SECRET_ACCESS_KEY=x", "HF_TOKEN=<secret> AWS_SECRET_ACCESS_KEY=<secret>"),
        ("'/data/models/secret-project' (0.1.0)", "'<path>' (0.1.0)"),
        ("OSError: /usr/lib/libcuda.so.1: cannot open", "OSError: <path>: cannot open"),
        ("on gpu-box-7 as ann", "on <host> as <user>"),
        ("the annotation of gpu-box-70", "the annotation of gpu-box-70"),
        ("https://bob:hunter2@example.org/simple", "https://<secret>example.org/simple"),
        ("HF_TOKEN=hf_abcdefghijkl", "HF_TOKEN=<secret>"),
        ("token: xyz, then", "token: <secret> then"),
        ("key sk-abcdef123456", "key <secret>"),
        ("Authorization: Bearer abcdef", "Authorization: Bearer <secret>"),
        ('{"api_key": "abcdef", "n": 1}', '{"api_key": <secret> "n": 1}'),
        ("--api-key abcdef --tp 2", "--api-key <secret> --tp 2"),
        ("with AKIAIOSFODNN7EXAMPLE", "with <secret>"),
        ("socket on [gpu-box-7.corp.example.com]:29500", "socket on [<host>]:29500"),
        ("on gpu-box-7. Then", "on <host>. Then"),
    ],
)
def test_what_identifies_is_replaced(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "needs FlashInfer >=0.7.1: found 0.6.3",
        "flashinfer 0.7.4 gemm/gemm_base.py (supported_compute_capability)",
        "sglang 0.5.23 srt/layers/quantization/modelopt_quant.py",
        "~/.cache/sglang-sm120",
        "N/K and A / B",
        "--max-total-tokens 65536 --tokenizer-path x",
        "2.13.0+cpu",
    ],
)
def test_what_does_not_is_kept(text: str) -> None:
    assert redacted(text) == text


def test_a_path_with_a_space_that_is_all_of_a_text(tmp_path: Path) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    assert redacted({"name": str(folder)}) == {"name": "<path>"}


def test_every_depth_is_reached_and_other_types_are_kept() -> None:
    report = {"a": [{"b": "/x/y"}, 3, None, True], "c": 1.5}
    assert redacted(report) == {"a": [{"b": "<path>"}, 3, None, True], "c": 1.5}


@pytest.mark.parametrize("user", ["root", "sglang"])
def test_names_that_identify_nobody_do_not_spoil_the_report(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", user)
    assert redacted({"offered_by": "sglang", "where": "the wheel root"}) == {
        "offered_by": "sglang",
        "where": "the wheel root",
    }
