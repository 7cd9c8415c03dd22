"""The build steps that pyproject.toml cannot express; everything declarative is there."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build import build

BOOT_PTH = "sglang_sm120_boot.pth"


class BuildBootPth(Command):
    """Puts the boot file into the root of the wheel, where site-packages picks it up.

    Setuptools has no setting for it: package data lies inside a package and ``data_files`` outside
    site-packages. Written as a sub-command of ``build``, the step runs for regular and editable wheels.
    """

    description = "copy the .pth file that arms the package at interpreter start"
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

    def run(self) -> None:
        self.mkpath(str(self.build_lib))
        self.copy_file(BOOT_PTH, self.get_outputs()[0])

    def get_outputs(self) -> list[str]:
        return [str(Path(str(self.build_lib), BOOT_PTH))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [BOOT_PTH]


class Build(build):
    """The standard build plus the boot file."""

    sub_commands = [*build.sub_commands, ("build_boot_pth", None)]


setup(cmdclass={"build": Build, "build_boot_pth": BuildBootPth})
