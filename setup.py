"""Builds the host kernels; everything else about the project is in pyproject.toml.

The library has no Python in it: it is plain C++ that ``megatrain_accelerate/kernels/host.py`` opens with ctypes, so one
build serves every Python version. setuptools' ``Extension`` is used because it finds the compiler and works for
``pip install .`` and ``pip install -e .`` alike.
"""

from __future__ import annotations

import os
import shutil
import sys

from setuptools import Extension, setup
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
        command = getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so
        if shutil.which(command[0]) is None:
            raise PlatformError(
                f"megatrain-accelerate needs a C++17 compiler to build its host kernels and {command[0]!r} was not "
                "found: install one (`apt-get install g++`, `dnf install gcc-c++` or `conda install cxx-compiler`) "
                "or name yours in the environment variable CXX"
            )
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "megatrain_accelerate.kernels._host_kernels",
            sources=[f"{CSRC}/kernels.cpp"],
            depends=[f"{CSRC}/{name}.h" for name in HEADERS],
            extra_compile_args=COMPILE_FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildHostKernels},
)
