"""Checks of what is installed: versions, the compiled kernels, the hook that patches Accelerate and Transformers."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys

import torch

from megatrain_accelerate import __version__
from megatrain_accelerate.activation import ENV_DISABLE, is_disabled
from megatrain_accelerate.doctor.finding import Finding, Value
from megatrain_accelerate.errors import KernelError, PatchError
from megatrain_accelerate.integrations import import_hook
from megatrain_accelerate.integrations.patches import PATCHES, TESTED_VERSIONS
from megatrain_accelerate.optim.kernel import HostKernels

_AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_REINSTALL = "pip install --force-reinstall --no-deps megatrain-accelerate, or `pip install --no-deps .` in a checkout"


def versions() -> list[Finding]:
    """What is installed, and whether the patches were tested with it."""
    installed: dict[str, Value] = {"megatrain_accelerate": __version__, "python": platform.python_version()}
    installed |= {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver_version()}
    for package in TESTED_VERSIONS:
        installed[package] = _version(package)
    text = ", ".join(f"{name} {version}" for name, version in installed.items() if version is not None)
    findings = [Finding("versions", "ok", text, values=installed)]
    for package, tested in TESTED_VERSIONS.items():
        version = installed[package]
        if isinstance(version, str) and not _is_tested(version, tested):
            findings.append(
                Finding(
                    f"{package} {version}",
                    "note",
                    f"the patches were tested with {tested}",
                    f"pip install '{package}=={tested.split()[-1]}' if something is wrong",
                )
            )
    return findings


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_tested(version: str, tested: str) -> bool:
    """Whether a version lies within ``FIRST to LAST``, or is the only one."""
    first, _, last = tested.partition(" to ")
    return _numbers(first) <= _numbers(version) <= _numbers(last or first)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)


def driver_version() -> str | None:
    """The GPU driver's, as ``nvidia-smi`` says it; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.splitlines()[0].strip() if output.strip() else None


def hooks() -> list[Finding]:
    """Whether ``import torch`` installs our hook, and whether every patch fits what is installed."""
    names = [entry.name for entry in importlib.metadata.entry_points(group="torch.backends")]
    failure = getattr(sys.modules.get("_megatrain_autoload"), "failure", None)
    if is_disabled():
        text = f"{ENV_DISABLE} is set: the plugin is off, whatever a script asks for"
        return [Finding("hooks", "broken", text, f"unset {ENV_DISABLE}", {"hooks": False})]
    if os.environ.get(_AUTOLOAD_SWITCH) == "0":
        text = f"{_AUTOLOAD_SWITCH}=0 keeps torch from loading the plugin: accelerate launch doesn't know --megatrain"
        remedy = f"unset {_AUTOLOAD_SWITCH}, or call megatrain_accelerate.enable() in the script"
        return [Finding("hooks", "note", text, remedy, {"hooks": False})]
    if "megatrain_accelerate" not in names:
        text = "the package isn't installed, only importable: `import torch` doesn't load the plugin"
        return [Finding("hooks", "broken", text, _REINSTALL, {"hooks": False})]
    if failure is not None or not import_hook.is_installed():
        text = f"the plugin can't be loaded with torch ({type(failure).__name__}: {failure})"
        return [Finding("hooks", "broken", text, _REINSTALL, {"hooks": False})]
    packages = sorted({patch.package for patch in PATCHES if importlib.util.find_spec(patch.package) is not None})
    patched = [patch for patch in PATCHES if patch.package in packages]
    for module in dict.fromkeys(patch.module for patch in patched):
        importlib.import_module(module)
    try:
        import_hook.ensure_ready()
    except PatchError as error:
        return [Finding("hooks", "broken", str(error), "install a tested version, see above", {"hooks": False})]
    text = f"installed; all {len(patched)} patches of {', '.join(packages)} fit"
    return [Finding("hooks", "ok", text, values={"hooks": True, "patches": len(patched)})]


def kernels() -> list[Finding]:
    """Whether the compiled host kernels are there, and in which instruction set they run."""
    try:
        found = HostKernels()
    except KernelError as error:
        return [Finding("host kernels", "broken", str(error), _REINSTALL)]
    threads, chosen = found.threads, found.instruction_set
    found.close()
    values: dict[str, Value] = {"instruction_set": chosen, "host_threads": threads}
    text = f"{chosen}, {threads} threads"
    if chosen == "baseline":
        remedy = "take a processor with AVX2; a virtual machine may hide it (CPU type host)"
        return [Finding("host kernels", "slow", f"{text}: without AVX2 AdamW takes several times as long", remedy, values)]
    return [Finding("host kernels", "ok", text, values=values)]


def compilers() -> list[Finding]:
    """Whether layers can be compiled and stepped on the GPU."""
    has_triton = importlib.util.find_spec("triton") is not None
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    values: dict[str, Value] = {"triton": has_triton, "compiler": compiler}
    if not torch.cuda.is_available():
        return [Finding("layer compiler", "ok", "not needed without a GPU", values=values)]
    if not has_triton:
        text = "Triton is missing: no states on the GPU, no compiled layers"
        return [Finding("layer compiler", "slow", text, "pip install triton, in the version that torch names", values)]
    if compiler is None:
        text = "no C compiler is found, which Triton needs: layers run uncompiled"
        return [Finding("layer compiler", "slow", text, "install gcc (apt install gcc)", values)]
    return [Finding("layer compiler", "ok", f"Triton, {compiler}", values=values)]
