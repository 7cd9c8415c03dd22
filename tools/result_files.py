"""Result files: what ran, on which commit, card and versions.

``docs/results.md`` is generated from those in ``results/``. A result file is JSON. It holds no name of a machine, and
no path but those inside the repository.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sglang_sm120.device import collect_facts
from sglang_sm120.records import Identity, identity_of
from sglang_sm120.redact import redacted

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results"
SCHEMA = 1
#: For a copy of the repository without its history, such as one sent to a rented machine.
COMMIT_VARIABLE = "SM120_COMMIT"


def this_machine() -> Identity:
    """The card and the versions of this machine. Initialises CUDA."""
    return identity_of(collect_facts())


def commit() -> str:
    """The commit of the working tree, ending in ``-dirty`` if tracked files differ; ``unknown`` without a history."""
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    head = _git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def without_folders(arguments: Sequence[str]) -> str:
    """A command line whose absolute paths have lost their folders."""
    return " ".join(re.sub(r"(?<![\w.:/])/(?!/)(?:[^\s/=]+/)*", "", argument) for argument in arguments)


def header(kind: str, command: str, identity: Identity) -> dict[str, Any]:
    """The first fields of every result file."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": command,
        **identity.to_json(),
    }


def write(target: Path, record: Mapping[str, Any], variant: str = "") -> Path:
    """Write a record to a ``.json`` file, or into a folder under a name made of its kind, its variant and its card.

    Reasons of what failed quote logs of the machine, so every text is redacted.
    """
    if target.suffix != ".json":
        name = f"{record['kind']} {variant} {record['card']}".lower()
        target = target / (re.sub(r"[^a-z0-9]+", "_", name).strip("_") + ".json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(redacted(dict(record)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return target


def read_all(kind: str, folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    """Yield the records of a kind, in the order of their file names.

    Raises:
        ValueError: a file there is no result file of this format.
    """
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("schema") != SCHEMA or "kind" not in record:
            raise ValueError(f"{path.name} is no result file of format {SCHEMA}: remove it, or write it anew")
        if record["kind"] == kind:
            yield record
