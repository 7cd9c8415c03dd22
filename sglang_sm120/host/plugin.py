"""Entry point of SGLang's plugin group ``sglang.srt.plugins`` (0.5.11 and later)."""

from sglang_sm120.host.installer import install as register

__all__ = ["register"]
