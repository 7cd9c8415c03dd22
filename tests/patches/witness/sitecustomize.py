"""Makes the scheduler of a server a witness: it writes down which FP4 GEMM backend SGLang's own start resolved, from
which file, and stops before weights load. Python imports this from PYTHONPATH at the start of every process.

SM120_PATCHED_EVIDENCE   the file to write
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
            "hooks": sorted({s.state for s in installer.verify()} if installer else []),
        }
        draft = os.environ["SM120_PATCHED_EVIDENCE"] + ".draft"
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(facts, file)
        os.replace(draft, os.environ["SM120_PATCHED_EVIDENCE"])
        os._exit(0)

    scheduler.initialize_fp4_gemm_config = initialize_fp4_gemm_config


if os.environ.get("SM120_PATCHED_EVIDENCE"):
    after_import.after("sglang.srt.managers.scheduler", _watch)
