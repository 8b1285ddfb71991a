"""Builds the host kernels; everything else about the project is in pyproject.toml.

The library has no Python in it: it is plain C++ that ``megatrain_accelerate/kernels/host.py`` opens with ctypes, so one
build serves every Python version. setuptools' ``Extension`` is used because it finds the compiler and works for
``pip install .`` and ``pip install -e .`` alike.

With ``MEGATRAIN_WHEEL`` in the environment (``x86_64`` or ``aarch64``; ``make wheels`` sets it) the wheel is one for other
machines of that architecture: Zig's compiler, from PyPI's ziglang, links against the symbols of an old glibc, and its C++
library statically.
"""

from __future__ import annotations

import os
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

CSRC = "megatrain_accelerate/kernels/csrc"
HEADERS = (
    "adamw",
    "adamw_int8_moments",
    "instruction_sets",
    "split_master",
    "thread_pool",
)

WHEEL = os.environ.get("MEGATRAIN_WHEEL", "")
GLIBC = "2.28"

COMPILE_FLAGS = [
    "-std=c++17",
    "-O3",
    # The same bits for every vector width: nothing is fused into an FMA unless the source says so.
    "-ffp-contract=off",
    # Neither changes a result: sqrtf() needn't set errno, and selects may be vectorised.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
]


class BuildHostKernels(build_ext):
    """``build_ext`` for a library that Python doesn't import."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of a Python version, which a library opened by ctypes doesn't depend on."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compiles and links, after a check that there is something to do it with.

        Raises:
            PlatformError: there is no C++ compiler, or the platform isn't one the kernels are written for.
        """
        if sys.platform == "win32":
            raise PlatformError("megatrain-accelerate builds on Linux and macOS only; use WSL on Windows")
        if WHEEL:
            self._build_for_other_machines(ext)
            return
        command = getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so
        if shutil.which(command[0]) is None:
            raise PlatformError(
                f"megatrain-accelerate needs a C++17 compiler to build its host kernels and {command[0]!r} was not "
                "found: install one (`apt-get install g++`, `dnf install gcc-c++` or `conda install cxx-compiler`) "
                "or name yours in the environment variable CXX"
            )
        super().build_extension(ext)

    def _build_for_other_machines(self, ext: Extension) -> None:
        """Stripped, and nothing of the C++ library is shown to other libraries."""
        library = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(library))
        zig = [sys.executable, "-m", "ziglang", "c++", "-target", f"{WHEEL}-linux-gnu.{GLIBC}"]
        link = ["-fPIC", "-shared", "-s", f"-Wl,--version-script={CSRC}/exports.map"]
        self.spawn([*zig, *ext.extra_compile_args, *link, *ext.sources, "-o", library])


class Wheel(bdist_wheel):
    """``bdist_wheel`` of a package whose library serves every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = f"manylinux_{GLIBC.replace('.', '_')}_{WHEEL}" if WHEEL else super().get_tag()[2]
        return "py3", "none", platform


setup(
    ext_modules=[
        Extension(
            "megatrain_accelerate.kernels._host_kernels",
            sources=[f"{CSRC}/kernels.cpp"],
            depends=[f"{CSRC}/exports.map", *(f"{CSRC}/{name}.h" for name in HEADERS)],
            extra_compile_args=COMPILE_FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildHostKernels, "bdist_wheel": Wheel},
)
