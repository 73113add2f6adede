"""Builds the wheel: as pyproject.toml says, with the C++ kernels compiled for common processors of one kind of machine.

That is this machine's kind, or that of `--plat-name` with a cross-compiler: on Debian, with g++-aarch64-linux-gnu,
`pip wheel . --no-deps -C--build-option=--plat-name=linux_aarch64` builds the wheel for ARM.
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


def machine_of(plat_name: str) -> str:
    """The kind of machine that the wheel is for, as `platform.machine` names it."""
    return next((known for known in ("x86_64", "aarch64") if plat_name.endswith(known)), platform.machine())


def compiler(machine: str) -> str | None:
    if os.environ.get("MILLRACE_PREBUILT") == "0":
        return None
    is_own = machine == platform.machine()
    names = ("g++", "c++", "clang++") if is_own else (f"{machine}-linux-gnu-g++",)
    found = next((found for found in map(shutil.which, names) if found), None)
    if found is None and not is_own:
        raise SystemExit(f"A wheel for {machine} needs the cross-compiler {names[0]}, or MILLRACE_PREBUILT=0.")
    return found


def targets(machine: str) -> list[Any]:
    known = runpy.run_path(str(SOURCES / "targets.py"), run_name="targets")["TARGETS"]
    return [target for target in known if target.machine == machine]


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        machine = machine_of(self.get_finalized_command("bdist_wheel").plat_name)
        found = compiler(machine)
        if found is not None:
            self.compile_kernels(found, machine)

    def compile_kernels(self, found: str, machine: str) -> None:
        folder = Path(self.build_lib) / "millrace" / "ops" / "cpp" / "prebuilt"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
            for target in targets(machine):
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
        self.root_is_pure = compiler(machine_of(self.plat_name)) is None

    def get_tag(self) -> tuple[str, str, str]:
        _, _, plat = super().get_tag()
        return "py3", "none", plat


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
