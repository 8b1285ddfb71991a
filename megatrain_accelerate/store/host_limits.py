"""How much host memory this process may still allocate, by the machine's, the cgroup's or the user's limit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import ConfigError, HostMemoryError
from megatrain_accelerate.parallel.shared_file import shared_files
from megatrain_accelerate.store.file_mappings import FileMappings
from megatrain_accelerate.units import GIB, KIB

CONSTANT_OVERHEAD_BYTES = 2 * GIB
"""Host memory that a plan reserves outside the store: for the interpreter, torch, CUDA's context and libraries."""

_MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2.06}
"""Bytes of AdamW's moments for each parameter, by ``moments_dtype``."""

promising: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines' runtimes that will allocate ``promised_bytes`` of host memory later. These count as taken already."""


def _promised_bytes() -> int:
    return sum(runtime.promised_bytes for runtime in promising)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cgroup_available_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup"), *, counts_cache: bool = True
) -> int | None:
    """Free memory of the tightest cgroup above this process (version 2 or 1), or None without a limit. With ``counts_cache``
    page cache is free, since it is given back when memory is needed."""
    free: list[int] = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.strip("/")
        # In a container the path may name a group of the host that isn't mounted. The root is then this process's group.
        for folder in (group, *group.parents):
            limit, usage = _read(folder / limit_name), _read(folder / usage_name)
            if limit.isdigit() and usage.isdigit() and int(limit) < 1 << 60:
                statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                cache = [int(statistics.get(name, 0)) for name in ("inactive_file", "active_file") if counts_cache]
                free.append(int(limit) - int(usage) + sum(cache))
            if folder == base:
                break
    return max(0, min(free)) if free else None


def process_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes, 0 if there is none."""
    fields = dict(line.split(":", 1) for line in _read(Path("/proc/self/status")).splitlines())
    return KIB * int(fields.get(field, "0").split()[0])


def available_host_bytes(host_memory_gib: float | None = None) -> int:
    """Bytes that this process may still allocate, without those that were promised to its models. ``host_memory_gib``: the
    user's limit for the whole process. Without it ``LOCAL_WORLD_SIZE`` processes share equally what the machine reports."""
    if host_memory_gib is not None:  # some virtual machines report less than they can grow to
        # Pages of files that the process maps are cache. Of memory that ranks share each has those pages that it has used, and
        # all that it page-locked, which are nearly the whole store: instead each counts an equal share.
        in_files, share = (sum(counts) for counts in zip((0, 0), *(file.held_bytes for file in shared_files), strict=True))
        held = psutil.Process().memory_info().rss - process_bytes("RssFile") - min(in_files, process_bytes("RssShmem")) + share
        return max(0, int(host_memory_gib * GIB) - held - _promised_bytes())
    available = psutil.virtual_memory().available
    if (cgroup := cgroup_available_bytes()) is not None:
        available = min(available, cgroup)
    return max(0, available // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) - _promised_bytes())


def unused_host_bytes() -> int:
    """Bytes of host memory that are neither promised nor in use, not even as page cache."""
    unused: int = psutil.virtual_memory().free
    cgroup = cgroup_available_bytes(counts_cache=False)
    return (unused if cgroup is None else min(unused, cgroup)) - _promised_bytes()


def anonymous_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of those host tensors whose memory is freed when they die. Weights that ``from_pretrained`` maps from a file don't
    count: their pages are cache, which counts as free already."""
    files = FileMappings()
    return sum(tensor.nbytes for tensor in tensors if not files.holds(tensor))


def leaner_settings(config: MegatrainConfig, *, keeps_gradients: bool) -> list[dict[str, Any]]:
    """Sets of changed settings that take less host memory: first an empty one, then those that change numbers least. With
    ``keeps_gradients`` (several backwards before a step, or several processes) gradients may not pass."""
    dtypes, found = list(_MOMENT_BYTES), []
    for moments in dtypes[dtypes.index(config.moments_dtype) :]:
        for gradients in dict.fromkeys((config.host_gradients, "passing")):
            wanted: dict[str, Any] = {"host_gradients": gradients, "moments_dtype": moments}
            changes = {name: value for name, value in wanted.items() if value != getattr(config, name)}
            with contextlib.suppress(ConfigError):  # the settings exclude each other
                if not (dataclasses.replace(config, **changes).passes_gradients and keeps_gradients):
                    found.append(changes)
    return found


def settings_that_take_less(config: MegatrainConfig, *, keeps_gradients: bool) -> str:
    """A sentence for :func:`require_host_bytes`, with those :func:`leaner_settings` that change a single setting."""
    found = []
    for changes in leaner_settings(config, keeps_gradients=keeps_gradients):
        if changes == {"host_gradients": "passing"}:
            found.append("host_gradients: passing (2 bytes a parameter less; needs max_grad_norm=0)")
        elif changes.keys() == {"moments_dtype"}:
            name = changes["moments_dtype"]
            less = _MOMENT_BYTES[config.moments_dtype] - _MOMENT_BYTES[name]
            found.append(f"moments_dtype: {name} ({less:.2g} bytes a parameter less; slightly other numbers)")
    return f"In megatrain_config, these take less: {', '.join(found)}. " if found else ""


def require_host_bytes(
    parts: dict[str, int], host_memory_gib: float | None, *, freed: int = 0, remedy: str = "", ranks: int = 1
) -> None:
    """Raises a ``HostMemoryError`` for a run that doesn't fit, before anything is allocated, with the numbers and the
    ``remedy``, a sentence of what helps. ``parts``: bytes that the store will take, by purpose. ``freed``: bytes of the
    model's own memory that adopting it frees, see :func:`anonymous_bytes`. ``ranks``: how many processes share store and
    machine equally."""
    available = available_host_bytes(host_memory_gib)
    parts = {name: count // ranks for name, count in parts.items()}
    required = sum(parts.values())
    if required + CONSTANT_OVERHEAD_BYTES <= available + freed:
        return
    split = ", ".join(f"{name} {count / GIB:.2f} GiB" for name, count in parts.items() if count)
    if host_memory_gib is not None:
        source = f"megatrain_config.host_memory_gib ({host_memory_gib:g})"
        figure = "raise megatrain_config.host_memory_gib, if the machine has more"
    else:
        source = "the machine or its cgroup"
        figure = "set megatrain_config.host_memory_gib if the machine has more than it reports"
    shares = f" in each of {ranks} processes" if ranks > 1 else ""
    raise HostMemoryError(
        f"the model's weights and optimizer states take {required / GIB:.2f} GiB of host memory{shares} ({split}) and "
        f"{CONSTANT_OVERHEAD_BYTES / GIB:.0f} GiB are kept for everything else, but {source} leaves "
        f"{(available + freed) / GIB:.2f} GiB (of which {freed / GIB:.2f} GiB are the loaded model's own). {remedy}Take a "
        "machine or set a limit with more memory, freeze some layers (a frozen parameter takes 2 bytes), train LoRA adapters, "
        f"or {figure}"
    )
