"""Everything that is put into SGLang's processes on a machine without a GPU, armed by ``sitecustomize``.

Nothing is imported here that the process would not import anyway: each part waits for the module it concerns.

``SM120_CPU_HOST_EVIDENCE`` is a folder: the process that runs the model writes there what it counted.
``SM120_CPU_HOST_MUTATION`` plants one named mistake into the backend (negative controls of the tests).
``SM120_CPU_HOST_STANDINS=0`` leaves the stand-ins out (a machine with a GPU and the real packages).
"""

from __future__ import annotations

import os

EVIDENCE_VARIABLE = "SM120_CPU_HOST_EVIDENCE"
MUTATION_VARIABLE = "SM120_CPU_HOST_MUTATION"
STANDINS_VARIABLE = "SM120_CPU_HOST_STANDINS"


def arm() -> None:
    """Put the import hooks in place; costs well under a millisecond and imports nothing heavy."""
    if os.environ.get(STANDINS_VARIABLE) != "0":
        from cpu_host_runtime import sglang_patches, standins, torchvision_ops

        standins.arm()
        torchvision_ops.arm()
        sglang_patches.arm()
    if os.environ.get(EVIDENCE_VARIABLE) or os.environ.get(MUTATION_VARIABLE):
        from cpu_host_runtime import evidence

        evidence.arm()
