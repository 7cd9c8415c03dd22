"""Run with a patched SGLang first on the path and this package installed: what both together make of the values.

Prints one JSON object. The boot hook of the package has installed itself when SGLang is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def main(release: str) -> dict[str, Any]:
    import sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4
    import sglang.srt.layers.quantization.modelopt_quant  # noqa: F401
    from packaging.version import Version
    from sglang.srt.layers.quantization.fp4_utils import Fp4GemmRunnerBackend
    from sglang.srt.server_args import ServerArgs

    from sglang_sm120.host.installer import probe, verify
    from sglang_sm120.host.source_probe import ModuleSource, enum_values, package_root

    root = package_root()
    assert root is not None
    source = ModuleSource.load(root, "sglang.srt.layers.quantization.fp4_utils")
    assert source is not None
    cls = source.klass("Fp4GemmRunnerBackend")
    assert cls is not None
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {
        "root": str(root),
        "problems": probe(root, Version(release)),
        "states": {s.name: s.state for s in verify()},
        "native": list(enum_values(cls).values()),
        "members": {m.value: m.get_flashinfer_backend() for m in Fp4GemmRunnerBackend},
        "tuned": [m.value for m in Fp4GemmRunnerBackend if m.is_flashinfer_cutlass()],
        "choices": list(parser._option_string_actions["--fp4-gemm-backend"].choices or ()),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
