"""Entry point of SGLang's plugin group ``sglang.srt.plugins`` (0.5.11 and later)."""

from __future__ import annotations

import os


def register() -> None:
    """Install the hooks, unless the user switched the package off."""
    if os.environ.get("SGLANG_SM120_DISABLE") == "1":
        return
    from sglang_sm120.host.installer import install

    install()
