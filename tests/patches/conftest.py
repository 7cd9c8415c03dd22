"""A made-up project with two releases and a series of two patches, and the real catalogue."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from sglang_sm120.upstream.catalog import Catalog, load_catalog
from sglang_sm120.upstream.target import Target, find_target

#: The files of the made-up SGLang 9.1; 9.2 has another ``engine.py``, which no patch knows.
FILES = {
    "srt/__init__.py": "",
    "srt/engine.py": "import os\n\n\ndef start():\n    return 1\n",
    "srt/values.py": 'VALUES = [\n    "auto",\n    "cutlass",\n]\n',
    "srt/other.py": "OTHER = True\n",
    "_version.py": "__version__ = version = '9.1'\n",
}
HEADER = "Why: because.\n\nChecked: here.\n\nUpstream: none.\n\nRemove-when: never."


def patch_text(subject: str, body: str, header: str = HEADER) -> str:
    """A git-format patch with this diff."""
    return (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: a <a@example.invalid>\nSubject: [PATCH] {subject}\n\n"
        f"{header}\n---\n{body}-- \n1.0\n"
    )


VALUES_PATCH = patch_text(
    "Add b12x",
    """\
diff --git a/python/sglang/srt/values.py b/python/sglang/srt/values.py
--- a/python/sglang/srt/values.py
+++ b/python/sglang/srt/values.py
@@ -3,1 +3,2 @@
+    "b12x",
     "cutlass",
diff --git a/python/sglang/srt/added/deep/new.py b/python/sglang/srt/added/deep/new.py
new file mode 100644
--- /dev/null
+++ b/python/sglang/srt/added/deep/new.py
@@ -0,0 +1,1 @@
+NEW = True
diff --git a/test/unit/test_values.py b/test/unit/test_values.py
new file mode 100644
--- /dev/null
+++ b/test/unit/test_values.py
@@ -0,0 +1,1 @@
+TEST = True
""",
)
ENGINE_PATCH = patch_text(
    "Return two",
    """\
diff --git a/python/sglang/srt/engine.py b/python/sglang/srt/engine.py
--- a/python/sglang/srt/engine.py
+++ b/python/sglang/srt/engine.py
@@ -5,1 +5,1 @@
-    return 1
+    return 2
diff --git a/python/sglang/srt/values.py b/python/sglang/srt/values.py
--- a/python/sglang/srt/values.py
+++ b/python/sglang/srt/values.py
@@ -3,1 +3,2 @@
+    "two",
     "b12x",
""",
)


def make_catalog(root: Path, patches: dict[str, str] | None = None) -> Catalog:
    """Write the made-up catalogue below ``root``."""
    texts = patches or {"0001-values.patch": VALUES_PATCH, "0002-engine.patch": ENGINE_PATCH}
    folder = root / "sglang" / "9.1-9.2"
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    touched = ("srt/engine.py", "srt/values.py")
    published = {f"python/sglang/{path}": hashlib.sha256(FILES[path].encode()).hexdigest() for path in touched}
    table = {"9.1": published, "9.2": {**published, "python/sglang/srt/engine.py": "0" * 64}}
    (root / "pristine.json").write_text(json.dumps(table))
    return load_catalog(root)


def make_package(folder: Path) -> Path:
    """Write the made-up SGLang 9.1 as ``folder/sglang``."""
    for path, text in FILES.items():
        file = folder / "sglang" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "sglang"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return make_catalog(tmp_path / "patches")


@pytest.fixture
def installed(tmp_path: Path) -> Target:
    """The made-up SGLang as a package in ``site-packages``."""
    return find_target(make_package(tmp_path / "site-packages"))


@pytest.fixture
def tree(tmp_path: Path) -> Target:
    """The made-up SGLang as a source tree."""
    make_package(tmp_path / "repository" / "python")
    (tmp_path / "repository" / "python" / "pyproject.toml").write_text("")
    return find_target(tmp_path / "repository")


@pytest.fixture(scope="session")
def real() -> Catalog:
    return load_catalog()
