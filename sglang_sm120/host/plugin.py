"""Entry point of SGLang's plugin group ``sglang.srt.plugins`` (0.5.11 and later)."""

from __future__ import annotations

from sglang_sm120.errors import Sm120Error
from sglang_sm120.host.installer import install


def register() -> None:
    """Hook this process's SGLang, like :func:`install`.

    Raises:
        SystemExit: also for what :func:`install` says by an exception, because SGLang's plugin loader logs those and
            starts the server without the plugin.
    """
    try:
        install()
    except Sm120Error as error:
        raise SystemExit(str(error)) from error
