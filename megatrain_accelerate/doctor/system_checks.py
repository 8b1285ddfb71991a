"""Checks of the machine without running anything on it: cores, memory, limits, NUMA, disk."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import psutil

from megatrain_accelerate.config import usable_cpu_count
from megatrain_accelerate.disk import existing_part
from megatrain_accelerate.doctor.finding import Finding, Value
from megatrain_accelerate.memory.host_limits import CONSTANT_OVERHEAD_BYTES, cgroup_available_bytes
from megatrain_accelerate.units import GIB

BYTES_A_PARAMETER = 14
"""Of host memory that a trained parameter takes (docs/architecture.md)."""
CHECKPOINT_BYTES_A_PARAMETER = 12
"""Of disk that a checkpoint takes with the optimizer's state: both halves of the masters, and the moments."""
FEW_CORES = 8
_SWAPPED_BYTES = GIB


def cores() -> list[Finding]:
    """How many threads the host's AdamW will have."""
    usable, present = usable_cpu_count(), os.cpu_count() or 1
    values: dict[str, Value] = {"usable_cores": usable, "cores": present}
    text = f"{usable} of {present} may be used"
    remedy = ""
    if usable < min(present, FEW_CORES):
        remedy = "lift the limit: affinity (taskset, --cpuset-cpus) or the cgroup's quota (docker run --cpus, cpu.max)"
    elif usable < FEW_CORES:
        remedy = "take a machine with more cores, or larger batches: AdamW on the host then takes a smaller share of the step"
    if remedy:
        return [Finding("cores", "slow", f"{text}: few for AdamW on the host, which will bound small batches", remedy, values)]
    return [Finding("cores", "ok", text, values=values)]


def host_memory() -> list[Finding]:
    """What the process may take, and how large a model that is."""
    memory = psutil.virtual_memory()
    limit = cgroup_available_bytes()
    available = memory.available if limit is None else min(memory.available, limit)
    parameters = max(0, available - CONSTANT_OVERHEAD_BYTES) / BYTES_A_PARAMETER
    values: dict[str, Value] = {
        "available_gib": available / GIB,
        "total_gib": memory.total / GIB,
        "cgroup_available_gib": None if limit is None else limit / GIB,
        "trainable_parameters": parameters,
    }
    text = (
        f"{available / GIB:.1f} of {memory.total / GIB:.1f} GiB are free: all of {parameters / 1e9:.1f} G parameters can train"
    )
    if limit is not None and limit < memory.available:
        remedy = "raise the container's limit (docker run --memory, the pod's resources.limits.memory) for larger models"
        return [Finding("host memory", "note", f"{text}; the cgroup sets this limit", remedy, values)]
    return [Finding("host memory", "ok", text, values=values)]


def swap() -> list[Finding]:
    """Swap makes a host that is too full crawl instead of saying so."""
    found = psutil.swap_memory()
    values: dict[str, Value] = {"swap_gib": found.total / GIB, "swapped_gib": found.used / GIB}
    if found.used > _SWAPPED_BYTES:
        text = f"{found.used / GIB:.1f} GiB are swapped out: the host's memory was too small for what runs on it"
        return [Finding("swap", "slow", text, "end what else runs, then sudo swapoff -a && sudo swapon -a", values)]
    if found.total:
        text = (
            f"{found.total / GIB:.1f} GiB, {found.used / GIB:.1f} in use; moments aren't page-locked and could be swapped out"
        )
        return [Finding("swap", "note", text, "sudo swapoff -a, where nothing else needs it", values)]
    return [Finding("swap", "ok", "none", values=values)]


def huge_pages(root: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> list[Finding]:
    """Whether the store's memory can have transparent huge pages."""
    try:
        text = (root / "enabled").read_text()
    except OSError:
        remedy = "training works with small pages; AdamW on the host is slower by some percent"
        return [Finding("huge pages", "note", "this kernel has no transparent huge pages", remedy, {"huge_pages": None})]
    policy = text[text.index("[") + 1 : text.index("]")]
    if policy == "never":
        remedy = f"echo madvise | sudo tee {root / 'enabled'}"
        text = "transparent huge pages are off: AdamW and registering memory are slower"
        return [Finding("huge pages", "slow", text, remedy, {"huge_pages": policy})]
    return [Finding("huge pages", "ok", f"transparent huge pages: {policy}", values={"huge_pages": policy})]


def locked_memory() -> list[Finding]:
    """The limit on page-locked memory, which some drivers and virtual machines hold registered memory to."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return [Finding("locked memory", "ok", "no limit", values={"memlock_bytes": None})]
    text = f"limited to {limit / GIB:.3f} GiB; most drivers don't count registered memory, and none is refused by this alone"
    remedy = "if registering memory fails: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    return [Finding("locked memory", "note", text, remedy, {"memlock_bytes": limit})]


def overcommit(path: Path = Path("/proc/sys/vm/overcommit_memory")) -> list[Finding]:
    """Strict accounting refuses the store's mappings early."""
    try:
        mode = path.read_text().strip()
    except OSError:
        return []
    if mode == "2":
        text = "vm.overcommit_memory is 2: the kernel may refuse the store although memory is free"
        return [Finding("overcommit", "note", text, "sudo sysctl vm.overcommit_memory=0", {"overcommit_memory": 2})]
    return [Finding("overcommit", "ok", f"vm.overcommit_memory is {mode}", values={"overcommit_memory": int(mode)})]


def numa(gpu_node: int | None = None, root: Path = Path("/sys/devices/system/node")) -> list[Finding]:
    """Whether the process runs on the memory node that the GPU is attached to.

    Args:
        gpu_node: the GPU's node; None or -1 if unknown.
        root: where the kernel lists nodes.
    """
    nodes = {int(folder.name[4:]): _cpu_list(folder / "cpulist") for folder in root.glob("node[0-9]*")}
    with_cpus = {node: cpus for node, cpus in nodes.items() if cpus}
    values: dict[str, Value] = {"numa_nodes": len(with_cpus), "gpu_numa_node": gpu_node}
    if len(with_cpus) < 2:
        return [Finding("NUMA", "ok", "one memory node", values=values)]
    usable = os.sched_getaffinity(0)
    used = sorted(node for node, cpus in with_cpus.items() if cpus & usable)
    text = f"{len(with_cpus)} memory nodes, this process may run on {used}"
    if gpu_node not in with_cpus:
        return [Finding("NUMA", "note", f"{text}; the GPU's isn't known", values=values)]
    if gpu_node not in used:
        remedy = (
            f"numactl --cpunodebind={gpu_node} --membind={gpu_node} where the node's memory suffices, else without --membind"
        )
        return [Finding("NUMA", "slow", f"{text}, the GPU is at {gpu_node}: copies cross the sockets", remedy, values)]
    if len(used) > 1:
        remedy = (
            f"where one node's memory suffices: numactl --cpunodebind={gpu_node} --membind={gpu_node} accelerate launch ..."
        )
        return [Finding("NUMA", "note", f"{text}, the GPU is at {gpu_node}: part of the store is far from it", remedy, values)]
    return [Finding("NUMA", "ok", f"{text}, the GPU's own", values=values)]


def _cpu_list(path: Path) -> set[int]:
    """Numbers in a list such as ``0-3,8``; none if the file is missing."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def disk(folder: Path) -> list[Finding]:
    """Room for checkpoints.

    Args:
        folder: where they will be written; it needn't be there yet.
    """
    asked = folder
    folder = existing_part(folder)
    if not folder.is_dir():
        text = f"no checkpoint can be written to {asked}: {folder} isn't a folder"
        return [Finding("disk", "broken", text, "name a folder by --folder; it needn't be there yet")]
    free = shutil.disk_usage(folder).free
    parameters = free / CHECKPOINT_BYTES_A_PARAMETER
    text = f"{free / GIB:.1f} GiB free in {folder}: a checkpoint of up to {parameters / 1e9:.1f} G parameters"
    values: dict[str, Value] = {"free_disk_gib": free / GIB}
    memory = psutil.virtual_memory().total
    if free < memory:
        remedy = "free some, write to another disk (--folder checks it), or save less: --save_only_model, --save_total_limit 1"
        return [Finding("disk", "note", f"{text}, less than this machine can train", remedy, values)]
    return [Finding("disk", "ok", text, values=values)]
