"""Fails unless ``dist/`` holds an sdist with every file of the repository, and wheels that run where no compiler is."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ARCHITECTURES = ("aarch64", "x86_64")
GLIBC = (2, 28)
KERNELS = "megatrain_accelerate/kernels/_host_kernels.so"


def main() -> int:
    """Prints what is wrong; returns the exit status."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    expected = [f"{sdist.name.removesuffix('.tar.gz')}-py3-none-manylinux_2_28_{name}.whl" for name in ARCHITECTURES]
    problems = faults_of_sdist(sdist, files)
    if [wheel.name for wheel in wheels] != expected:
        problems.append(f"dist/ has {[wheel.name for wheel in wheels]}, not {expected}")
    for wheel in wheels:
        problems += faults_of_wheel(wheel, files)
    print(*(problems or [f"dist/ is whole: {sdist.name}, {', '.join(wheel.name for wheel in wheels)}"]), sep="\n")
    return int(bool(problems))


def faults_of_sdist(sdist: Path, files: list[str]) -> list[str]:
    """What the sdist lacks, or has beside the repository's files and its own metadata."""
    with tarfile.open(sdist) as archive:
        found = {member.name.partition("/")[2] for member in archive if not member.isdir()}
    found = {name for name in found if ".egg-info/" not in name} - {"PKG-INFO", "setup.cfg"}
    missing, foreign = sorted(set(files) - found), sorted(found - set(files))
    return [f"{sdist.name} lacks {name}" for name in missing] + [f"{sdist.name} has {name}" for name in foreign]


def faults_of_wheel(wheel: Path, files: list[str]) -> list[str]:
    """What the wheel lacks of the package, and what its library needs that an old system doesn't have."""
    inside = [name for name in files if re.fullmatch(r"(megatrain_accelerate/(?!.*csrc/).*|_megatrain_autoload\.py)", name)]
    with zipfile.ZipFile(wheel) as archive:
        problems = [f"{wheel.name} lacks {name}" for name in {*inside, KERNELS} - set(archive.namelist())]
    shown = " ".join(subprocess.run(["auditwheel", "show", wheel], capture_output=True, text=True).stdout.split())
    platform = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_(\w+)"', shown)
    if platform is None or (int(platform[1]), int(platform[2])) > GLIBC or not wheel.stem.endswith(platform[3]):
        problems.append(f"auditwheel says of {wheel.name}: {shown}")
    if "libstdc++" in shown or "libgcc" in shown:
        problems.append(f"{wheel.name} needs libraries of a compiler: {shown}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
