"""Patches for upstream projects: read them, apply them to an SGLang on disk, take them back.

Nothing here runs in a server. The hooks that work in memory are in ``sglang_sm120.host``.
"""
