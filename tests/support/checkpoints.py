"""Tiny checkpoints and their reference models, each made once per test run."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3ForCausalLM

from cpu_host import checkpoints, hf_reference
from cpu_host.checkpoints import Spec


class Checkpoints:
    """Makes checkpoints on demand below one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[Spec, Path] = {}
        self._models: dict[Path, Qwen3ForCausalLM] = {}

    def folder(self, spec: Spec) -> Path:
        if spec not in self._folders:
            self._folders[spec] = checkpoints.make(self._root / f"{len(self._folders)}-{spec.format}", spec)
        return self._folders[spec]

    def reference(self, folder: Path) -> Qwen3ForCausalLM:
        """The independent model of a checkpoint folder."""
        if folder not in self._models:
            self._models[folder] = hf_reference.load(folder)
        return self._models[folder]

    def adapter(self, spec: Spec) -> Path:
        return checkpoints.make_adapter(self._root / f"adapter-{spec.format}-{spec.odd}", spec)
