"""What a compiled wheel may ask of the machine it is installed on, and the platform tag that promises it."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

from sglang_sm120.errors import UnsupportedError

#: Newest symbol versions on a manylinux_2_34 system (auditwheel's policy file). The static CUDA runtime sets the floor:
#: it uses the functions that glibc 2.34 moved out of libpthread and libdl.
NEWEST_SYMBOLS = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}
#: Shared libraries that are there: the C and C++ run time of every such system, and apache-tvm-ffi's own.
PRESENT_LIBRARIES = re.compile(
    r"lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux-[\w-]+\.so\.\d|libstdc\+\+\.so\.6|libgcc_s\.so\.1|libtvm_ffi\.so"
)


def wheel_tag() -> str:
    """Return the platform tag of a wheel with a library that :func:`require_portable` admits."""
    return "manylinux_{}_{}_{}".format(*NEWEST_SYMBOLS["GLIBC"], platform.machine())


def require_portable(library: Path) -> None:
    """Check that a library needs nothing but what :func:`wheel_tag` promises.

    Raises:
        UnsupportedError: it needs a newer symbol or another shared library; the message names them.
        OSError: ``readelf`` of binutils is missing.
        subprocess.CalledProcessError: the file is not a shared library.
    """
    command = ["readelf", "--wide", "--dynamic", "--version-info", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    missing = {name for name in re.findall(r"\(NEEDED\).*\[(.+)\]", text) if not PRESENT_LIBRARIES.fullmatch(name)}
    for family, number in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", text):
        if tuple(map(int, number.split("."))) > NEWEST_SYMBOLS[family]:
            missing.add(f"{family}_{number}")
    if missing:
        raise UnsupportedError(
            f"{library.name} needs {', '.join(sorted(missing))}, which {wheel_tag()} does not promise: "
            "build the wheel on a system with an older C++ compiler and glibc."
        )
