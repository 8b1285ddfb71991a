"""How fast this machine moves and computes: measured in about two seconds, and kept in the user's cache folder.

The first processes measure anew, and the plan counts with the median: something else may run on the machine at one time.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from megatrain_accelerate.memory.host_memory import HostMemory
from megatrain_accelerate.optim.kernel import AdamArguments, HostKernels
from megatrain_accelerate.optim.moments import FloatMoments
from megatrain_accelerate.units import MIB

_COPY_BYTES = 256 * MIB
_STEP_ELEMENTS = 96 * 1024 * 1024
"""1.3 GiB of states: of a few hundred MiB a large part would stay in the caches of a server's processor."""
_ROUNDS = 3
_ROUNDS_AT_ONCE = 16
"""Copies of half the size each way while the host steps: several steps long."""
STEP_BYTES = 26
"""Memory traffic of the fused AdamW on split masters with moments in fp32, a parameter: what is measured here."""
SHARE_IN_A_STEP = 0.9
"""Of the host step's speed alone: in training copies and the launcher take their part of the memory and the cores."""
MEASUREMENTS = 5
"""Processes that measure the machine; later ones go by what these found."""
STEP_OVERHEAD = 0.010
"""Of the stock Trainer that logs each step; not measured, since it depends on the script."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Speeds in units a second."""

    h2d_bytes: float
    """Host to device, from registered memory."""
    d2h_bytes: float
    """Device to host."""
    host_step_parameters: float
    """Parameters that the host's fused AdamW steps on split masters, of :data:`STEP_BYTES` each."""
    device_bytes: float
    """Device memory, read or written."""
    device_flops: float
    """bf16 matrix products on the device."""
    step_overhead: float = 0.0
    """Seconds of a step in which the device has nothing to do since the launcher steps, logs and fetches the next batch."""
    h2d_share_in_step: float = 1.0
    """Of :attr:`h2d_bytes`, what is left while the other direction copies and the host steps: all three share its memory."""
    d2h_share_in_step: float = 1.0
    """The same of :attr:`d2h_bytes`."""

    @property
    def host_step_traffic(self) -> float:
        """Bytes of host memory that a step reads and writes: its memory bounds it, whatever it is made of."""
        return STEP_BYTES * self.host_step_parameters


def speeds_path(device: torch.device, kernels: HostKernels, register: bool) -> Path:
    """Where the speeds are kept that are measured under these circumstances; see :func:`measured_machine`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    circumstances: list[object] = [platform.node(), name, os.cpu_count(), kernels.threads, register, torch.__version__]
    circumstances += [_ROUNDS, SHARE_IN_A_STEP, STEP_OVERHEAD, [field.name for field in dataclasses.fields(Machine)]]
    key = hashlib.sha256(json.dumps(circumstances).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # A user without a home: the tilde stays.
    folder = (cache if cache.is_absolute() else Path(tempfile.gettempdir())) / "megatrain_accelerate"
    return folder / f"machine-{key}.json"


def kept_speeds(path: Path) -> list[Machine]:
    """The measurements in a file of :func:`speeds_path`, oldest first; none if there is no file, or it is broken."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = [Machine(**speeds) for speeds in json.loads(path.read_text())]
        if all(map(_can_be, found)):
            return found
    return []


def _can_be(speeds: Machine) -> bool:
    rates = dataclasses.astuple(dataclasses.replace(speeds, step_overhead=1.0))
    return 0 <= speeds.step_overhead < math.inf and all(0 < rate < math.inf for rate in rates)


def measured_machine(device: torch.device, kernels: HostKernels, register: bool) -> Machine:
    """The speeds of this machine: medians of what up to :data:`MEASUREMENTS` processes found under the same circumstances.

    A process measures once, and not at all where so many did before.

    Args:
        device: where the model computes.
        kernels: the host kernels at work.
        register: whether host memory is page-locked.
    """
    path = speeds_path(device, kernels, register)
    if path not in _of_this_process:
        measured = kept_speeds(path)
        if len(measured) < MEASUREMENTS:
            found = _measure(device, kernels, register)
            measured = [*kept_speeds(path), found]  # others may have measured at the same time
            _keep(path, measured)
        _of_this_process[path] = _median(measured)
    return _of_this_process[path]


_of_this_process: dict[Path, Machine] = {}


def _median(measured: Sequence[Machine]) -> Machine:
    """Each speed's median; of an even number the faster of the two in the middle: what else runs makes a machine slower only.

    A share's is that of what the link had while the host stepped: beside others it may be high, of a slow link.
    """
    names = [field.name for field in dataclasses.fields(Machine)]
    usual = {name: statistics.median_high([getattr(speeds, name) for speeds in measured]) for name in names}
    for way in ("h2d", "d2h"):
        in_step = statistics.median_high(
            [getattr(at, f"{way}_bytes") * getattr(at, f"{way}_share_in_step") for at in measured]
        )
        usual[f"{way}_share_in_step"] = min(1.0, in_step / usual[f"{way}_bytes"])
    return Machine(**usual)


def _keep(path: Path, measured: Sequence[Machine]) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may read it meanwhile.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(json.dumps([dataclasses.asdict(speeds) for speeds in measured]))
        os.replace(file.name, path)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The median of a few rounds after one that doesn't count, since it touches memory and loads kernels."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rounds.append(time.perf_counter() - start)
    return statistics.median(rounds[1:])


def _measure(device: torch.device, kernels: HostKernels, register: bool) -> Machine:
    size = _COPY_BYTES if device.type == "cuda" else _COPY_BYTES // 16
    elements = _STEP_ELEMENTS if device.type == "cuda" else _STEP_ELEMENTS // 16
    devices = [device] if device.type == "cuda" else []
    # Whether the speeds were known already mustn't change what the training draws.
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        host_memory = HostMemory(size, huge_pages=True, register=register)
        host = host_memory.tensor(0, (size,), torch.uint8)
        kernels.zero(host)
        host_memory.register()
        on_device = torch.empty(size, dtype=torch.uint8, device=device)
        other = torch.empty_like(on_device)
        h2d = _seconds(device, lambda: on_device.copy_(host, non_blocking=True))
        d2h = _seconds(device, lambda: host.copy_(on_device, non_blocking=True))
        step_work = _host_step(kernels, elements)
        step = _seconds(torch.device("cpu"), step_work)
        h2d_in_step, d2h_in_step = h2d, d2h
        if device.type == "cuda":
            with _repeated(step_work):
                h2d_in_step, d2h_in_step = _seconds_of_both(on_device, host)
        within = _seconds(device, lambda: other.copy_(on_device))
        host_memory.close()
        side = 8192 if device.type == "cuda" else 512
        # Products of zeros take less power and are faster.
        left = torch.randn(side, side, dtype=torch.bfloat16, device=device)
        product = _seconds(device, lambda: left @ left)
    return Machine(
        h2d_bytes=size / h2d,
        d2h_bytes=size / d2h,
        host_step_parameters=SHARE_IN_A_STEP * elements / step,
        device_bytes=2 * size / within,
        device_flops=2 * side**3 / product,
        h2d_share_in_step=min(1.0, h2d / h2d_in_step),
        d2h_share_in_step=min(1.0, d2h / d2h_in_step),
        step_overhead=STEP_OVERHEAD if device.type == "cuda" else 0.0,
    )


@contextlib.contextmanager
def _repeated(work: Callable[[], object]) -> Iterator[None]:
    """Does the work again and again on a thread of its own until the body ends."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            work()

    thread = threading.Thread(target=repeat, name="megatrain-step-speed")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _seconds_of_both(on_device: torch.Tensor, host: torch.Tensor) -> tuple[float, float]:
    """The medians of copies to the device and to the host that run at once, each many times; halves of the same buffers.

    Returns:
        Seconds of a copy of as many bytes as the buffers have, to the device and to the host.
    """
    middle = host.numel() // 2
    streams = (torch.cuda.Stream(on_device.device), torch.cuda.Stream(on_device.device))
    copies = ((on_device[:middle], host[:middle]), (host[middle:], on_device[middle:]))
    marks: tuple[list[torch.cuda.Event], list[torch.cuda.Event]] = ([], [])
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


def _host_step(kernels: HostKernels, elements: int) -> Callable[[], None]:
    """A step of the fused kernel on memory of its own, larger than the caches."""
    hi = torch.empty(elements, dtype=torch.bfloat16)
    gradient = torch.empty(elements, dtype=torch.bfloat16)
    residual = torch.empty(elements, dtype=torch.int16)
    exp_avg, exp_avg_sq = torch.empty(elements), torch.empty(elements)
    for tensor in (hi, gradient, residual, exp_avg, exp_avg_sq):
        kernels.zero(tensor)
    arguments = AdamArguments(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
    return lambda: kernels.adamw(hi, residual, FloatMoments(exp_avg, exp_avg_sq), gradient, arguments)
