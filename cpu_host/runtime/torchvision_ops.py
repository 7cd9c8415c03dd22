"""Lets the torchvision of the package index import beside the CPU build of torch. For every release.

Its compiled part is linked against CUDA and cannot load there. Its Python part then registers fake versions of
``torchvision::nms`` and ``qnms`` and insists that somebody defined them, so we define the two schemas.
SGLang imports torchvision for image models only; nothing here ever calls it.
"""

from __future__ import annotations

from cpu_host.runtime import after_import

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[object] = []  # a torch Library takes its definitions back when it is collected


def arm() -> None:
    after_import.before("torchvision", _define)


def _define() -> None:
    import torch

    if torch.version.cuda is not None:
        return  # the compiled part loads there and defines them itself
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    _kept.append(library)
