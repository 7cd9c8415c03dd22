#!/usr/bin/env python3
"""Write what is derived from the patches: their register and the table of published files.

python tools/patch_register.py                    patches/README.md, from the patches' headers
python tools/patch_register.py --pristine FOLDER   also patches/pristine.json; FOLDER has one unpacked wheel of
                                                   SGLang for each release, in sglang-VERSION[-anything]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sglang_sm120.upstream.catalog import APPLICABLE, Catalog, combined, load_catalog  # noqa: E402
from sglang_sm120.upstream.target import Target, sha256  # noqa: E402
from tools.envs import RELEASES  # noqa: E402

PATCHES = ROOT / "patches"

_INTRODUCTION = """\
# Patches for upstream projects

Written by `python tools/patch_register.py` from the headers of the patches; do not edit.

git-format patches, each small enough to be reviewed alone, with its test. None is needed to use this package: it
hooks the published releases. They are what we would like upstream to take instead of a hook, and a way out for
people who cannot install a plugin.

A folder is named after the SGLang releases that its patches are for: one, or the first and the last of a range in
which the touched lines are the same (sgl-kernel: after the commit of sgl-project/sglang). The series of a release is
every patch whose folder covers it, in the order of the numbers.
`sglang-sm120 patches list | show | apply --check | apply | revert` puts the series of the SGLang on disk in place and
takes it back; in a source tree `git am` does as well. Both add the tests there. The way of each patch into upstream:
[docs/upstreaming.md](../docs/upstreaming.md).

Nothing in these patches has run on an SM12x GPU.
"""


def register(catalog: Catalog) -> str:
    """The text of ``patches/README.md``."""
    parts = [_INTRODUCTION]
    for number, name in dict.fromkeys((p.number, p.name.split("/")[2]) for p in catalog.patches):
        same = [p for p in catalog.patches if p.name.split("/")[2] == name]
        parts.append(f"## {same[0].project} {number:04d}: {same[0].subject}\n")
        for patch in same:
            parts.append(f"- [{patch.releases}](<{patch.name}>): {', '.join(catalog.releases_of(patch))}")
        parts.append("")
        for key in same[0].header:
            for text in dict.fromkeys(p.header[key] for p in same):
                which = [p.releases for p in same if p.header[key] == text]
                where = "" if len(which) == len(same) else f" ({', '.join(which)})"
                parts.append(f"**{key}**{where}: {text}\n")
    return "\n".join(parts)


def pristine(catalog: Catalog, folder: Path) -> dict[str, dict[str, str]]:
    """For each release the SHA-256 of the published files that its series changes."""
    known = Catalog(catalog.root, {release: {} for release in RELEASES})
    table: dict[str, dict[str, str]] = {}
    for release in RELEASES:
        target = Target(published(folder, release), None)
        series = [p for p in known.series(release) if p.project == APPLICABLE]
        changed = {path: target.locate(path) for path, c in combined(series).items() if not c[0].creates}
        table[release] = {path: digest for path, place in changed.items() if place and (digest := sha256(place))}
    return table


def published(folder: Path, release: str) -> Path:
    """The unpacked package of ``release`` below ``folder``."""
    for candidate in sorted(folder.glob(f"sglang-{release}*")):
        if (candidate / f"sglang-{release}.dist-info").is_dir() and (candidate / ".complete").is_file():
            return candidate / "sglang"
    raise SystemExit(f"no unpacked sglang {release} in {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write what is derived from the patches.")
    parser.add_argument("--pristine", type=Path, help="folder with the unpacked wheels")
    folder = parser.parse_args().pristine
    if folder is not None:
        table = pristine(Catalog(PATCHES, {}), folder)
        (PATCHES / "pristine.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    (PATCHES / "README.md").write_text(register(load_catalog(PATCHES)), encoding="utf-8")


if __name__ == "__main__":
    main()
