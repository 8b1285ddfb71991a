"""Measurements: the link each way and both at once, the host's memory and its AdamW, and what of these will bound a step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.doctor.finding import Finding, Value
from megatrain_accelerate.errors import HostMemoryError
from megatrain_accelerate.memory.host_limits import available_host_bytes
from megatrain_accelerate.memory.host_memory import HostMemory
from megatrain_accelerate.optim.kernel import AdamArguments, HostKernels
from megatrain_accelerate.optim.moments import FloatMoments
from megatrain_accelerate.planning.machine import (
    SHARE_IN_A_STEP,
    STEP_BYTES,
    Machine,
    kept_speeds,
    measured_machine,
    speeds_path,
)
from megatrain_accelerate.units import GB, GIB, MIB

SLOW_LINK_BYTES = 20e9
"""A second: PCIe Gen4 on 16 lanes gives 25 and more."""
SLOW_STEP_SHARE = 0.6
"""Of the plain loop on the same arrays: a healthy kernel is near 0.9."""
_SAME_SPEED = 0.75
"""Two measurements whose ratio is between this and its inverse don't contradict each other."""
_COPY_BYTES = 256 * MIB
_ROUNDS = 4
_MOST_ELEMENTS = 96 * MIB
_BYTES_AN_ELEMENT = 14


@dataclasses.dataclass(frozen=True)
class LinkSpeeds:
    """Bytes a second between registered host memory and the GPU."""

    h2d: float
    d2h: float
    both: float
    """Sum of both directions at once."""


@dataclasses.dataclass(frozen=True)
class HostSpeeds:
    """Of the host's kernels, with all threads."""

    step_parameters: float
    """Parameters a second that AdamW steps."""
    probe_bytes: float
    """Bytes a second of a plain loop with the same traffic: what the memory gives."""
    threads: int


def measure_link(device: torch.device) -> LinkSpeeds:
    """Times copies each way, and both at once on two streams.

    Raises:
        HostMemoryError: the driver refuses to register memory.
    """
    memory = HostMemory(2 * _COPY_BYTES, huge_pages=True, register=True)
    try:
        halves = [memory.tensor(part * _COPY_BYTES, (_COPY_BYTES,), torch.uint8) for part in range(2)]
        for half in halves:
            half.zero_()
        memory.register()
        there, other = (torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        streams = [torch.cuda.Stream(device) for _ in range(2)]

        def copies(down: bool, up: bool) -> None:
            if down:
                with torch.cuda.stream(streams[0]):
                    there.copy_(halves[0], non_blocking=True)
            if up:
                with torch.cuda.stream(streams[1]):
                    halves[1].copy_(other, non_blocking=True)

        h2d = _seconds(lambda: copies(True, False), device)
        d2h = _seconds(lambda: copies(False, True), device)
        both = _seconds(lambda: copies(True, True), device)
    finally:
        memory.close()
    return LinkSpeeds(_COPY_BYTES / h2d, _COPY_BYTES / d2h, 2 * _COPY_BYTES / both)


def measure_host(kernels: HostKernels, elements: int) -> HostSpeeds:
    """Times AdamW and a plain loop on the same arrays.

    Args:
        kernels: with the threads that training would have.
        elements: parameters; 14 bytes each are allocated.
    """
    sizes = {"hi": 2, "residual": 2, "gradient": 2, "exp_avg": 4, "exp_avg_sq": 4}
    dtypes = [torch.bfloat16, torch.int16, torch.bfloat16, torch.float32, torch.float32]
    memories = [HostMemory(size * elements, huge_pages=True, register=False) for size in sizes.values()]
    tensors = [memory.tensor(0, (elements,), dtype) for memory, dtype in zip(memories, dtypes, strict=True)]
    for tensor in tensors:
        kernels.zero(tensor)
    hi, residual, gradient, exp_avg, exp_avg_sq = tensors
    arguments = AdamArguments(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
    step = _seconds(lambda: kernels.adamw(hi, residual, FloatMoments(exp_avg, exp_avg_sq), gradient, arguments))
    probe = _seconds(lambda: kernels.stream_probe(hi, residual, exp_avg, exp_avg_sq, gradient))
    return HostSpeeds(elements / step, STEP_BYTES * elements / probe, kernels.threads)


def _seconds(work: Callable[[], object], device: torch.device | None = None) -> float:
    """The shortest of a few rounds after one that doesn't count."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        if device is not None:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device is not None:
            torch.cuda.synchronize(device)
        rounds.append(time.perf_counter() - start)
    return min(rounds[1:])


def link(device: torch.device, config: MegatrainConfig) -> list[Finding]:
    """The link's speeds, and whether the plan's are still the same. A driver that refuses to register memory is found here."""
    try:
        speeds = measure_link(device)
    except HostMemoryError as error:
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1), or megatrain_config.pin_memory: false (slower copies)"
        return [Finding("link", "broken", str(error), remedy)]
    return [link_finding(speeds), *_plan_speeds(device, config, speeds)]


def link_finding(speeds: LinkSpeeds) -> Finding:
    """What the speeds mean."""
    values: dict[str, Value] = {
        "h2d_gb_per_second": speeds.h2d / GB,
        "d2h_gb_per_second": speeds.d2h / GB,
        "both_gb_per_second": speeds.both / GB,
    }
    text = f"to the GPU {speeds.h2d / GB:.1f}, from it {speeds.d2h / GB:.1f}, both at once {speeds.both / GB:.1f} GB/s"
    if min(speeds.h2d, speeds.d2h) < SLOW_LINK_BYTES:
        remedy = (
            "look at nvidia-smi -q for the PCIe generation and lanes: fewer than the slot's? Run on the GPU's own socket "
            "(numactl); else take larger batches, so that layers compute longer than they are copied"
        )
        return Finding("link", "slow", f"{text}: slower than PCIe Gen4 on 16 lanes", remedy, values)
    if speeds.both < 1.2 * max(speeds.h2d, speeds.d2h):
        remedy = (
            "the host's memory or the slot carries one direction at a time; gradients and weights then wait for each other"
        )
        return Finding("link", "note", f"{text}: the directions get into each other's way", remedy, values)
    return Finding("link", "ok", text, values=values)


def host_speeds(has_gpu: bool) -> list[Finding]:
    """Speeds of the host's memory and AdamW."""
    kernels = HostKernels()
    try:
        # A machine without a GPU is looked at quickly.
        speeds = measure_host(kernels, _elements(_MOST_ELEMENTS if has_gpu else _MOST_ELEMENTS // 16))
    finally:
        kernels.close()
    return [host_finding(speeds, has_gpu)]


def _elements(most: int) -> int:
    """No more than an eighth of the free memory holds."""
    return max(1 << 20, min(most, available_host_bytes() // (8 * _BYTES_AN_ELEMENT)))


def host_finding(speeds: HostSpeeds, has_gpu: bool) -> Finding:
    """What the speeds mean."""
    share = STEP_BYTES * speeds.step_parameters / speeds.probe_bytes
    values: dict[str, Value] = {
        "host_step_g_parameters_per_second": speeds.step_parameters / 1e9,
        "dram_gb_per_second": speeds.probe_bytes / GB,
        "host_threads": speeds.threads,
    }
    text = (
        f"AdamW {speeds.step_parameters / 1e9:.2f} G parameters/s, memory {speeds.probe_bytes / GB:.0f} GB/s, with "
        f"{speeds.threads} threads"
    )
    if has_gpu and share < SLOW_STEP_SHARE:
        remedy = "more cores would help: lift limits on them, set megatrain_config.host_threads, end what else runs on them"
        return Finding("host speed", "slow", f"{text}: the cores bound AdamW, not the memory", remedy, values)
    return Finding("host speed", "ok", text, values=values)


def _plan_speeds(device: torch.device, config: MegatrainConfig, speeds: LinkSpeeds) -> list[Finding]:
    kernels = HostKernels(config.host_threads)
    try:
        path = speeds_path(device, kernels, config.pin_memory)
        machine = measured_machine(device, kernels, config.pin_memory)
        count = len(kept_speeds(path))
        step = measure_host(kernels, _elements(_MOST_ELEMENTS)).step_parameters
    finally:
        kernels.close()
    return [plan_finding(machine, speeds, step, str(path), count), bounds_finding(machine)]


def plan_finding(machine: Machine, speeds: LinkSpeeds, step_parameters: float, path: str, count: int) -> Finding:
    """Whether the speeds that the plan goes by still hold.

    Args:
        machine: those speeds.
        speeds: the link's now.
        step_parameters: a second, by the host's AdamW with nothing beside it; now.
        path: the file of the plan's speeds.
        count: of the measurements there, this process' among them if it made one; 0 if none could be kept.
    """
    values: dict[str, Value] = {f"plan_{name}": value for name, value in dataclasses.asdict(machine).items()}
    values["speeds_file"] = path
    pairs = (
        ("GB/s over the link", min(machine.h2d_bytes, machine.d2h_bytes), min(speeds.h2d, speeds.d2h)),
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


def bounds_finding(machine: Machine) -> Finding:
    """Below which batch a step of a streamed model is bound by what, by the operations and bytes of a parameter."""
    # A token's forward takes 2 operations a parameter; under it lie the copy of 2 bytes and, with clipping, AdamW.
    step_tokens = machine.device_flops / 2 / machine.host_step_parameters
    link_tokens = 2 / machine.h2d_bytes * machine.device_flops / 2
    tokens, bound = max((step_tokens, "AdamW on the host"), (link_tokens, "the link to the GPU"))
    values: dict[str, Value] = {"step_bound_below_tokens": step_tokens, "link_bound_below_tokens": link_tokens}
    text = (
        f"for a model that streams whole, {bound} bounds the forward of batches below about {tokens:,.0f} tokens "
        f"(AdamW {step_tokens:,.0f}, link {link_tokens:,.0f}); above, the GPU computes all the time"
    )
    remedy = (
        "larger batches, or gradient_accumulation_steps; what the plan keeps on the GPU needs neither (megatrain estimate "
        "MODEL says it for a model)"
    )
    return Finding("what limits training", "note", text, remedy, values)


def no_gpu() -> list[Finding]:
    """What to say on a machine without a GPU."""
    built = torch.version.cuda
    text = "none that torch can use: training runs on the CPU, as a stand-in for trying things out"
    if built is None:
        remedy = f"for a GPU: install a torch with CUDA; this one ({torch.__version__}) is built without"
    else:
        remedy = "for a GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES, and in a container --gpus all"
    return [Finding("GPU", "note", text, remedy, {"gpu": None})]


def unusable_gpu(error: Exception) -> list[Finding]:
    """What to say of a GPU that is there and can't be used: busy in exclusive mode, its fabric down."""
    text = f"it can't be used: {str(error).splitlines()[0]}"
    return [Finding("GPU", "broken", text, "check nvidia-smi: compute mode, fabric manager, driver", {"gpu": None})]


def gpu(device: torch.device) -> list[Finding]:
    """The GPU, and how much of its memory is free."""
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
