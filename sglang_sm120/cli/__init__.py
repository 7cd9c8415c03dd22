"""The command ``sglang-sm120``. The only room that prints."""
