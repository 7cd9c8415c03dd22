"""Makes the scheduler of a server a witness: it writes down which FP4 GEMM backend SGLang's own start resolved, from
which file, prints each hunk that it runs with, and goes on. Python imports this from PYTHONPATH at the start of every
process.

SM120_PATCHED_EVIDENCE     the file to write
SM120_PATCHED_FLASHINFER   the one backend of FlashInfer's that ``mm_fp4`` has on this machine without a GPU
"""

import json
import os

from cpu_host.runtime import after_import


def _watch(scheduler):
    resolve = scheduler.initialize_fp4_gemm_config

    def initialize_fp4_gemm_config(*arguments):
        import sys

        from sglang.srt.layers.quantization import fp4_utils

        from tests.patches import evidence

        resolve(*arguments)
        chosen = fp4_utils.get_fp4_gemm_runner_backend()
        # SGLang calls the entry point of an installed package also when that is switched off.
        installer = sys.modules.get("sglang_sm120.host.installer")
        facts = {
            "process": os.getpid(),
            "patched": evidence.found(),
            "resolved": chosen.value,
            "flashinfer_name": chosen.get_flashinfer_backend(),
            "values": [member.value for member in type(chosen)],
            "hooks": sorted({s.state for s in installer.verify()} if installer else []),
        }
        for hunk in facts["patched"]:
            print(f"patched: {hunk['module']} {hunk['file']} {hunk['hunk']}", flush=True)
        draft = os.environ["SM120_PATCHED_EVIDENCE"] + ".draft"
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(facts, file)
        os.replace(draft, os.environ["SM120_PATCHED_EVIDENCE"])

    scheduler.initialize_fp4_gemm_config = initialize_fp4_gemm_config


if os.environ.get("SM120_PATCHED_EVIDENCE"):
    from tests.patches import served

    served.arm(os.environ["SM120_PATCHED_FLASHINFER"])
    after_import.after("sglang.srt.managers.scheduler", _watch)
