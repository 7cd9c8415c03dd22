"""The build steps that pyproject.toml cannot express; everything declarative is there.

``SM120_WHEEL=cuda`` makes a wheel with compiled kernels (``make wheel-cuda``). Without it nothing is compiled and the
wheel fits every platform: it carries the CUDA sources, and the kernels are compiled where they run.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build backend does not put the project on the path

from sglang_sm120.build import spec  # noqa: E402
from sglang_sm120.build.compiler import compile_library  # noqa: E402
from sglang_sm120.build.portability import require_portable, wheel_tag  # noqa: E402
from sglang_sm120.build.toolchain import find_toolchain  # noqa: E402
from sglang_sm120.errors import UnsupportedError  # noqa: E402

BOOT_PTH = "sglang_sm120_boot.pth"
PACKAGE = "sglang_sm120"
LIBRARY = f"{PACKAGE}/prebuilt/libsm120_kernels.so"


def with_kernels() -> bool:
    """Whether this is a build of the wheel with compiled kernels."""
    wanted = os.environ.get("SM120_WHEEL", "")
    if wanted not in {"", "cuda"}:
        raise SystemExit(f"SM120_WHEEL={wanted!r} cannot be used: write cuda or leave it unset.")
    return wanted == "cuda"


def build_requirements() -> list[str]:
    """What has to be installed to compile: the binding, and a compiler if this machine has none."""
    if not with_kernels():
        return []
    try:
        find_toolchain()
    except UnsupportedError:
        return [spec.TVM_FFI_OF_WHEEL, *spec.CUDA_WHEELS]
    return [spec.TVM_FFI_OF_WHEEL]


class Step(Command):
    """A sub-command of ``build``, which runs for regular and editable wheels alike."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        if self.editable_mode:
            # build_lib is thrown away then; the install commands write to the root of the editable wheel.
            self.set_undefined_options("install", ("install_lib", "build_lib"))
        else:
            self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    @property
    def target(self) -> Path:
        return Path(str(self.build_lib))

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildBootPth(Step):
    """Puts the boot file into the root of the wheel, where site-packages picks it up.

    Setuptools has no setting for it: package data lies inside a package and ``data_files`` outside site-packages.
    """

    description = "copy the .pth file that arms the package at interpreter start"

    def run(self) -> None:
        self.mkpath(str(self.target))
        self.copy_file(BOOT_PTH, self.get_outputs()[0])

    def get_outputs(self) -> list[str]:
        return [str(self.target / BOOT_PTH)]

    def get_source_files(self) -> list[str]:
        return [BOOT_PTH]


class CopyFolder(Step):
    """Puts a folder of the checkout into the package. An editable installation uses it where it lies."""

    folder: ClassVar[str]

    def run(self) -> None:
        if self.editable_mode:
            return
        # Whatever an earlier build left: a file that was removed from the folder must not live on in the wheel.
        shutil.rmtree(self.target / PACKAGE / self.folder, ignore_errors=True)
        for source, copy in zip(self.sources(), self.copies(), strict=True):
            self.mkpath(str(copy.parent))
            self.copy_file(str(source), str(copy))

    def sources(self) -> list[Path]:
        raise NotImplementedError

    def copies(self) -> list[Path]:
        return [self.target / PACKAGE / source.relative_to(ROOT) for source in self.sources()]

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode else [str(path) for path in self.copies()]

    def get_source_files(self) -> list[str]:
        return [str(source.relative_to(ROOT)) for source in self.sources()]


class BuildKernels(CopyFolder):
    """Puts the CUDA sources into the package, and the compiled library if this wheel is to have one."""

    description = "copy the CUDA sources into the package and compile them if asked to"
    folder = "csrc"

    def run(self) -> None:
        super().run()
        if with_kernels() and not self.editable_mode:
            try:
                self.compile()
            except UnsupportedError as error:
                raise SystemExit(f"No wheel with compiled kernels: {error}") from error

    def compile(self) -> None:
        library = self.target / LIBRARY
        self.mkpath(str(library.parent))
        toolchain = find_toolchain()
        self.announce(f"compiling {library.name} with {toolchain.nvcc}, CUDA {toolchain.text}", level=2)
        # The copies: what is installed must compile without the rest of the checkout.
        compile_library(self.target / PACKAGE / self.folder, spec.WHEEL_TARGETS, toolchain, library)
        require_portable(library)

    def sources(self) -> list[Path]:
        return spec.files(ROOT / self.folder)

    def get_outputs(self) -> list[str]:
        library = self.target / LIBRARY
        compiled = [str(library), str(library.with_suffix(".json"))]
        return super().get_outputs() + (compiled if with_kernels() and not self.editable_mode else [])


class BuildPatches(CopyFolder):
    """Puts the patches for upstream projects into the package."""

    description = "copy the patches for upstream projects into the package"
    folder = "patches"

    def sources(self) -> list[Path]:
        folder = ROOT / self.folder
        return [*sorted(folder.glob("*/*/*.patch")), folder / "pristine.json"]


class Build(build):
    """The standard build plus the boot file, the kernels and the patches."""

    sub_commands = [
        *build.sub_commands,
        ("build_boot_pth", None),
        ("build_kernels", None),
        ("build_patches", None),
    ]


class BdistWheel(bdist_wheel):
    """A wheel with compiled kernels fits one platform and every Python: the library uses nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        if not with_kernels():
            return super().get_tag()
        return "py3", "none", wheel_tag()


class Sm120Distribution(Distribution):
    """Tells setuptools that compiled kernels go where platform-specific packages go."""

    def has_ext_modules(self) -> bool:
        return with_kernels()


setup(
    distclass=Sm120Distribution,
    cmdclass={
        "bdist_wheel": BdistWheel,
        "build": Build,
        "build_boot_pth": BuildBootPth,
        "build_kernels": BuildKernels,
        "build_patches": BuildPatches,
    },
    setup_requires=build_requirements(),
)
