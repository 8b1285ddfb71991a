"""Measurements: the link each way and both at once, the host's memory and its AdamW, and what of these will bound a step."""

from __future__ import annotations

import contextlib
import dataclasses

import torch

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.doctor.checks import BYTES_A_PARAMETER, Finding, Value
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
    seconds_of,
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
_MOST_ELEMENTS = 96 * MIB


def measure_link(device: torch.device) -> tuple[float, float, float]:
    """Bytes a second from registered host memory to the GPU, from it, and the sum of both at once on two streams.

    Raises:
        HostMemoryError: the driver refuses to register memory.
    """
    memory = HostMemory(2 * _COPY_BYTES, huge_pages=True, register=True)
    try:
        down, up = (memory.tensor(part * _COPY_BYTES, (_COPY_BYTES,), torch.uint8).zero_() for part in range(2))
        memory.register()
        there, other = (torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        to_gpu = (torch.cuda.Stream(device), there, down)
        from_gpu = (torch.cuda.Stream(device), up, other)

        def seconds(*copies: tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]) -> float:
            def work() -> None:
                for stream, target, source in copies:
                    with torch.cuda.stream(stream):
                        target.copy_(source, non_blocking=True)

            return seconds_of(device, work, min)

        h2d, d2h, both = seconds(to_gpu), seconds(from_gpu), seconds(to_gpu, from_gpu)
    finally:
        memory.close()
    return _COPY_BYTES / h2d, _COPY_BYTES / d2h, 2 * _COPY_BYTES / both


def measure_host(kernels: HostKernels, elements: int) -> tuple[float, float]:
    """Parameters a second that AdamW steps with all threads, and bytes a second of a plain loop on the same arrays, with the
    same traffic: what the memory gives."""
    dtypes = (torch.bfloat16, torch.int16, torch.bfloat16, torch.float32, torch.float32)
    memories = [HostMemory(dtype.itemsize * elements, huge_pages=True, register=False) for dtype in dtypes]
    tensors = [memory.tensor(0, (elements,), dtype) for memory, dtype in zip(memories, dtypes, strict=True)]
    for tensor in tensors:
        kernels.zero(tensor)
    hi, residual, gradient, exp_avg, exp_avg_sq = tensors
    arguments = AdamArguments(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
    moments, cpu = FloatMoments(exp_avg, exp_avg_sq), torch.device("cpu")
    step = seconds_of(cpu, lambda: kernels.adamw(hi, residual, moments, gradient, arguments), min)
    probe = seconds_of(cpu, lambda: kernels.stream_probe(hi, residual, exp_avg, exp_avg_sq, gradient), min)
    return elements / step, STEP_BYTES * elements / probe


def link(device: torch.device, config: MegatrainConfig) -> list[Finding]:
    """The link's speeds, and whether the plan's are still the same. A driver that refuses to register memory is found here."""
    try:
        speeds = measure_link(device)
    except HostMemoryError as error:
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1), or megatrain_config.pin_memory: false (slower copies)"
        return [Finding("link", "broken", str(error), remedy)]
    with contextlib.closing(HostKernels(config.host_threads)) as kernels:
        path = speeds_path(device, kernels, config.pin_memory)
        machine = measured_machine(device, kernels, config.pin_memory)
        count = len(kept_speeds(path))
        step, _ = measure_host(kernels, _elements(_MOST_ELEMENTS))
    slower = min(speeds[:2])
    return [link_finding(*speeds), plan_finding(machine, slower, step, str(path), count), bounds_finding(machine)]


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
        speeds = measure_host(kernels, _elements(_MOST_ELEMENTS if has_gpu else _MOST_ELEMENTS // 16))
        return [host_finding(*speeds, kernels.threads, has_gpu)]


def _elements(most: int) -> int:
    """No more than an eighth of the free memory holds."""
    return max(1 << 20, min(most, available_host_bytes() // (8 * BYTES_A_PARAMETER)))


def host_finding(step_parameters: float, probe_bytes: float, threads: int, has_gpu: bool) -> Finding:
    share = STEP_BYTES * step_parameters / probe_bytes
    step, dram = step_parameters / 1e9, probe_bytes / GB
    values = {"host_step_g_parameters_per_second": step, "dram_gb_per_second": dram, "host_threads": threads}
    text = f"AdamW {step:.2f} G parameters/s, memory {dram:.0f} GB/s, with {threads} threads"
    if has_gpu and share < SLOW_STEP_SHARE:
        remedy = "more cores would help: lift limits on them, set megatrain_config.host_threads, end what else runs on them"
        return Finding("host speed", "slow", f"{text}: the cores bound AdamW, not the memory", remedy, values)
    return Finding("host speed", "ok", text, values=values)


def plan_finding(machine: Machine, link_bytes: float, step_parameters: float, path: str, count: int) -> Finding:
    """Whether the speeds that the plan goes by (``machine``) still hold.

    Now the link moves ``link_bytes`` a second in its slower direction, and the host's AdamW steps ``step_parameters`` with
    nothing beside it. ``count`` is that of the measurements in the file at ``path``, 0 if none could be kept.
    """
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


def bounds_finding(machine: Machine) -> Finding:
    """Below which batch a step of a streamed model is bound by what, by the operations and bytes of a parameter."""
    # A token's forward takes 2 operations a parameter; under it lie the copy of 2 bytes and, with clipping, AdamW.
    step_tokens = machine.device_flops / 2 / machine.host_step_parameters
    link_tokens = 2 / machine.h2d_bytes * machine.device_flops / 2
    tokens, bound = max((step_tokens, "AdamW on the host"), (link_tokens, "the link to the GPU"))
    values = {"step_bound_below_tokens": step_tokens, "link_bound_below_tokens": link_tokens}
    text = (
        f"for a model that streams whole, {bound} bounds the forward of batches below about {tokens:,.0f} tokens "
        f"(AdamW {step_tokens:,.0f}, link {link_tokens:,.0f}); above, the GPU computes all the time"
    )
    remedy = (
        "larger batches, or gradient_accumulation_steps; what the plan keeps on the GPU needs neither (megatrain estimate "
        "MODEL says it for a model)"
    )
    return Finding("what limits training", "note", text, remedy, values)


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
