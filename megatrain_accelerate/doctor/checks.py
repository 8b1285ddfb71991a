"""What a check finds, and the checks: of the software and of the machine; then measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from megatrain_accelerate import __version__
from megatrain_accelerate.activation import ENV_DISABLE, is_disabled
from megatrain_accelerate.checkpoint.disk import existing_part
from megatrain_accelerate.config import usable_cpu_count
from megatrain_accelerate.errors import HostMemoryError, KernelError, PatchError
from megatrain_accelerate.integrations import import_hook
from megatrain_accelerate.integrations.patches import PATCHES, TESTED_VERSIONS
from megatrain_accelerate.integrations.wrapping import ensure_ready, installed_version
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.parallel.huge_file import open_huge_file
from megatrain_accelerate.plan.machine import (
    SHARE_IN_A_STEP,
    STEP_ARGUMENTS,
    STEP_BYTES,
    Machine,
    kept_speeds,
    measured_machine,
    seconds_of,
    seconds_of_both,
    speeds_path,
    step_arrays,
)
from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES, available_host_bytes, cgroup_available_bytes
from megatrain_accelerate.store.host_memory import HostMemory
from megatrain_accelerate.units import GB, GIB, MIB

BYTES_A_PARAMETER = 14
"""Of host memory that a trained parameter takes (docs/architecture.md)."""
CHECKPOINT_BYTES_A_PARAMETER = 12
"""Of disk that a checkpoint takes with the optimizer's state: both halves of the masters, and the moments."""
FEW_CORES = 8
SLOW_LINK_BYTES = 20e9
"""A second: PCIe Gen4 on 16 lanes gives 25 and more."""
SLOW_STEP_SHARE = 0.6
"""Of the plain loop on the same arrays: a healthy kernel is near 0.9."""
_SAME_SPEED = 0.75
"""Two measurements whose ratio is between this and its inverse don't contradict each other."""
_COPY_BYTES = 256 * MIB
_MOST_ELEMENTS = 96 * MIB
_AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_REINSTALL = "pip install --force-reinstall --no-deps megatrain-accelerate, or `pip install --no-deps .` in a checkout"

Value = float | int | str | bool | None


@dataclasses.dataclass(frozen=True)
class Finding:
    name: str
    """What was looked at."""
    state: Literal["ok", "note", "slow", "broken"]
    """Fine; worth knowing; makes training slower than it could be; keeps it from running."""
    text: str
    remedy: str = ""
    """What to do; empty where nothing has to be done."""
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    """The numbers for programs; units are in the names."""


def examine(folder: Path, measures: bool) -> Iterator[Finding]:
    """All findings, in the order in which they are shown. To measure takes a few seconds."""
    device: torch.device | None = None
    error: Exception | None = None
    if torch.cuda.is_available():
        try:
            device = torch.device("cuda", torch.cuda.current_device())
        except RuntimeError as found:
            error = found
    yield from found_by("versions", versions)
    yield from found_by("hooks", hooks)
    yield from found_by("host kernels", kernels)
    yield from found_by("GPU", gpu, device, error)
    yield from found_by("layer compiler", compilers)
    yield from found_by("cores", cores)
    yield from found_by("NUMA", numa)
    yield from found_by("host memory", host_memory)
    yield from found_by("several GPUs", several_gpus, torch.cuda.device_count())
    yield from found_by("disk", disk, folder)
    if measures:
        yield from found_by("host speed", host_speeds, device is not None)
        if device is not None:
            yield from found_by("link", link, device)


def found_by(name: str, check: Callable[..., Sequence[Finding]], *args: Any) -> list[Finding]:
    """The findings of a check with its arguments; one that fails is a finding itself, and the others go on."""
    try:
        return list(check(*args))
    except Exception as error:
        text = f"can't be checked: {type(error).__name__}: {error}"
        return [Finding(name, "broken", text, "mend what the message says, and run megatrain doctor again")]


def versions() -> list[Finding]:
    """What is installed, and whether the patches were tested with it."""
    installed: dict[str, Value] = {"megatrain_accelerate": __version__, "python": platform.python_version()}
    installed |= {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": _driver_version()}
    installed |= {package: installed_version(package) for package in TESTED_VERSIONS}
    text = ", ".join(f"{name} {version}" for name, version in installed.items() if version is not None)
    findings = [Finding("versions", "ok", text, values=installed)]
    for package, tested in TESTED_VERSIONS.items():
        version = installed[package]
        if isinstance(version, str) and not _is_tested(version, tested):
            remedy = f"pip install '{package}=={tested.split()[-1]}' if something is wrong"
            findings.append(Finding(f"{package} {version}", "note", f"the patches were tested with {tested}", remedy))
    return findings


def _is_tested(version: str, tested: str) -> bool:
    """Whether a version lies within ``FIRST to LAST``, or is the only one."""

    def numbers(version: str) -> list[int]:
        return [int("".join(filter(str.isdigit, part)) or 0) for part in version.split("+")[0].split(".")[:3]]

    first, _, last = tested.partition(" to ")
    return numbers(first) <= numbers(version) <= numbers(last or first)


def _driver_version() -> str | None:
    """The GPU driver's, as ``nvidia-smi`` says it; None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return found.stdout.splitlines()[0].strip() or None
    return None


def hooks() -> list[Finding]:
    """Whether ``import torch`` installs our hook, and whether every patch fits what is installed."""
    failure = getattr(sys.modules.get("_megatrain_autoload"), "failure", None)
    remedy = _REINSTALL
    if is_disabled():
        text = f"{ENV_DISABLE} is set: the plugin is off, whatever a script asks for"
        remedy = f"unset {ENV_DISABLE}"
    elif os.environ.get(_AUTOLOAD_SWITCH) == "0":
        text = f"{_AUTOLOAD_SWITCH}=0 keeps torch from loading the plugin: accelerate launch doesn't know --megatrain"
        remedy = f"unset {_AUTOLOAD_SWITCH}, or call megatrain_accelerate.enable() in the script"
        return [Finding("hooks", "note", text, remedy, {"hooks": False})]
    elif all(entry.name != "megatrain_accelerate" for entry in importlib.metadata.entry_points(group="torch.backends")):
        text = "the package isn't installed, only importable: `import torch` doesn't load the plugin"
    elif failure is not None or not import_hook.is_installed():
        text = f"the plugin can't be loaded with torch ({type(failure).__name__}: {failure})"
    else:
        packages = sorted({patch.package for patch in PATCHES if importlib.util.find_spec(patch.package) is not None})
        patched = [patch for patch in PATCHES if patch.package in packages]
        for module in dict.fromkeys(patch.module for patch in patched):
            importlib.import_module(module)
        try:
            ensure_ready()
            text = f"installed; all {len(patched)} patches of {', '.join(packages)} fit"
            return [Finding("hooks", "ok", text, values={"hooks": True, "patches": len(patched)})]
        except PatchError as error:
            text, remedy = str(error), "install a tested version, see above"
    return [Finding("hooks", "broken", text, remedy, {"hooks": False})]


def kernels() -> list[Finding]:
    """Whether the compiled host kernels are there, and in which instruction set they run."""
    try:
        with contextlib.closing(HostKernels()) as found:
            threads, chosen = found.threads, found.instruction_set
    except KernelError as error:
        return [Finding("host kernels", "broken", str(error), _REINSTALL)]
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


def cores() -> list[Finding]:
    """How many threads the host's AdamW will have."""
    usable, present = usable_cpu_count(), os.cpu_count() or 1
    values = {"usable_cores": usable, "cores": present}
    text = f"{usable} of {present} may be used"
    if usable >= FEW_CORES:
        return [Finding("cores", "ok", text, values=values)]
    if usable < present:
        remedy = "lift the limit: affinity (taskset, --cpuset-cpus) or the cgroup's quota (docker run --cpus, cpu.max)"
    else:
        remedy = "take a machine with more cores, or larger batches: AdamW on the host then takes a smaller share of the step"
    return [Finding("cores", "slow", f"{text}: few for AdamW on the host, which will bound small batches", remedy, values)]


def host_memory() -> list[Finding]:
    """What the process may take, and how large a model that is."""
    memory = psutil.virtual_memory()
    limit = cgroup_available_bytes()
    available = memory.available if limit is None else min(memory.available, limit)
    parameters = max(0, available - CONSTANT_OVERHEAD_BYTES) / BYTES_A_PARAMETER
    values = {
        "available_gib": available / GIB,
        "total_gib": memory.total / GIB,
        "cgroup_available_gib": None if limit is None else limit / GIB,
        "trainable_parameters": parameters,
    }
    free = f"{available / GIB:.1f} of {memory.total / GIB:.1f} GiB are free"
    text = f"{free}: all of {parameters / 1e9:.1f} G parameters can train"
    if limit is not None and limit < memory.available:
        remedy = "raise the container's limit (docker run --memory, the pod's resources.limits.memory) for larger models"
        return [Finding("host memory", "note", f"{text}; the cgroup sets this limit", remedy, values)]
    return [Finding("host memory", "ok", text, values=values)]


def numa(root: Path = Path("/sys/devices/system/node")) -> list[Finding]:
    """Whether memory may be far from the GPU."""
    nodes = [path for path in root.glob("node[0-9]*/cpulist") if path.read_text().strip()]
    values = {"numa_nodes": len(nodes)}
    if len(nodes) < 2:
        return [Finding("NUMA", "ok", "one memory node", values=values)]
    text = f"{len(nodes)} memory nodes: copies cross the sockets where the process isn't on the GPU's (nvidia-smi topo -m)"
    remedy = "where one node's memory suffices: numactl --cpunodebind=NODE --membind=NODE accelerate launch ..., else without "
    return [Finding("NUMA", "note", text, f"{remedy}--membind", values)]


def several_gpus(count: int, modes: Path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")) -> list[Finding]:
    """Of that many: whether they reach each other's memory, and whether memory that their processes share has huge pages."""
    if count < 2:
        return []
    reach = all(torch.cuda.can_device_access_peer(*pair) for pair in itertools.permutations(range(count), 2))
    link = f"{count} GPUs, which exchange gradients {'directly' if reach else 'through the host, at the speed of their links'}"
    file = open_huge_file()
    if file is not None:
        os.close(file)
    elif not (modes.exists() and re.search(r"\[(always|within_size|advise|force)\]", modes.read_text())):
        remedy = f"echo advise > {modes} on the host, or let processes make user namespaces: the store then lies in huge pages"
        return [Finding("several GPUs", "slow", f"{link}; memory that processes share has pages of 4 KiB", remedy)]
    return [Finding("several GPUs", "ok", f"{link}; memory that processes share has huge pages")]


def disk(folder: Path) -> list[Finding]:
    """Room for checkpoints in a folder, which needn't be there yet."""
    asked, folder = folder, existing_part(folder)
    if not folder.is_dir():
        text = f"no checkpoint can be written to {asked}: {folder} isn't a folder"
        return [Finding("disk", "broken", text, "name a folder by --folder; it needn't be there yet")]
    free = shutil.disk_usage(folder).free
    parameters = free / CHECKPOINT_BYTES_A_PARAMETER
    text = f"{free / GIB:.1f} GiB free in {folder}: a checkpoint of up to {parameters / 1e9:.1f} G parameters"
    values = {"free_disk_gib": free / GIB}
    if free < psutil.virtual_memory().total:
        remedy = "free some, write to another disk (--folder checks it), or save less: --save_only_model, --save_total_limit 1"
        return [Finding("disk", "note", f"{text}, less than this machine can train", remedy, values)]
    return [Finding("disk", "ok", text, values=values)]


def measure_link(device: torch.device) -> tuple[float, float, float]:
    """Bytes a second from registered host memory to the GPU, from it, and the sum of both at once on two streams. Raises
    ``HostMemoryError`` where the driver refuses to register memory."""
    with contextlib.closing(HostMemory(_COPY_BYTES, register=True)) as memory:
        host = memory.tensor(0, (_COPY_BYTES,), torch.uint8).zero_()
        memory.register()
        there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
        h2d = seconds_of(device, lambda: there.copy_(host, non_blocking=True), min)
        d2h = seconds_of(device, lambda: host.copy_(there, non_blocking=True), min)
        both = seconds_of_both(there, host)
    return _COPY_BYTES / h2d, _COPY_BYTES / d2h, sum(_COPY_BYTES / seconds for seconds in both)


def measure_host(kernels: HostKernels, most: int) -> tuple[float, float]:
    """Parameters a second that AdamW steps with all threads, and bytes a second of a plain sum of its fp32 arrays: what the
    memory gives. Of no more elements than an eighth of the free memory holds."""
    elements = max(1 << 20, min(most, available_host_bytes() // (8 * BYTES_A_PARAMETER)))
    hi, residual, moments, gradient = step_arrays(kernels, elements)
    cpu = torch.device("cpu")
    step = seconds_of(cpu, lambda: kernels.adamw(hi, residual, moments, gradient, STEP_ARGUMENTS), min)
    plain_sum = seconds_of(cpu, lambda: kernels.accumulate(*moments), min)
    return elements / step, 3 * moments.exp_avg.nbytes / plain_sum  # two are read, one is written


def link(device: torch.device) -> list[Finding]:
    """The link's speeds, and whether the plan's are still the same. A driver that refuses to register memory is found here."""
    try:
        speeds = measure_link(device)
    except HostMemoryError as error:
        return [Finding("link", "broken", str(error), "ulimit -l unlimited, or docker run --ulimit memlock=-1")]
    with contextlib.closing(HostKernels()) as kernels:
        path = speeds_path(device, kernels)
        machine = measured_machine(device, kernels)
        count = len(kept_speeds(path))
        step, _ = measure_host(kernels, _MOST_ELEMENTS)
    return [link_finding(*speeds), plan_finding(machine, min(speeds[:2]), step, str(path), count)]


def link_finding(*speeds: float) -> Finding:
    """What the speeds mean: to the GPU, from it, and both at once."""
    h2d, d2h, both = (speed / GB for speed in speeds)
    values = {"h2d_gb_per_second": h2d, "d2h_gb_per_second": d2h, "both_gb_per_second": both}
    text = f"to the GPU {h2d:.1f}, from it {d2h:.1f}, both at once {both:.1f} GB/s"
    if min(speeds[:2]) < SLOW_LINK_BYTES:
        remedy = (
            "look at nvidia-smi -q for the PCIe generation and lanes: fewer than the slot's? Run on the GPU's own socket "
            "(numactl); else take larger batches, so that layers compute longer than they are copied"
        )
        return Finding("link", "slow", f"{text}: slower than PCIe Gen4 on 16 lanes", remedy, values)
    if both < 1.2 * max(h2d, d2h):
        remedy = (
            "the host's memory or the slot carries one direction at a time; gradients and weights then wait for each other"
        )
        return Finding("link", "note", f"{text}: the directions get into each other's way", remedy, values)
    return Finding("link", "ok", text, values=values)


def host_speeds(has_gpu: bool) -> list[Finding]:
    with contextlib.closing(HostKernels()) as kernels:
        # A machine without a GPU is looked at quickly.
        speeds = measure_host(kernels, _MOST_ELEMENTS if has_gpu else _MOST_ELEMENTS // 16)
        return [host_finding(*speeds, kernels.threads, has_gpu)]


def host_finding(step_parameters: float, sum_bytes: float, threads: int, has_gpu: bool) -> Finding:
    share = STEP_BYTES * step_parameters / sum_bytes
    step, dram = step_parameters / 1e9, sum_bytes / GB
    values = {"host_step_g_parameters_per_second": step, "dram_gb_per_second": dram, "host_threads": threads}
    text = f"AdamW {step:.2f} G parameters/s, memory {dram:.0f} GB/s, with {threads} threads"
    if has_gpu and share < SLOW_STEP_SHARE:
        remedy = "more cores would help: lift limits on them, set megatrain_config.host_threads, end what else runs on them"
        return Finding("host speed", "slow", f"{text}: the cores bound AdamW, not the memory", remedy, values)
    return Finding("host speed", "ok", text, values=values)


def plan_finding(machine: Machine, link_bytes: float, step_parameters: float, path: str, count: int) -> Finding:
    """Whether the speeds that the plan goes by (``machine``) still hold. Now the link moves ``link_bytes`` a second in its
    slower direction, and the host's AdamW steps ``step_parameters`` with nothing beside it. ``count`` is that of the
    measurements in the file at ``path``, 0 if none could be kept."""
    values = {f"plan_{name}": value for name, value in dataclasses.asdict(machine).items()} | {"speeds_file": path}
    pairs = (
        ("GB/s over the link", min(machine.h2d_bytes, machine.d2h_bytes), link_bytes),
        ("G parameters/s of AdamW", machine.host_step_parameters / SHARE_IN_A_STEP, step_parameters),
    )
    changed = [
        f"{then / 1e9:.1f} {what}, {now / 1e9:.1f} were measured now"
        for what, then, now in pairs
        if not _SAME_SPEED < now / then < 1 / _SAME_SPEED
    ]
    if changed:
        text = f"the plan goes by {'; by '.join(changed)}"
        remedy = f"end what else runs now, or, if nothing does, delete {path}: trainings measure anew then"
        return Finding("plan's speeds", "slow", text, remedy, values)
    text = f"medians of {count} in {path}" if count else f"measured now; they can't be kept in {path}"
    return Finding("plan's speeds", "ok", text, values=values)


def gpu(device: torch.device | None, error: Exception | None) -> list[Finding]:
    """The GPU and its free memory; ``error`` says why one that is there can't be used."""
    if error is not None:  # busy in exclusive mode, its fabric down
        text = f"it can't be used: {str(error).splitlines()[0]}"
        return [Finding("GPU", "broken", text, "check nvidia-smi: compute mode, fabric manager, driver", {"gpu": None})]
    if device is None:
        text = "none that torch can use: training runs on the CPU, as a stand-in for trying things out"
        remedy = "for a GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES, and in a container --gpus all"
        if torch.version.cuda is None:
            remedy = f"for a GPU: install a torch with CUDA; this one ({torch.__version__}) is built without"
        return [Finding("GPU", "note", text, remedy, {"gpu": None})]
    free, total = torch.cuda.mem_get_info(device)
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    values: dict[str, Value] = {"gpu": name, "gpu_gib": total / GIB, "gpu_free_gib": free / GIB}
    text = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if capability < (8, 0):
        remedy = "take an Ampere or newer GPU: older ones compute bf16 slowly or not at all"
        return [Finding("GPU", "slow", f"{text}, compute capability {capability[0]}.{capability[1]}", remedy, values)]
    if free < 0.8 * total:
        remedy = "end what else runs there (nvidia-smi lists it): the plan fills 90% of what is free"
        return [Finding("GPU", "slow", f"{text}: others hold the rest", remedy, values)]
    return [Finding("GPU", "ok", text, values=values)]
