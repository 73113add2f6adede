"""Builds the wheel: as pyproject.toml says, with the C++ kernels compiled for common processors of this machine's kind.

Without a C++ compiler the wheel has no compiled kernels; they are then compiled where it is used, if that machine has
a compiler. MILLRACE_PREBUILT=0 leaves them out on purpose.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).parent / "millrace" / "ops" / "cpp"
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-pthread", "-Wno-psabi", "-fno-math-errno", "-ffp-contract=off")
"""As `native.py` has them, without the processor."""
LINK = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc")
"""The wheel must not depend on the version of the compiler's libraries."""


def compiler() -> str | None:
    if os.environ.get("MILLRACE_PREBUILT") == "0":
        return None
    return next((found for found in map(shutil.which, ("g++", "c++", "clang++")) if found), None)


def targets() -> list[Any]:
    known = runpy.run_path(str(SOURCES / "targets.py"), run_name="targets")["TARGETS"]
    return [target for target in known if target.machine == platform.machine()]


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        found = compiler()
        if found is not None and not self.editable_mode:
            self.compile_kernels(found)

    def compile_kernels(self, found: str) -> None:
        folder = Path(self.build_lib) / "millrace" / "ops" / "cpp" / "prebuilt"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
            for target in targets():
                compile_one = partial(_object, found, target, scratch)
                objects = list(pool.map(compile_one, SOURCES.rglob("*.cpp")))
                subprocess.run([found, *LINK, *objects, "-o", str(folder / target.path.name)], check=True)


def _object(found: str, target: Any, scratch: str, source: Path) -> str:
    path = os.path.join(scratch, f"{target.name}-{'-'.join(source.relative_to(SOURCES).with_suffix('.o').parts)}")
    subprocess.run([found, *FLAGS, *target.flags, "-I", str(SOURCES), "-c", str(source), "-o", path], check=True)
    return path


class PlatformWheel(bdist_wheel):
    """A wheel with compiled kernels is for one kind of machine, but for any version of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = compiler() is None

    def get_tag(self) -> tuple[str, str, str]:
        _, _, plat = super().get_tag()
        return "py3", "none", plat


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
