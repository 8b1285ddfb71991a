"""The fused host kernels: AdamW on split fp32 masters, and the few loops around it, on a pool of C++ threads.

The **split master** is a pair (bf16 weight, int16 residual) that replaces an fp32 weight and holds every fp32 bit pattern
exactly (``csrc/split_master.h``).

**What is bit-equal to torch.** Weights, ``exp_avg`` and ``exp_avg_sq`` equal those of ``torch.optim.AdamW`` and
``torch.optim.Adam`` with ``foreach=False, fused=False`` on fp32 CPU tensors, up to one operation: the square root. This was
measured with torch 2.13 on x86-64, whose AVX2 and AVX-512 kernels agree bit for bit, in vectors and tails: ``lerp_``,
``addcmul_`` and ``add(alpha=)`` use one fused multiply-add each, ``addcdiv_`` and ``div`` none. Division by a scalar is a true
division. Scalars are computed in double and rounded to float once.

torch's ``sqrt`` is MKL's, which is 1 ulp off for some arguments (for 1 to 20%, depending on the processor). The kernels here
round square roots correctly (IEEE 754), as torch's own ``fused=True`` kernel does. With a ``Tensor.sqrt`` that does so, too,
weights and both moments are equal. With MKL's, moments are equal under AdamW, but not under Adam's L2 penalty, which adds
weights to gradients, and a weight whose square root was off differs by about an ulp.

With ``ATEN_CPU_CAPABILITY=default`` (no FMA) torch's results differ from its own with AVX2, and so from the kernels' results,
which don't depend on the number of threads, on chunk boundaries or on the instruction set.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import pathlib
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from megatrain_accelerate.config import usable_cpu_count
from megatrain_accelerate.errors import ConfigError, KernelError
from megatrain_accelerate.kernels.moments import BLOCK_ELEMENTS, Int8Moments, Moments, block_count

LIBRARY_PATH = pathlib.Path(__file__).with_name("_host_kernels.so")
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")

_BF16, _INT16 = torch.bfloat16, torch.int16
_INTERFACE_VERSION = 9
_REBUILD = "build it with `pip install --force-reinstall --no-deps .` in a checkout of this package (needs a C++ compiler)"


class AdamConstants(ctypes.Structure):
    """The constants of one step as C++ takes them: the fields of ``AdamConstants`` in ``csrc/adamw.h``, in the same order.
    ctypes rounds each double to float."""

    _names = "gradient_factor decay l2 one_minus_beta1 beta2 one_minus_beta2 correction2_sqrt eps negative_step_size"
    _fields_ = tuple((name, ctypes.c_float) for name in _names.split())


@dataclasses.dataclass(frozen=True)
class AdamArguments:
    """The constants of one optimizer step. Raises a ``ConfigError`` for one that ``torch.optim.AdamW`` wouldn't accept."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Counted from 1: the exponent of the bias correction."""
    clip_factor: float = 1.0
    """Multiplies the gradient, in fp32 and before the gradient is used, as if ``clip_grad_norm_`` had scaled it."""
    decoupled: bool = True
    """True: AdamW, ``weight *= 1 - lr * weight_decay``. False: Adam, ``grad += weight_decay * weight``."""
    maximize: bool = False
    """Ascend instead of descend: the gradient's sign is flipped after clipping."""

    def __post_init__(self) -> None:
        ends = {**dict.fromkeys(("lr", "eps", "weight_decay", "clip_factor"), math.inf), "beta1": 1.0, "beta2": 1.0}
        for name, end in ends.items():
            if not 0.0 <= (value := getattr(self, name)) < end:
                raise ConfigError(f"AdamArguments.{name} must be finite and in [0, {end}), got {value}")
        if self.step < 1:
            raise ConfigError(f"AdamArguments.step counts from 1, got {self.step}")

    @property
    def rounding_seed(self) -> int:
        """Seed of the stochastic rounding of bf16 and 8-bit moments: 32 bits that differ from step to step."""
        return (self.step * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF

    @functools.cached_property
    def constants(self) -> AdamConstants:
        """The scalars of the kernels' loop, computed in double in the order of ``torch/optim/adam.py``, then rounded once."""
        return AdamConstants(
            gradient_factor=-self.clip_factor if self.maximize else self.clip_factor,
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            l2=0.0 if self.decoupled else self.weight_decay,
            one_minus_beta1=1 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1 - self.beta2,
            correction2_sqrt=(1 - self.beta2**self.step) ** 0.5,
            eps=self.eps,
            negative_step_size=-(self.lr / (1 - self.beta1**self.step)),
        )


class ParameterStep(NamedTuple):
    """The AdamW or Adam step of N adjacent elements. All tensors have N elements, but for the scales of 8-bit moments."""

    weight: torch.Tensor
    """bfloat16 if there is a ``residual``, else float32."""
    residual: torch.Tensor | None
    """int16, the low half of the fp32 master join(weight, residual)."""
    moments: Moments
    grad: torch.Tensor
    """In the weight's dtype."""
    arguments: AdamArguments
    grad_residual: torch.Tensor | None = None
    """int16, if the gradient is the fp32 sum join(grad, grad_residual)."""
    first_element: int = 0
    """Index of the first element in its unit, for the stochastic rounding. With 8-bit moments a block begins there."""


def default_thread_count(cpus: int | None = None) -> int:
    """Number of CPUs that this process may use (or ``cpus``), less two for launching and copies if it is more than four."""
    cpus = usable_cpu_count() if cpus is None else cpus
    return cpus - 2 if cpus > 4 else max(1, cpus)


class HostKernels:
    """The compiled kernels and the threads that run them.

    All tensors are contiguous, on the CPU, of any shape. The tensors of one call have the same number of elements N, from 0 to
    beyond 2**32, and don't overlap. Each call returns when the work is done. Meanwhile the GIL is free. Calls from several
    threads are served one after the other. After a fork the child computes alone, on its calling thread. Autograd doesn't see
    the writes: no version counter moves.

    ``threads``: how many work on a call, the caller included, by default :func:`default_thread_count`. ``instruction_set``: a
    name in :data:`INSTRUCTION_SETS`, for tests, by default the best that torch uses here. Raises a ``KernelError`` if the
    library is missing, stale or can't be loaded, the machine lacks the instruction set, or the threads can't be started.
    Methods raise a ``KernelError`` for a tensor of the wrong dtype, device, layout or length, and after :meth:`close`.
    """

    def __init__(self, threads: int | None = None, instruction_set: str | None = None) -> None:
        self.threads = default_thread_count() if threads is None else threads
        self._library = _library(LIBRARY_PATH)
        # torch looks for just what these kernels need: FMA with AVX2; BW, DQ and VL of AVX-512. The environment variable
        # ATEN_CPU_CAPABILITY lowers what torch finds.
        capability = torch.backends.cpu.get_cpu_capability().lower()
        best = INSTRUCTION_SETS.index(capability) if capability in INSTRUCTION_SETS else 0
        self.instruction_set = instruction_set or INSTRUCTION_SETS[best]
        chosen = INSTRUCTION_SETS.index(self.instruction_set)
        if chosen > best:
            raise KernelError(f"this machine can't run {instruction_set!r} kernels; its best are {INSTRUCTION_SETS[best]!r}")
        handle = self._library.megatrain_create(self.threads, chosen)
        if handle is None:
            raise KernelError(
                f"could not start {self.threads} threads for the host kernels; lower megatrain_config.host_threads "
                "or raise the limit of threads (`ulimit -u`, the container's pids limit)"
            )
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p(handle)
        self._finalizer = weakref.finalize(self, self._library.megatrain_destroy, self._handle)
        # At exit the kernels aren't destroyed: a step may still run then, and the system frees the memory anyway.
        self._finalizer.atexit = False

    def close(self) -> None:
        """Ends the threads. No call may be in progress. Later calls raise. Closing twice is fine."""
        self._handle = None
        self._finalizer()

    def adamw(self, *step: Any, **others: Any) -> None:
        """Runs one AdamW (or Adam) step in place and in one pass. The arguments are the fields of :class:`ParameterStep`.
        ``csrc/adamw.h`` has its memory traffic."""
        weight, residual, moments, grad, arguments, grad_residual, first_element = ParameterStep(*step, **others)
        dtype = torch.float32 if residual is None else _BF16
        exp_avg, exp_avg_sq, *scales = moments
        exp_avg_dtype = _BF16 if exp_avg.dtype == _BF16 else torch.float32
        exp_avg_sq_dtype, moment_bits = exp_avg.dtype, 8 * exp_avg.itemsize
        if isinstance(moments, Int8Moments):
            exp_avg_dtype, exp_avg_sq_dtype = torch.int8, torch.uint8
            if first_element % BLOCK_ELEMENTS:
                raise KernelError(f"first_element is {first_element}; 8-bit moments need a multiple of {BLOCK_ELEMENTS}")
            to_check = {name: (getattr(moments, name), torch.float32) for name in ("exp_avg_scale", "exp_avg_sq_scale")}
            count, found = exp_avg.numel(), self._check(**to_check)
            if found != block_count(count):
                raise KernelError(f"8-bit moments of {count:,} elements have {found:,} scales, not {block_count(count):,}")
        self._call(
            "adamw",
            *([ctypes.c_void_p(scale.data_ptr()) for scale in scales] or [ctypes.c_void_p()] * 2),
            moment_bits,
            arguments.constants,
            first_element,
            arguments.rounding_seed,
            weight=(weight, dtype),
            residual=(residual, _INT16),
            exp_avg=(exp_avg, exp_avg_dtype),
            exp_avg_sq=(exp_avg_sq, exp_avg_sq_dtype),
            grad=(grad, dtype),
            grad_residual=(grad_residual, _INT16),
        )

    def adamw_of_many(self, steps: Iterable[ParameterStep]) -> None:
        """Runs each of these steps."""
        for step in steps:
            self.adamw(*step)

    def accumulate(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """``dst += src``, both (N) bfloat16 or both (N) float32. bfloat16 is rounded as by torch's ``add_``."""
        dtype = _BF16 if dst.dtype == _BF16 else torch.float32
        self._call("accumulate", dtype.itemsize, 0, dst=(dst, dtype), residual=(None, _INT16), src=(src, dtype))

    def accumulate_split(self, hi: torch.Tensor, residual: torch.Tensor, src: torch.Tensor, has_residual: bool) -> None:
        """``sum += src`` in fp32, with the arithmetic of ``csrc/split_master.h``. The sum is join(hi, residual), (N) bfloat16
        and (N) int16. Without ``has_residual`` the sum so far is ``hi`` alone, and ``residual`` is written without being read.
        ``src`` is (N) bfloat16."""
        self._call("accumulate", 2, int(has_residual), hi=(hi, _BF16), residual=(residual, _INT16), src=(src, _BF16))

    def square_sum(self, values: torch.Tensor, residual: torch.Tensor | None = None) -> float:
        """The sum of squares of (N) bfloat16 or (N) float32 values, or of the fp32 sums join(values, residual) of (N) bfloat16
        and (N) int16, added up in double precision in a fixed order."""
        dtype = _BF16 if residual is not None or values.dtype == _BF16 else torch.float32
        return float(self._call("square_sum", dtype.itemsize, values=(values, dtype), residual=(residual, _INT16)))

    def split(self, master_fp32: torch.Tensor, hi: torch.Tensor, residual: torch.Tensor) -> None:
        """Writes the split of (N) float32 masters to (N) bfloat16 ``hi`` and (N) int16 ``residual``."""
        self._call("split", master_fp32=(master_fp32, torch.float32), hi=(hi, _BF16), residual=(residual, _INT16))

    def join(self, hi: torch.Tensor, residual: torch.Tensor, master_fp32_out: torch.Tensor) -> None:
        """Writes the (N) float32 masters of which (N) bfloat16 ``hi`` and (N) int16 ``residual`` are the split."""
        self._call("join", hi=(hi, _BF16), residual=(residual, _INT16), master_fp32_out=(master_fp32_out, torch.float32))

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copies (N) ``src`` to (N) ``dst`` of the same dtype, on all threads."""
        self._call("fill", ctypes.c_int64(dst.element_size()), dst=(dst, dst.dtype), src=(src, dst.dtype))

    def zero(self, tensor: torch.Tensor) -> None:
        """Fills a tensor of any dtype with zero bytes, on all threads. Also used to make the pages of new memory, which the
        system does at the first touch. The kernel ``fill`` writes zeros if its source is null."""
        self._call("fill", ctypes.c_int64(tensor.element_size()), tensor=(tensor, tensor.dtype), source=(None, tensor.dtype))

    def _call(self, function: str, *others: Any, **tensors: tuple[torch.Tensor | None, torch.dtype]) -> Any:
        """Calls a C function with pointers to the tensors (null for None), their length and ``others``. ctypes passes the low
        32 bits of an integer. Only ``first_element`` may have more: the kernels use it modulo 2**32."""
        count = ctypes.c_int64(self._check(**tensors))
        pointers = (ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor, _ in tensors.values())
        return getattr(self._library, f"megatrain_{function}")(self._handle, *pointers, count, *others)

    def _check(self, **tensors: tuple[torch.Tensor | None, torch.dtype]) -> int:
        """Returns the common length N. Raises a ``KernelError`` for what C++ can't check: dtype, device, layout, length."""
        if self._handle is None:
            raise KernelError("the host kernels are closed; make a new HostKernels")
        lengths: dict[str, int] = {}
        for name, (tensor, dtype) in tensors.items():
            if tensor is None:
                continue
            if tensor.dtype != dtype:
                raise KernelError(f"{name} must be {dtype}, got {tensor.dtype}")
            if tensor.device.type != "cpu":
                raise KernelError(f"{name} must be in host memory, got a tensor on {tensor.device}; copy it first")
            if not tensor.is_contiguous():
                raise KernelError(
                    f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}; "
                    "pass the flat buffer or tensor.contiguous()"
                )
            lengths[name] = tensor.numel()
            first_name, first = next(iter(lengths.items()))
            if lengths[name] != first:
                raise KernelError(f"{name} has {lengths[name]:,} elements and {first_name} has {first:,}; they must agree")
        return first


def memory_fence() -> None:
    """A memory fence, for other processes too. Whoever sees a write of this thread after the fence also sees its writes before
    the fence. What this thread reads after the fence isn't older than what it read before."""
    _library(LIBRARY_PATH).megatrain_fence()


@functools.cache
def _library(path: pathlib.Path) -> Any:
    """Opens the library. Raises a ``KernelError`` if it is missing, can't be loaded, or has another interface version."""
    if not path.exists():
        raise KernelError(f"the compiled host kernels are missing: no file {path}. Remedy: {_REBUILD}")
    try:
        library = ctypes.CDLL(str(path))
        version = library.megatrain_interface_version()
    except (OSError, AttributeError) as error:
        raise KernelError(f"the compiled host kernels can't be loaded: {error}. Remedy: {_REBUILD}") from error
    if version != _INTERFACE_VERSION:
        raise KernelError(
            f"the compiled host kernels have interface version {version}, this package needs {_INTERFACE_VERSION}: "
            f"they are from another build. Remedy: {_REBUILD}"
        )
    library.megatrain_create.restype = ctypes.c_void_p
    library.megatrain_square_sum.restype = ctypes.c_double
    return library
