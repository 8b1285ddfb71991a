"""How fast this machine copies and computes, and how much of its GPU's memory is free. Measuring speeds takes about 2 seconds.
The first processes write theirs to the user's cache folder. Plans go by the medians, since another program may have slowed the
machine during one measurement."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain_accelerate.kernels.host import AdamArguments, HostKernels
from megatrain_accelerate.kernels.moments import FloatMoments
from megatrain_accelerate.store.host_memory import HostMemory
from megatrain_accelerate.units import MIB

_COPY_BYTES = 256 * MIB
_STEP_ELEMENTS = 96 * 1024 * 1024
"""1.3 GiB of states. Much of a few hundred MiB would stay in the caches of a server's processor."""
_ROUNDS = 3
_ROUNDS_AT_ONCE = 16
"""Number of copies of half a buffer, in each direction, while the host steps: enough for several steps."""
STEP_BYTES = 26
"""Memory traffic in bytes a parameter of the measured step, fused AdamW on split masters with fp32 moments. Weights, residuals
and both moments are read and written, gradients are read: ``2 * (2 + 2 + 4 + 4) + 2``."""
STEP_ARGUMENTS = AdamArguments(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
SHARE_IN_A_STEP = 0.9
"""Share of the host step's measured speed that training reaches: copies and the launching thread use memory and cores, too."""
MEASUREMENTS = 5
"""Number of processes that measure the machine. Later ones use their results."""
STEP_OVERHEAD = 0.010
"""Seconds that the stock Trainer takes between steps if it logs each. Not measured, since it depends on the script."""

USABLE_SHARE_OF_DEVICE = 0.9
"""Share of the device's free memory that a plan fills: the caching allocator leaves gaps between its blocks."""

SEGMENT_BYTES = 64 * MIB
"""Memory that tensors may take beyond their sizes: the caching allocator cuts small ones from segments of 2 and 20 MiB."""
_PAGE_BYTES = {"small": 2 * MIB, "large": 20 * MIB}
"""Page size of expandable segments for tensors of up to 1 MiB, and for larger ones (c10/core/AllocatorConfig.h)."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Speeds of a machine: bytes, parameters or operations a second, as the names say, and shares of such speeds."""

    h2d_bytes: float
    """Speed of copies from registered host memory to the device."""
    d2h_bytes: float
    """Speed of copies from the device to registered host memory."""
    host_step_parameters: float
    """Speed of the host's fused AdamW on split masters, with :data:`STEP_BYTES` of traffic a parameter."""
    device_bytes: float
    """Speed at which device memory is read or written."""
    device_flops: float
    """Speed of bf16 matrix products on the device."""
    step_overhead: float = 0.0
    """Seconds of a step in which the device idles, since the launching thread steps, logs and fetches the next batch."""
    h2d_share_in_step: float = 1.0
    """Share of :attr:`h2d_bytes` that remains while the host steps and d2h copies run: all share the host's memory."""
    d2h_share_in_step: float = 1.0
    """Share of :attr:`d2h_bytes` that remains while the host steps and h2d copies run."""
    step_share_beside_copies: float = 1.0
    """Share of :attr:`host_step_parameters` that remains while the link copies both ways, as for offloaded activations."""

    @property
    def host_step_traffic(self) -> float:
        """Bytes of host memory a second that AdamW reads and writes. It is taken to be the same for all dtypes of moments."""
        return STEP_BYTES * self.host_step_parameters


def speeds_path(device: torch.device, kernels: HostKernels, ranks: int = 1) -> Path:
    """The file for speeds that are measured under these circumstances."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    circumstances: list[object] = [platform.node(), name, os.cpu_count(), kernels.threads, ranks, torch.__version__]
    circumstances += [_ROUNDS, SHARE_IN_A_STEP, STEP_OVERHEAD, [field.name for field in dataclasses.fields(Machine)]]
    key = hashlib.sha256(json.dumps(circumstances).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # The tilde stays for a user without a home.
    folder = (cache if cache.is_absolute() else Path(tempfile.gettempdir())) / "megatrain_accelerate"
    return folder / f"machine-{key}.json"


def kept_speeds(path: Path) -> list[Machine]:
    """The measurements in a file of :func:`speeds_path`, oldest first. Empty if there is no file, or it is broken."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = [Machine(**speeds) for speeds in json.loads(path.read_text())]
        # The overhead may be 0, unlike speeds and shares: it is checked apart.
        rates = [rate for at in found for rate in dataclasses.astuple(dataclasses.replace(at, step_overhead=1.0))]
        if all(0 < rate < math.inf for rate in rates) and all(0 <= at.step_overhead < math.inf for at in found):
            return found
    return []


def measured_machine(device: torch.device, kernels: HostKernels, ranks: int = 1) -> Machine:
    """The speeds of this machine: medians over up to :data:`MEASUREMENTS` processes that each measured once under the same
    circumstances. Several ``ranks`` measure at the same time, so that each finds the speed that the others leave to it."""
    path = speeds_path(device, kernels, ranks)
    if path not in process_speeds:
        measured = kept_speeds(path)
        if len(measured) < MEASUREMENTS:
            found = measure(device, kernels)
            measured = [*kept_speeds(path), found]  # other processes may have written meanwhile
            keep_speeds(path, measured)
        process_speeds[path] = _median(measured)
    return process_speeds[path]


process_speeds: dict[Path, Machine] = {}
"""The speeds that this process goes by, by the path of their file."""


def _median(measured: Sequence[Machine]) -> Machine:
    """The median of each speed. Of an even number it is the faster of the middle two, since other programs only slow a machine
    down. The link's shares are made of medians of its speeds in a step: a share alone may be high since the link was slow."""
    usual = Machine(*map(statistics.median_high, zip(*map(dataclasses.astuple, measured), strict=True)))
    h2d_in_step = statistics.median_high(at.h2d_bytes * at.h2d_share_in_step for at in measured)
    d2h_in_step = statistics.median_high(at.d2h_bytes * at.d2h_share_in_step for at in measured)
    return dataclasses.replace(
        usual,
        h2d_share_in_step=min(1.0, h2d_in_step / usual.h2d_bytes),
        d2h_share_in_step=min(1.0, d2h_in_step / usual.d2h_bytes),
    )


def keep_speeds(path: Path, measured: Sequence[Machine]) -> None:
    """Writes the speeds that processes have measured so far, if the folder can be written to."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file is replaced as a whole, since other processes may read it meanwhile.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(json.dumps([dataclasses.asdict(speeds) for speeds in measured]))
        os.replace(file.name, path)


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """The median time of a few rounds of ``work``. A first one isn't counted, since it touches memory and loads kernels."""
    rounds = []
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    for _ in range(_ROUNDS + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        rounds.append(time.perf_counter() - start)
    return statistics.median(rounds[1:])


def measure(device: torch.device, kernels: HostKernels) -> Machine:
    """Measures the speeds of copies, the host's step, device memory and matrix products."""
    is_gpu = device.type == "cuda"
    smaller = 1 if is_gpu else 16
    size, elements, side = _COPY_BYTES // smaller, _STEP_ELEMENTS // smaller, 8192 // smaller
    # The training must draw the same random numbers whether speeds are measured or known already.
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if is_gpu else []):
        host_memory = HostMemory(size, register=is_gpu)
        host = host_memory.tensor(0, (size,), torch.uint8)
        kernels.zero(host)
        host_memory.register()
        on_device = torch.empty(size, dtype=torch.uint8, device=device)
        other = torch.empty_like(on_device)
        h2d = seconds_of(device, lambda: on_device.copy_(host, non_blocking=True))
        d2h = seconds_of(device, lambda: host.copy_(on_device, non_blocking=True))
        arrays = step_arrays(kernels, elements)
        step_work = functools.partial(kernels.adamw, *arrays, STEP_ARGUMENTS)
        step = seconds_of(torch.device("cpu"), step_work)
        h2d_in_step, d2h_in_step, steps_beside_copies = h2d, d2h, [step]
        if is_gpu:
            with repeated(step_work) as steps_beside_copies:
                h2d_in_step, d2h_in_step = seconds_of_both(on_device, host)
        within = seconds_of(device, lambda: other.copy_(on_device))
        host_memory.close()
        # Products of zeros take less power and are faster.
        left = torch.randn(side, side, dtype=torch.bfloat16, device=device)
        product = seconds_of(device, lambda: left @ left)
    return Machine(
        h2d_bytes=size / h2d,
        d2h_bytes=size / d2h,
        host_step_parameters=SHARE_IN_A_STEP * elements / step,
        device_bytes=2 * size / within,
        device_flops=2 * side**3 / product,
        h2d_share_in_step=min(1.0, h2d / h2d_in_step),
        d2h_share_in_step=min(1.0, d2h / d2h_in_step),
        # It is a share of host_step_parameters, which have SHARE_IN_A_STEP as a factor already.
        step_share_beside_copies=min(1.0, step / statistics.median(steps_beside_copies) / SHARE_IN_A_STEP),
        step_overhead=STEP_OVERHEAD if is_gpu else 0.0,
    )


@contextlib.contextmanager
def repeated(work: Callable[[], object]) -> Iterator[list[float]]:
    """Repeats ``work`` on its own thread until the body ends. Yields each round's seconds; the last may end after the body."""
    is_over = threading.Event()
    rounds: list[float] = []

    def repeat() -> None:
        while not rounds or not is_over.is_set():  # at least once, however short the body is
            start = time.perf_counter()
            work()
            rounds.append(time.perf_counter() - start)

    thread = threading.Thread(target=repeat, name="megatrain-step-speed")
    thread.start()
    try:
        yield rounds
    finally:
        is_over.set()
        thread.join()


def seconds_of_both(on_device: torch.Tensor, host: torch.Tensor) -> tuple[float, float]:
    """Seconds to copy a buffer to the device and to the host, both at once: twice the medians of many copies of half of it."""
    middle = host.numel() // 2
    streams = (torch.cuda.Stream(on_device.device), torch.cuda.Stream(on_device.device))
    copies = ((on_device[:middle], host[:middle]), (host[middle:], on_device[middle:]))
    marks: list[list[torch.cuda.Event]] = [[], []]
    torch.cuda.synchronize(on_device.device)
    for _ in range(_ROUNDS_AT_ONCE + 1):
        for stream, (target, source), events in zip(streams, copies, marks, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                events.append(torch.cuda.Event(enable_timing=True))
                events[-1].record(stream)
    torch.cuda.synchronize(on_device.device)
    h2d, d2h = (
        statistics.median(earlier.elapsed_time(later) for earlier, later in itertools.pairwise(events)) for events in marks
    )
    return 2 * h2d / 1e3, 2 * d2h / 1e3


def step_arrays(kernels: HostKernels, elements: int) -> tuple[torch.Tensor, torch.Tensor, FloatMoments, torch.Tensor]:
    """The arrays on which the fused step is timed: weights, residuals, moments and gradients, all zero."""
    dtypes = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
    hi, residual, exp_avg, exp_avg_sq, gradient = arrays = [torch.empty(elements, dtype=dtype) for dtype in dtypes]
    for tensor in arrays:
        kernels.zero(tensor)
    return hi, residual, FloatMoments(exp_avg, exp_avg_sq), gradient


def free_bytes(device: torch.device) -> int:
    """Bytes of device memory that no other process and no tensor of this process holds."""
    return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def whole_free_bytes(device: torch.device) -> int:
    """:func:`free_bytes` without the fragments between tensors, which the allocator can't return to the driver: a tensor that
    is larger than each of them doesn't fit. Expandable segments return free pages, others are returned whole."""
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    return int(torch.cuda.mem_get_info(device)[0]) + sum(map(_returnable_bytes, segments))


def _returnable_bytes(segment: Mapping[str, Any]) -> int:
    if tuple(segment["segment_pool_id"]) != (0, 0):
        return 0  # a private pool, a CUDA graph's for instance
    blocks = segment["blocks"]
    free = [(block["address"] - segment["address"], block["size"]) for block in blocks if block["state"] == "inactive"]
    if not segment["is_expandable"]:
        return int(free[0][1]) if free and len(blocks) == 1 else 0
    page = _PAGE_BYTES[segment["segment_type"]]
    return sum(page * max(0, (offset + size) // page - math.ceil(offset / page)) for offset, size in free)


def raise_peak(device: torch.device, limit_bytes: int | None) -> None:
    """Lets Inductor time its kernels without the host. It copies what a kernel overwrites, and in a backward it makes copies
    that would raise the allocator's peak statistic in pinned host memory, which torch keeps for good, so that each trial uses
    the link (``copy_args_to_cpu_if_needed`` in torch/_inductor/runtime/triton_heuristics.py). So this raises the statistic to
    what could be allocated: up to ``limit_bytes`` of all tensors of the process, or with None what is free."""
    torch.cuda.empty_cache()
    room_bytes = int(USABLE_SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[0])
    if limit_bytes is not None:
        room_bytes = min(room_bytes, limit_bytes - torch.cuda.memory_allocated(device))
    if room_bytes > 0:
        with contextlib.suppress(torch.OutOfMemoryError):  # free memory may be fragmented
            torch.empty(room_bytes, dtype=torch.uint8, device=device)
        torch.cuda.empty_cache()
