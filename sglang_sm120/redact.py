"""Take names, paths and secrets of this machine out of a report that will be pasted into an issue."""

from __future__ import annotations

import os
import re
import site
import socket
import sysconfig
from pathlib import Path
from typing import Any

import sglang_sm120

_SECRET = re.compile(
    r"\b(?:hf|sk|ghp|gho|ghs|github_pat|glpat|xox[bp]|nvapi)[_-][\w-]{6,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]+\.[\w-]+\.[\w-]+|(?<=://)[^/\s@]+@"
)
#: What a name says is secret, also one like HF_TOKEN or AWS_SECRET_ACCESS_KEY; in JSON, and as an option.
_NAMED_SECRET = re.compile(
    r"(?i)(\b\w*(?:token|password|secret|(?:api|access)[_-]?key)['\"]?\s*[=:]\s*(?:bearer\s+)?|\bbearer\s+"
    r"|--[\w-]*(?:token|password|secret|(?:api|access)-key)\s+)\S+"
)
#: Names that many machines share. They identify nobody, and some are words of the report itself.
_NOBODY = frozenset({"root", "nobody", "user", "admin", "ubuntu", "runner", "sglang", "localhost"})
#: In quotes with its spaces, else up to the first. Nothing starts at a slash of ``://``: addresses of sources stay.
_ABSOLUTE_PATH = re.compile(
    r"(?<=')/[^'\n]+(?=')|(?<=\")/[^\"\n]+(?=\")"
    r"|(?:(?<![\w.<>/~])|(?<=file://))/(?:[^\s'\"<>:;,)/]+/)*[^\s'\"<>:;,)/]+/?"
)


def redacted(value: Any) -> Any:
    """Return a copy of JSON data in which every text is safe to publish. Keys are our own words and stay."""
    if isinstance(value, dict):
        return {key: redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item) for item in value]
    return _clean(value) if isinstance(value, str) else value


def _clean(text: str) -> str:
    for path, name in _known_places():
        # At a path boundary only: /home/ann is no prefix of /home/anna.
        text = re.sub(re.escape(path) + r"(?![\w.-])", name, text)
    # Only a text that is a path and nothing else can be told from words after a path.
    text = "<path>" if text.startswith("/") and os.path.lexists(text) else _ABSOLUTE_PATH.sub("<path>", text)
    text = _NAMED_SECRET.sub(r"\1<secret>", _SECRET.sub("<secret>", text))
    # torch.distributed names the host with its domain.
    for word, rest, name in ((socket.gethostname(), r"(?:\.[a-z][\w-]*)*", "<host>"), (_user(), "", "<user>")):
        if word and word not in _NOBODY:
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-]){rest}", name, text)
    return text


def _known_places() -> list[tuple[str, str]]:
    """Return folders that may be named, the innermost first."""
    package = str(Path(sglang_sm120.__file__).parent)
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_site_packages()}
    places = [(package, "<package>"), *((folder, "<site-packages>") for folder in folders if folder)]
    home = os.path.expanduser("~")
    if home not in ("~", "/"):
        places.append((home, "~"))
    return sorted(places, key=lambda place: -len(place[0]))


def _site_packages() -> list[str]:
    # A virtual environment of old virtualenv replaces the site module with one that lacks this function.
    return site.getsitepackages() if hasattr(site, "getsitepackages") else []


def _user() -> str:
    # The user's id may have no name in a container.
    return os.environ.get("USER") or os.environ.get("LOGNAME") or Path(os.path.expanduser("~")).name
