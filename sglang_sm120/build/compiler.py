"""One run of the CUDA compiler: from ``csrc`` to a shared library with its manifest."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from sglang_sm120 import programs
from sglang_sm120.build import manifest, spec
from sglang_sm120.build.toolchain import Toolchain
from sglang_sm120.errors import UnsupportedError

#: Every target of a wheel takes less than a minute on two cores; beyond this the compiler hangs.
TIME_LIMIT_SECONDS = 900
_SHOWN_LINES = 20
#: nvcc reads options from these; the library is to depend on the sources and flags that its manifest hashes.
_OPTION_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


def compile_library(root: Path, targets: Sequence[spec.Target], toolchain: Toolchain, library: Path) -> None:
    """Compile every translation unit of ``root`` into ``library`` and write its manifest beside it.

    Not atomic: the caller chooses a folder that nobody reads yet. Intermediate files stay in that folder too; in the
    common one nvcc uses names that others can guess.

    Raises:
        UnsupportedError: the compiler failed, with its last lines, or did not end in time.
        OSError: the folder cannot be written to.
    """
    library = library.resolve()  # the compiler runs elsewhere
    ffi = import_module("tvm_ffi.libinfo")
    headers, link = ffi.find_include_path(), Path(ffi.find_libtvm_ffi())
    command = [
        str(toolchain.nvcc), *spec.FLAGS, f"--threads={min(os.cpu_count() or 1, 8)}", *(t.flag for t in targets),
        f"-I{headers}", f"-I{ffi.find_dlpack_include_path()}", f"-Xcompiler=-fmacro-prefix-map={headers}=tvm_ffi",
        *toolchain.folders, f"-L{link.parent}", *(str(unit.relative_to(root)) for unit in spec.units(root)),
        "-ltvm_ffi", "-o", str(library),
    ]  # fmt: skip
    names = ", ".join(f"sm_{target.name}" for target in targets)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        environ = {name: value for name, value in os.environ.items() if name not in _OPTION_VARIABLES}
        environ["TMPDIR"] = scratch
        try:
            # From inside csrc, and with another name for the headers: no path of this machine gets into the library.
            done = programs.run(command, TIME_LIMIT_SECONDS, folder=root, environ=environ, one_stream=True)
        except subprocess.TimeoutExpired as error:
            raise UnsupportedError(
                f"Compiling the kernels for {names} took more than {TIME_LIMIT_SECONDS} s: {toolchain.nvcc} hangs, "
                "or the machine is overloaded."
            ) from error
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-_SHOWN_LINES:])
        raise UnsupportedError(
            f"Compiling the kernels for {names} with {toolchain.nvcc} (CUDA {toolchain.text}) failed, "
            f"exit status {done.returncode}:\n{tail}"
        )
    version = import_module("tvm_ffi").__version__
    manifest.write(library, manifest.describe(library, spec.digest(root), targets, toolchain.version, version))
