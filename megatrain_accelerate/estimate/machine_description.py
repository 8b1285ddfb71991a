"""The machine of an estimate: this one, as measured, or one that is described by public figures. Those are what makers state,
which no training reaches. Sources: NVIDIA's data sheets of GPUs for servers and workstations, and the architecture white
papers of GeForce RTX 30 (GA102), 40 (AD102) and 50 (GB202). Rates of bf16 products are dense ones with sums in fp32, which
is twice the fp32 rate on a GeForce. Memory is what the driver reports, which is less than the name says."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from argparse import Namespace

import psutil
import torch

from megatrain_accelerate.config import MegatrainConfig, usable_cpu_count
from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.kernels.host import HostKernels, default_thread_count
from megatrain_accelerate.plan.machine import (
    STEP_BYTES,
    STEP_OVERHEAD,
    USABLE_SHARE_OF_DEVICE,
    Machine,
    free_bytes,
    measured_machine,
)
from megatrain_accelerate.store.host_limits import available_host_bytes
from megatrain_accelerate.units import GB, GIB

DENSE_SHARE = 0.724
"""Share of the stated rate of dense bf16 products: 716 of 989 TFLOPS, measured on H200 (8192 x 8192 random numbers)."""
MEMORY_SHARE = 0.777
"""Share of the stated speed of device memory: 3.73 of 4.8 TB/s, measured by a copy on H200."""
H2D_SHARE, D2H_SHARE = 0.841, 0.862
"""Shares of the link's stated speed: 53.0 and 54.3 of 63.0 GB/s, measured on H200 with PCIe Gen5."""
H2D_SHARE_IN_STEP, D2H_SHARE_IN_STEP = 0.37, 0.52
"""Shares of these speeds that remain while the host steps: 35 and 48% on one server with 64 cores, 39 and 57% on another."""
STEP_SHARE_BESIDE_COPIES = 0.85
"""Share of the host step's speed that remains while activations are offloaded: 79 to 93% on a server with 16 cores."""
STEP_PARAMETERS_PER_THREAD = 0.41e9
"""Parameters per second that a thread of AdamW steps: 5.7 G/s with 14 threads in training, on server cores with AVX-512."""
PEER_SHARE = 0.5
"""Share of the stated speed between GPUs that an exchange of gradients sustains, with its sums in fp32. This is an assumption.
An all-reduce among four H100s with NVLink reached 355 of 450 GB/s each way."""
GPUS_OF_A_SOCKET = 4
"""GPUs per socket of a server, which has its own memory. Four processes on 64 cores together stepped 7.0 G parameters/s."""
CONTEXT_BYTES = GIB // 2
"""Device memory that CUDA's context takes."""

PCIE4_X8, PCIE4, PCIE5, NVLINK_C2C = 15.8e9, 31.5e9, 63.0e9, 450e9
"""Bytes per second each way of 16 lanes (unless named X8), and of GH200's link. 8 lanes of Gen5 are as fast as 16 of Gen4."""

SERVER_DRAM, DESKTOP_DRAM, GRACE_DRAM = 213e9, 60e9, 380e9
"""Bytes per second that a compiled loop gets from the memory of such a host. The server's was measured with H200 (8.2 G
parameters/s of 26 bytes). The others are three quarters of the data sheets': two channels of DDR5-5200, GH200's LPDDR5X."""


@dataclasses.dataclass(frozen=True)
class KnownGpu:
    """A GPU by its data sheet, and its usual host with cores per GPU. Memories and, each way, the link: bytes per second."""

    name: str
    memory_gib: float
    dense_flops: float
    memory_bytes: float
    link_bytes: float = PCIE5
    host_dram_bytes: float = SERVER_DRAM
    host_cores: int = 16
    sustained_flops: float | None = None
    """Rate of large bf16 products in a training, at the GPU's power limit. None if no training was measured."""
    shares_memory: bool = False
    """Whether GPU and host share one memory. A quarter of it is the GPU's unless the options say otherwise."""
    peer_bytes: float | None = None
    """Bytes per second each way to other GPUs over NVLink. None if these copies use the link to the host."""


KNOWN_GPUS = (
    KnownGpu("B200", 178.4, 2250e12, 8.0e12, peer_bytes=900e9),
    KnownGpu("H200", 139.8, 989.4e12, 4.8e12, sustained_flops=716e12, peer_bytes=450e9),
    KnownGpu("H100", 79.2, 989.4e12, 3.35e12, peer_bytes=450e9),
    KnownGpu("GH200", 94.5, 989.4e12, 4.0e12, NVLINK_C2C, GRACE_DRAM, 72, peer_bytes=450e9),
    KnownGpu("GB10", 119.6, 125e12, 0.273e12, 100e9, 200e9, 20, shares_memory=True),
    KnownGpu("A100-80", 79.2, 312e12, 2.039e12, PCIE4, peer_bytes=300e9),
    KnownGpu("A100-40", 39.4, 312e12, 1.555e12, PCIE4, peer_bytes=300e9),
    KnownGpu("L40S", 44.4, 362e12, 0.864e12, PCIE4),
    KnownGpu("A10", 22.5, 125e12, 0.6e12, PCIE4),
    KnownGpu("L4", 22.5, 121e12, 0.3e12, PCIE4),
    KnownGpu("RTXPRO6000", 95.6, 503.8e12, 1.792e12, PCIE5, DESKTOP_DRAM),
    KnownGpu("RTX6000ADA", 48.0, 364.2e12, 0.96e12, PCIE4, DESKTOP_DRAM),
    KnownGpu("A6000", 48.0, 154.8e12, 0.768e12, PCIE4, DESKTOP_DRAM),
    KnownGpu("RTX5090", 31.4, 209.5e12, 1.792e12, PCIE5, DESKTOP_DRAM),
    KnownGpu("RTX5080", 15.5, 112.6e12, 0.96e12, PCIE5, DESKTOP_DRAM),
    KnownGpu("RTX5070TI", 15.5, 87.9e12, 0.896e12, PCIE5, DESKTOP_DRAM),
    KnownGpu("RTX5070", 11.5, 61.7e12, 0.672e12, PCIE5, DESKTOP_DRAM),
    KnownGpu("RTX4090", 23.5, 165.2e12, 1.008e12, PCIE4, DESKTOP_DRAM),
    KnownGpu("RTX4080", 15.6, 97.5e12, 0.717e12, PCIE4, DESKTOP_DRAM),
    KnownGpu("RTX4070TI", 11.6, 80.2e12, 0.504e12, PCIE4, DESKTOP_DRAM),
    KnownGpu("RTX4070", 11.6, 58.3e12, 0.504e12, PCIE4, DESKTOP_DRAM),
    KnownGpu("RTX4060TI", 15.6, 44.1e12, 0.288e12, PCIE4_X8, DESKTOP_DRAM),
    KnownGpu("RTX3090", 23.6, 71.0e12, 0.936e12, PCIE4, DESKTOP_DRAM),
    KnownGpu("RTX3080", 9.6, 59.5e12, 0.76e12, PCIE4, DESKTOP_DRAM),
    KnownGpu("RTX3060", 11.7, 25.5e12, 0.36e12, PCIE4, DESKTOP_DRAM),
)


@dataclasses.dataclass
class MachineDescription:
    """Speeds and memories of one machine, or of each of several equal ones, with notes on their sources. A step may take
    ``gpu_bytes``. GPUs exchange ``exchange_bytes`` of gradients per second, and machines ``network_bytes`` each way."""

    gpu: str
    machine: Machine
    """The speeds that the process of one GPU has while those of all GPUs work."""
    gpu_bytes: int
    gpu_total_bytes: int
    host_bytes: int | None
    """Host memory that all processes may take. None if it isn't stated: then as much as the model's states need."""
    notes: list[str]
    gpus: int = 1
    exchange_bytes: float = math.inf
    machines: int = 1
    network_bytes: float = math.inf

    @property
    def all_gpus(self) -> int:
        return self.machines * self.gpus

    @property
    def gpus_text(self) -> str:
        text = self.gpu if self.gpus == 1 else f"{self.gpus} x {self.gpu}"
        return text if self.machines == 1 else f"{self.machines} machines with {text}"


def describe_machine(options: Namespace, config: MegatrainConfig) -> MachineDescription:
    """Returns the machine that the command's options name. Raises a ConfigError if there is no GPU here and none is described,
    if options are missing or exclude each other, or if a memory is too small or larger than the GPU's."""
    gpus, machines, network_bytes = options.gpus, options.machines, options.network_bytes
    for option, value, count, needs in (
        ("--peer-link", options.peer_bytes, gpus, "--gpus"),
        ("--network", network_bytes, machines, "--machines"),
    ):
        if value is not None and count == 1:
            raise ConfigError(f"{option} is a speed between several, and {needs} is 1: raise {needs}, or leave {option} out")
    is_this_one = options.gpu is None and options.dense_flops is None
    found = _this_machine(options, config) if is_this_one else _described(options, config)
    found.gpus, found.machines = gpus, machines
    if gpus > 1:
        whole = found.machine  # its host step is that of the whole machine
        peer_bytes = getattr(known_gpu(found.gpu), "peer_bytes", None) or whole.h2d_bytes / H2D_SHARE
        found.exchange_bytes = options.peer_bytes or PEER_SHARE * peer_bytes
        found.machine = dataclasses.replace(whole, host_step_parameters=whole.host_step_parameters / gpus)
        source = "as the option says" if options.peer_bytes else f"{PEER_SHARE:.0%} of {peer_bytes / GB:.0f}, assumed"
        exchange = f"exchange gradients at {found.exchange_bytes / GB:.0f} GB/s each way ({source})"
        found.notes.append(f"{gpus} processes share the host's step, and {exchange}")
    if machines > 1:
        if network_bytes is None:
            raise ConfigError(f"--machines is {machines}: give --network, GB/s that one of them sustains each way")
        found.network_bytes = network_bytes
        found.notes.append(
            f"a forecast of what isn't there: training on several machines is refused. {machines} would exchange gradients "
            f"and stepped weights at {network_bytes / GB:g} GB/s each way, as the option says; memory and step are of each"
        )
    if config.gpu_memory_bytes is not None:
        most = found.gpu_total_bytes - CONTEXT_BYTES
        if config.gpu_memory_bytes > most:
            raise ConfigError(
                f"megatrain_config.gpu_memory_gib is {config.gpu_memory_gib:g}, and the GPU ({found.gpu}) has "
                f"{most / GIB:.1f} GiB beside CUDA's context; lower it to that or less, or leave it out"
            )
        found.gpu_bytes = config.gpu_memory_bytes
    if config.host_memory_gib is not None:
        most = int(config.host_memory_gib * GIB) * gpus
        found.host_bytes = min(most, options.host_memory_bytes or most)
    return found


def _this_machine(options: Namespace, config: MegatrainConfig) -> MachineDescription:
    if not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU here; describe one, for example --gpu H200 --host-memory 1.5TiB --cores 64")
    if options.cores is not None:
        raise ConfigError("--cores is of another host than this one; name its speed by --host-step, or the machine by --gpu")
    device = torch.device("cuda", torch.cuda.current_device())
    with contextlib.closing(HostKernels(config.host_threads)) as kernels:
        machine = measured_machine(device, kernels)
    total = torch.cuda.mem_get_info(device)[1]
    name = torch.cuda.get_device_name(device)
    return MachineDescription(
        gpu=name,
        machine=_changed(at_the_power_limit(machine, name), options),
        gpu_bytes=int(USABLE_SHARE_OF_DEVICE * (options.gpu_memory_bytes or free_bytes(device))),
        gpu_total_bytes=options.gpu_memory_bytes or total,
        host_bytes=options.host_memory_bytes or available_host_bytes() + psutil.Process().memory_info().rss,
        notes=[f"speeds that no option names are as measured on this machine{', by one process' * (options.gpus > 1)}"],
    )


def known_gpu(name: str) -> KnownGpu | None:
    """Returns the GPU of a name in any case, as its maker or torch spells it, or None."""

    def plain(name: str) -> str:
        kept = re.sub("NVIDIA|GEFORCE|HBM[0-9]E?|SXM[0-9]|GB", "", re.sub("[^A-Z0-9]", "", name.upper()))
        return {"A100": "A10080", "H10080": "H100", "GH200480": "GH200"}.get(kept, kept)

    return next((gpu for gpu in KNOWN_GPUS if plain(gpu.name) == plain(name)), None)


def at_the_power_limit(machine: Machine, gpu: str) -> Machine:
    """Returns the speeds, with products no faster than ``gpu`` (torch's name of it) sustains. A large product is timed for a
    few ms, whereas in a training the power limit sets the clock. On H200s that product reaches 716 to 795 TFLOPS depending
    on the machine, and trainings are equally fast."""
    most = getattr(known_gpu(gpu), "sustained_flops", None) or machine.device_flops
    return dataclasses.replace(machine, device_flops=min(machine.device_flops, most))


def _described(options: Namespace, config: MegatrainConfig) -> MachineDescription:
    gpu = _unknown_gpu(options) if options.gpu is None else known_gpu(options.gpu)
    if gpu is None:
        raise ConfigError(
            f"--gpu {options.gpu!r} isn't known; known are {', '.join(gpu.name for gpu in KNOWN_GPUS)}. Describe another by "
            "--gpu-memory, --tflops, --gpu-bandwidth and --link, without --gpu"
        )
    gpus = options.gpus
    if gpu.shares_memory and gpus > 1:
        raise ConfigError(f"--gpus is {gpus}, and {gpu.name}, which shares its host's memory, is one GPU; leave it out")
    sockets = {DESKTOP_DRAM: 1, GRACE_DRAM: gpus}.get(gpu.host_dram_bytes, -(-gpus // GPUS_OF_A_SOCKET))
    dram_bytes = sockets * gpu.host_dram_bytes
    # Copies to all GPUs together are no faster than the memory that they read.
    link_bytes = min(gpu.link_bytes, dram_bytes / (gpus * H2D_SHARE))
    cores = options.cores or gpu.host_cores * (gpus if options.gpu else 1)
    whole = int(gpu.memory_gib * GIB)
    total = options.gpu_memory_bytes or (whole // 4 if gpu.shares_memory else whole)
    host_bytes = options.host_memory_bytes
    if gpu.shares_memory:
        host_bytes = host_bytes or whole - total
        if total + host_bytes > whole:
            raise ConfigError(
                f"--gpu-memory {total / GIB:.1f} and --host-memory {host_bytes / GIB:.1f} GiB are more than the "
                f"{gpu.memory_gib:.1f} GiB that {gpu.name} has for both; lower one of the two"
            )
    if total <= CONTEXT_BYTES:
        raise ConfigError(
            f"--gpu-memory {total / GIB:.2f} GiB: CUDA's context alone takes {CONTEXT_BYTES / GIB:.1f}; raise it"
        )
    machine = Machine(
        h2d_bytes=H2D_SHARE * link_bytes,
        d2h_bytes=D2H_SHARE * link_bytes,
        host_step_parameters=gpus * host_step_parameters(max(1, cores // gpus), dram_bytes / gpus, config.host_threads),
        device_bytes=MEMORY_SHARE * gpu.memory_bytes,
        device_flops=DENSE_SHARE * gpu.dense_flops,
        step_overhead=STEP_OVERHEAD,
        h2d_share_in_step=H2D_SHARE_IN_STEP,
        d2h_share_in_step=D2H_SHARE_IN_STEP,
        step_share_beside_copies=STEP_SHARE_BESIDE_COPIES,
    )
    notes = []
    if None in (options.dense_flops, options.device_bytes, options.link_bytes):
        notes.append("speeds that no option names are estimated from public figures, by what one H200 reaches of its own")
    if options.host_step_parameters is None:
        at_work = "" if config.host_threads is None else f", host_threads {config.host_threads}"
        notes.append(f"host step estimated from {cores} cores{at_work} and {dram_bytes / GB:.0f} GB/s of DRAM")
    return MachineDescription(
        gpu=gpu.name,
        machine=_changed(machine, options),
        gpu_bytes=int(USABLE_SHARE_OF_DEVICE * (total - CONTEXT_BYTES)),
        gpu_total_bytes=total,
        host_bytes=host_bytes,
        notes=notes,
    )


def _unknown_gpu(options: Namespace) -> KnownGpu:
    needed = {
        "--gpu-memory": options.gpu_memory_bytes,
        "--tflops": options.dense_flops,
        "--gpu-bandwidth": options.device_bytes,
        "--link": options.link_bytes,
    }
    if missing := [name for name, value in needed.items() if value is None]:
        raise ConfigError(f"a GPU that isn't in the table needs {', '.join(missing)} too; or name a known one by --gpu")
    memory, dense, device, link = needed.values()
    # _changed() sets the options' speeds. The link has its own before, too, so that its share during a step isn't scaled.
    return KnownGpu("described GPU", memory / GIB, dense, device, link / H2D_SHARE, host_cores=usable_cpu_count())


def _changed(machine: Machine, options: Namespace) -> Machine:
    """Returns the speeds with those that the options name, which are sustained and taken as they are."""
    h2d, d2h = options.link_bytes or machine.h2d_bytes, options.link_bytes or machine.d2h_bytes
    return dataclasses.replace(
        machine,
        h2d_bytes=h2d,
        d2h_bytes=d2h,
        # The host's memory leaves the same bytes per second to copies, whatever the link.
        h2d_share_in_step=min(1.0, machine.h2d_share_in_step * machine.h2d_bytes / h2d),
        d2h_share_in_step=min(1.0, machine.d2h_share_in_step * machine.d2h_bytes / d2h),
        host_step_parameters=options.host_step_parameters or machine.host_step_parameters,
        device_bytes=options.device_bytes or machine.device_bytes,
        device_flops=options.dense_flops or machine.device_flops,
    )


def host_step_parameters(cores: int, dram_bytes: float, most_threads: int | None = None) -> float:
    """Returns the parameters per second that the host's AdamW steps, bounded by its threads or by the DRAM."""
    threads = min(default_thread_count(cores), most_threads or cores)
    return min(STEP_PARAMETERS_PER_THREAD * threads, dram_bytes / STEP_BYTES)
