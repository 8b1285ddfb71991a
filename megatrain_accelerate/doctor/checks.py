"""The checks of ``megatrain doctor``: of the software, of the machine and of its speeds; and the report of their findings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil
import torch
from packaging.version import Version

from megatrain_accelerate import __version__
from megatrain_accelerate.activation import ENV_DISABLE, is_disabled
from megatrain_accelerate.checkpoint.disk import existing_part
from megatrain_accelerate.config import usable_cpu_count
from megatrain_accelerate.errors import HostMemoryError, KernelError, PatchError
from megatrain_accelerate.integrations import import_hook
from megatrain_accelerate.integrations.patches import PATCHES, TESTED_VERSIONS
from megatrain_accelerate.integrations.wrapping import installed_version, require_patches
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.parallel.shared_file import open_huge_file
from megatrain_accelerate.plan import machine
from megatrain_accelerate.store.host_limits import CONSTANT_OVERHEAD_BYTES, cgroup_available_bytes
from megatrain_accelerate.units import GB, GIB, MIB

BYTES_A_PARAMETER = 14
"""Host memory of a trained parameter (docs/architecture.md)."""
CHECKPOINT_BYTES_A_PARAMETER = 12
"""Disk space per parameter of a checkpoint with the optimizer's state: both halves of the masters, and the moments."""
FEW_CORES = 8
SLOW_LINK_BYTES = 20e9
"""Bytes per second. PCIe Gen4 on 16 lanes gives 25e9 and more."""
SLOW_STEP_SHARE = 0.6
"""Share of a plain sum's memory traffic below which AdamW is slow. A healthy kernel is near 0.9."""
_SAME_SPEED = 0.75
"""Two measurements agree if their ratio is between this and its inverse."""
_SUM_ELEMENTS = 96 * MIB
_WIDTH = 120
_MARKS = {"ok": "ok", "note": "note", "slow": "SLOW", "broken": "BROKEN"}
_TITLES = {"broken": "Training won't run:", "slow": "Training will be slower than it could be:", "note": "Worth knowing:"}
_AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_REINSTALL = "pip install --force-reinstall --no-deps megatrain-accelerate, or `pip install --no-deps .` in a checkout"

Value = float | int | str | bool | None


@dataclasses.dataclass(frozen=True)
class Finding:
    name: str
    state: Literal["ok", "note", "slow", "broken"]
    """In this order: fine, worth knowing, makes training slower than it could be, keeps it from running."""
    text: str
    remedy: str = ""
    """What to do. Empty if nothing has to be done."""
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    """The numbers for programs, with units in the names."""


def examine(folder: Path, measures: bool) -> Iterator[Finding]:
    """Yields all findings in the order in which they are shown. Measuring takes a few seconds."""
    checks = {"versions": versions, "hooks": hooks, "host kernels": kernels, "GPU": gpu, "layer compiler": compilers}
    checks |= {"cores": cores, "NUMA": numa, "host memory": host_memory, "several GPUs": several_gpus}
    checks |= {"disk": functools.partial(disk, folder)} | ({"speeds": speeds} if measures else {})
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # the failure is a finding, too, and the other checks still run
            text = f"can't be checked: {type(error).__name__}: {error}"
            yield Finding(name, "broken", text, "mend what the message says, and run megatrain doctor again")


def versions() -> list[Finding]:
    """Reports what is installed, and whether the patches were tested with it."""
    installed: dict[str, Value] = {"megatrain_accelerate": __version__, "python": platform.python_version()}
    installed |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    installed |= {package: installed_version(package) for package in TESTED_VERSIONS}
    text = ", ".join(f"{name} {version}" for name, version in installed.items() if version is not None)
    findings = [Finding("versions", "ok", text, values=installed)]
    for package, tested in TESTED_VERSIONS.items():
        version, bounds = installed[package], [Version(bound) for bound in tested.split(" to ")]
        if isinstance(version, str) and not bounds[0] <= Version(Version(version).base_version) <= bounds[-1]:
            remedy = f"pip install '{package}=={bounds[-1]}' if something is wrong"
            findings.append(Finding(f"{package} {version}", "note", f"the patches were tested with {tested}", remedy))
    return findings


def hooks() -> list[Finding]:
    """Checks whether ``import torch`` installs the plugin's import hook, and whether every patch fits what is installed."""
    failure = getattr(sys.modules.get("_megatrain_autoload"), "failure", None)
    remedy = _REINSTALL
    if is_disabled():
        text = f"{ENV_DISABLE} is set: the plugin is off, whatever a script asks for"
        remedy = f"unset {ENV_DISABLE}"
    elif os.environ.get(_AUTOLOAD_SWITCH) == "0":
        text = f"{_AUTOLOAD_SWITCH}=0 keeps torch from loading the plugin: accelerate launch doesn't know --megatrain"
        remedy = f"unset {_AUTOLOAD_SWITCH}, or call megatrain_accelerate.enable() in the script"
        return [Finding("hooks", "note", text, remedy)]
    elif all(entry.name != "megatrain_accelerate" for entry in importlib.metadata.entry_points(group="torch.backends")):
        text = "the package isn't installed, only importable: `import torch` doesn't load the plugin"
    elif failure is not None or not import_hook.is_installed():
        text = f"the plugin can't be loaded with torch ({type(failure).__name__}: {failure})"
    else:
        packages = sorted({patch.package for patch in PATCHES if importlib.util.find_spec(patch.package) is not None})
        found = {package: Version(installed_version(package) or "0") for package in packages}
        patched = [patch for patch in PATCHES if patch.package in packages and found[patch.package] >= Version(patch.since)]
        for module in dict.fromkeys(patch.module for patch in patched):
            importlib.import_module(module)
        try:
            require_patches()
            return [Finding("hooks", "ok", f"installed; all {len(patched)} patches of {', '.join(packages)} fit")]
        except PatchError as error:
            text, remedy = str(error), "install a tested version, see above"
    return [Finding("hooks", "broken", text, remedy)]


def kernels() -> list[Finding]:
    """Checks whether the compiled host kernels can be loaded, and which instruction set they use."""
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
    """Checks, if there is a GPU, whether layers can be compiled and stepped on it."""
    if not torch.cuda.is_available():
        return []
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    text, remedy = f"Triton, {compiler}", ""
    if importlib.util.find_spec("triton") is None:
        text = "Triton is missing: no states on the GPU, no compiled layers"
        remedy = "pip install triton, in the version that torch names"
    elif compiler is None:
        text = "no C compiler is found, which Triton needs: layers run uncompiled"
        remedy = "install gcc (apt install gcc)"
    return [Finding("layer compiler", "slow" if remedy else "ok", text, remedy)]


def cores() -> list[Finding]:
    """Reports how many cores the host's AdamW may use."""
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
    """Reports the memory that the process may take, and how large a model can train with it."""
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
    """Checks whether memory may be on another socket than the GPU."""
    nodes = [path for path in root.glob("node[0-9]*/cpulist") if path.read_text().strip()]
    values = {"numa_nodes": len(nodes)}
    if len(nodes) < 2:
        return [Finding("NUMA", "ok", "one memory node", values=values)]
    text = f"{len(nodes)} memory nodes: copies cross the sockets where the process isn't on the GPU's (nvidia-smi topo -m)"
    remedy = "where one node's memory suffices: numactl --cpunodebind=NODE --membind=NODE accelerate launch ..., else without "
    return [Finding("NUMA", "note", text, f"{remedy}--membind", values)]


def several_gpus(modes: Path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")) -> list[Finding]:
    """Checks whether GPUs reach each other's memory, and whether memory that their processes share has huge pages."""
    if (count := torch.cuda.device_count()) < 2:
        return []
    reach = all(torch.cuda.can_device_access_peer(*pair) for pair in itertools.permutations(range(count), 2))
    link = f"{count} GPUs, which exchange gradients {'directly' if reach else 'through the host, at the speed of their links'}"
    if (file := open_huge_file()) is not None:
        os.close(file)
    elif not (modes.exists() and re.search(r"\[(always|within_size|advise|force)\]", modes.read_text())):
        remedy = f"echo advise > {modes} on the host, or let processes make user namespaces: the store then lies in huge pages"
        return [Finding("several GPUs", "slow", f"{link}; memory that processes share has pages of 4 KiB", remedy)]
    return [Finding("several GPUs", "ok", f"{link}; memory that processes share has huge pages")]


def disk(folder: Path) -> list[Finding]:
    """Reports the disk space for checkpoints in a folder, which needn't exist yet."""
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


def measure_sum(kernels: HostKernels, elements: int) -> float:
    """Measures the bytes per second of a plain sum of two fp32 arrays with all threads, which the memory bounds."""
    _, _, moments, _ = machine.step_arrays(kernels, elements)
    seconds = machine.seconds_of(torch.device("cpu"), lambda: kernels.accumulate(*moments))
    return 3 * moments.exp_avg.nbytes / seconds  # two are read, one is written


def speeds() -> list[Finding]:
    """Measures the host and, with a GPU, its link: a driver may refuse to register memory. Compares with the plan's speeds."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    with contextlib.closing(HostKernels()) as kernels:
        # Without a GPU a short measurement suffices.
        sum_bytes = measure_sum(kernels, _SUM_ELEMENTS if has_gpu else _SUM_ELEMENTS // 16)
        try:
            now = machine.measure(device, kernels)
        except HostMemoryError as error:
            return [Finding("link", "broken", str(error), "ulimit -l unlimited, or docker run --ulimit memlock=-1")]
        found = [host_finding(now, sum_bytes, kernels.threads, has_gpu)]
        if has_gpu:
            plan = machine.measured_machine(device, kernels)
            path = machine.speeds_path(device, kernels)
            found += [link_finding(now), plan_finding(plan, now, str(path), len(machine.kept_speeds(path)))]
        return found


def link_finding(now: machine.Machine) -> Finding:
    h2d, d2h = now.h2d_bytes / GB, now.d2h_bytes / GB
    values = {"h2d_gb_per_second": h2d, "d2h_gb_per_second": d2h}
    text = f"to the GPU {h2d:.1f}, from it {d2h:.1f} GB/s"
    if min(now.h2d_bytes, now.d2h_bytes) >= SLOW_LINK_BYTES:
        return Finding("link", "ok", text, values=values)
    remedy = (
        "look at nvidia-smi -q for the PCIe generation and lanes: fewer than the slot's? Run on the GPU's own socket "
        "(numactl); else take larger batches, so that layers compute longer than they are copied"
    )
    return Finding("link", "slow", f"{text}: slower than PCIe Gen4 on 16 lanes", remedy, values)


def host_finding(now: machine.Machine, sum_bytes: float, threads: int, has_gpu: bool) -> Finding:
    """Compares the speed of the host's AdamW with a plain sum, which moves ``sum_bytes`` per second."""
    step_parameters = now.host_step_parameters / machine.SHARE_IN_A_STEP
    step, dram = step_parameters / 1e9, sum_bytes / GB
    values = {"host_step_g_parameters_per_second": step, "dram_gb_per_second": dram, "host_threads": threads}
    text = f"AdamW {step:.2f} G parameters/s, memory {dram:.0f} GB/s, with {threads} threads"
    if has_gpu and machine.STEP_BYTES * step_parameters < SLOW_STEP_SHARE * sum_bytes:
        remedy = "more cores would help: lift limits on them, set megatrain_config.host_threads, end what else runs on them"
        return Finding("host speed", "slow", f"{text}: the cores bound AdamW, not the memory", remedy, values)
    return Finding("host speed", "ok", text, values=values)


def plan_finding(plan: machine.Machine, now: machine.Machine, path: str, count: int) -> Finding:
    """Checks whether the plan's speeds still hold. The file at ``path`` has ``count`` of them: 0 if none could be kept."""
    values = {f"plan_{name}": value for name, value in dataclasses.asdict(plan).items()} | {"speeds_file": path}
    kinds: dict[str, Callable[[machine.Machine], float]] = {
        "GB/s over the link": lambda at: min(at.h2d_bytes, at.d2h_bytes),
        "G parameters/s of AdamW": lambda at: at.host_step_parameters / machine.SHARE_IN_A_STEP,
    }
    changed = [
        f"{speed(plan) / 1e9:.1f} {kind}, {speed(now) / 1e9:.1f} were measured now"
        for kind, speed in kinds.items()
        if not _SAME_SPEED < speed(now) / speed(plan) < 1 / _SAME_SPEED
    ]
    if changed:
        text = f"the plan goes by {'; by '.join(changed)}"
        remedy = f"end what else runs now, or, if nothing does, delete {path}: trainings measure anew then"
        return Finding("plan's speeds", "slow", text, remedy, values)
    text = f"medians of {count} in {path}" if count else f"measured now; they can't be kept in {path}"
    return Finding("plan's speeds", "ok", text, values=values)


def gpu() -> list[Finding]:
    """Reports the GPU and its free memory, or why it can't be used."""
    if not torch.cuda.is_available():
        text = "none that torch can use: training runs on the CPU, as a stand-in for trying things out"
        remedy = "for a GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES, and in a container --gpus all"
        if torch.version.cuda is None:
            remedy = f"for a GPU: install a torch with CUDA; this one ({torch.__version__}) is built without"
        return [Finding("GPU", "note", text, remedy, {"gpu": None})]
    try:
        device = torch.cuda.current_device()
    except RuntimeError as error:  # for example busy in exclusive mode, or its fabric is down
        text = f"it can't be used: {str(error).splitlines()[0]}"
        return [Finding("GPU", "broken", text, "check nvidia-smi: compute mode, fabric manager, driver", {"gpu": None})]
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


def table(findings: Sequence[Finding]) -> str:
    """Formats the report as lines of text, which end with what has to be done."""
    name_width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{_MARKS[finding.state]:<6}  {finding.name:<{name_width}}  "
        lines += textwrap.wrap(finding.text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    for state, title in _TITLES.items():
        chosen = [f"{finding.name}: {finding.remedy}" for finding in findings if finding.state == state and finding.remedy]
        lines += ["", title] if chosen else []
        for text in chosen:
            lines += textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    if all(finding.state in ("ok", "note") for finding in findings):
        lines += ["", "Nothing keeps this machine from training."]
    return "\n".join(lines)
