"""Exceptions of megatrain_accelerate. Each message says what happened, the numbers, and the remedy."""

from __future__ import annotations


class MegatrainError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MegatrainError, ValueError):
    """A setting is unknown, malformed, or contradicts another one."""


class UnsupportedError(MegatrainError, NotImplementedError):
    """A valid request that this package can't honour (yet). The message says what to use instead."""


class HostMemoryError(MegatrainError, MemoryError):
    """The run doesn't fit the host memory, or the memory can't be registered with the GPU driver."""


class DiskError(MegatrainError, OSError):
    """The disk has no room for what is to be saved, or the folder can't be written to. ``errno`` says which."""


class StateError(MegatrainError, RuntimeError):
    """A call isn't possible in the present state of the model, the optimizer or another object."""


class StepWorkerError(MegatrainError, RuntimeError):
    """The optimizer's host thread failed. ``__cause__`` holds the original exception."""


class NonFiniteGradientError(MegatrainError, FloatingPointError):
    """The gradient norm was not finite for too many steps in a row."""


class PatchError(MegatrainError, RuntimeError):
    """A function of Accelerate or Transformers isn't what the integration was written for."""


class KernelError(MegatrainError, RuntimeError):
    """The compiled host kernels are missing, can't be loaded, or were called with tensors that don't fit them."""


class RankError(MegatrainError, RuntimeError):
    """The processes that train together do different things, or one of them has ended."""
