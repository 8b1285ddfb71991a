"""The settings of a run: one dataclass, filled from the yaml section ``megatrain_config`` or by ``enable()``."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.units import GIB

_MINIMA = {
    **dict.fromkeys(("host_threads", "micro_batch_size", "expert_parts"), 1),
    **dict.fromkeys(("token_tile", "kept_layers", "offloaded_layers", "kept_attention"), 0),
    **dict.fromkeys(("device_layers", "device_states"), -1),
    "slots": 2,
}
"""The smallest value of each whole number. None and ``auto`` are allowed where they are the default."""
_GONE = {
    "gradient_slots": "two were always enough; remove the key",
    "max_nonfinite_steps": "the fifth such step in a row stops a run; remove the key",
    "pin_memory": "memory is page-locked wherever there is a GPU; remove the key",
    "resident_layers": "it was predicted to gain less than 1% of a step; placement.device_layers keeps whole layers there",
    "huge_pages": "the store asks for huge pages in any case; remove the key",
}
"""Removed settings that have no successor of a similar name, and what became of them."""
CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    "step_schedule": ("auto", "deferred", "backward", "serial"),
    "accumulation_dtype": ("fp32", "bf16"),
    "moments_dtype": ("fp32", "bf16", "int8"),
    "host_gradients": ("kept", "passing"),
    "evaluation_weights": ("auto", "stream", "resident"),
    "compile_layers": ("auto", True, False),
    "join_micro_batches": ("auto", True, False),
    "tiled_loss": (True, False),
    "offloaded_inputs": (True, False, None),
}


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one was most likely meant to be, or None if all differ too much."""
    return next(iter(difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)), None)


def _require_known(key: object, kind: type, section: str) -> None:
    """Raises :class:`ConfigError` if ``kind``, the class of the settings in ``section``, has no field of this name."""
    known = [field.name for field in dataclasses.fields(kind)]
    if key in known:
        return
    inner = [field.name for field in dataclasses.fields(PlacementSettings)] if kind is MegatrainConfig else []
    meant = nearest(str(key), [*known, *inner])
    hint = f"did you mean {f'placement.{meant}' if meant in inner else meant!r}? " if meant else ""
    raise ConfigError(f"{section} has no setting {key!r}; {hint}known settings: {', '.join(known)}")


def _require_valid(settings: MegatrainConfig | PlacementSettings, section: str) -> None:
    """Raises :class:`ConfigError` if a value, taken by itself, has the wrong type or is out of range."""
    for field in dataclasses.fields(settings):
        default: Any = field.default
        value, name = getattr(settings, field.name), f"{section}.{field.name}"
        known, minimum = CHOICES.get(field.name, ()), _MINIMA.get(field.name)
        if known and not any(type(value) is type(choice) and value == choice for choice in known):  # 1 == True
            *first, last = ("left out" if choice is None else str(choice).lower() for choice in known)
            raise ConfigError(f"{name} must be {', '.join(first)} or {last}; got {value!r}")
        if minimum is not None and (value != default or isinstance(default, int)):
            if isinstance(value, bool) or not isinstance(value, int):
                choices = {"auto": " or auto", None: " or left out"}.get(default, "")
                raise ConfigError(f"{name} must be a whole number{choices}, got {value!r}")
            if value < minimum:
                raise ConfigError(f"{name} must be at least {minimum}, got {value}")
        if field.name.endswith("_gib") and value is not None:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{name} must be a number of GiB, got {value!r}")
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, got {value}")


def require_mapping(settings: object, section: str) -> Mapping[str, Any]:
    if settings is None:  # an empty section of a yaml file
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{section} must be a mapping of settings, got {type(settings).__name__}: {settings!r}")
    return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """The part of the plan that a user may fix (``placement``). The plan chooses what is left out or None, as it finds
    fastest. Raises ``ConfigError`` if a value has the wrong type or is out of range."""

    kept_layers: int | None = None
    """Number of layers, counted from the model's end, whose activations stay on the GPU until backward instead of being
    recomputed. 0: all are recomputed. Default: as many as fit by the predicted peak of the largest batch so far."""

    offloaded_layers: int | None = None
    """Number of layers whose activations are offloaded to host memory in forward and copied back in backward instead of being
    recomputed. They are spread over the layers before the kept ones, to give the link time. Costs host memory."""

    kept_attention: int | None = None
    """Number of recomputed layers that save attention's results, so that backward doesn't run it again: on a long sequence it
    takes most of a layer's time. Counted back from the last layer that isn't kept. They aren't compiled. The results are
    stored where the layer's inputs are. Default: the plan's choice for layers with tiles (``token_tile``), else 0."""

    offloaded_inputs: bool | None = None
    """Whether the inputs of recomputed layers, and saved results of attention, are offloaded to host memory until backward,
    for sequences whose inputs alone fill the GPU. true: all layers'; false: none. Default: the plan chooses how many layers,
    counted from the model's start."""

    device_layers: int | None = None
    """Number of layers, counted from the model's start, that live on the GPU entirely and are stepped there: weights, masters
    and moments (12 bytes a parameter), and gradients (2 more). -1: all layers, and the embeddings and the head as well."""

    device_states: int | None = None
    """Number of layers, following those that live on the GPU, that live on the host but are stepped on the GPU: each process
    has its share of their masters and moments there (12 bytes a parameter, divided by the number of processes). -1: all of
    them. Default: the plan's choice with several processes, else none."""

    slots: int = 2
    """Number of GPU buffers for the weights of one streamed layer each. At least 2: one computes while one is filled."""

    def __post_init__(self) -> None:
        _require_valid(self, "megatrain_config.placement")


@dataclasses.dataclass(frozen=True)
class MegatrainConfig:
    """Settings of megatrain_accelerate, each with a default. Raises ``ConfigError`` if a value has the wrong type or is out of
    range; :meth:`from_mapping` also refuses unknown keys."""

    step_schedule: str = "auto"
    """When the optimizer's arithmetic runs. ``deferred``: after ``step()`` has returned, layer by layer, each before it is
    fetched again. ``backward``: as soon as a layer's gradient is on the host; only without gradient clipping and in a single
    process. ``serial``: inside ``step()``. ``auto``: ``backward`` with ``host_gradients: passing``, or if a single process
    runs a Trainer with ``max_grad_norm`` 0, without ``auto_find_batch_size`` and without user code between backward and step;
    else ``deferred``. All give the same bits."""

    host_threads: int | None = None
    """Threads of the host kernels. Default: the CPUs that this process may use, less two if there are more than four."""

    host_memory_gib: float | None = None
    """Host memory that the process may take, in GiB. Default: what the cgroup and the machine have free."""

    accumulation_dtype: str = "fp32"
    """The dtype in which gradients of several backwards before a step are summed. ``fp32``: exactly as fp32 gradients, for 2
    more bytes of host memory a parameter during accumulation. ``bf16``: without these, rounded after each backward."""

    host_gradients: str = "kept"
    """How gradients of streamed layers are stored on the host. ``kept``: each in memory of its own until the step.
    ``passing``: in a few shared buffers, from which the step consumes them during backward, for 12 bytes a parameter instead
    of 14. An error with gradient clipping, accumulation, several processes or optimizers other than Adam and AdamW;
    ``parameter.grad`` is NaN."""

    moments_dtype: str = "fp32"
    """The dtype of AdamW's moments. ``fp32``; ``bf16``, which saves 4 bytes a parameter; or ``int8``, which saves 5.9: 8-bit
    codes with a scale for each block of 128, stepped on the host only. The smaller ones are rounded stochastically, so a run
    doesn't have the bits of fp32 moments. ``docs/moments.md`` has the measured effect on the loss."""

    placement: PlacementSettings = PlacementSettings()
    """For experienced users: fixes a part of what the plan chooses, where layers, their activations and their weights are."""

    expert_parts: int | str = "auto"
    """Number of parts into which a layer's experts are cut, for mixtures of experts with large layers. Each part is fetched,
    computed and, after backward, stepped by itself. Such experts always stream and are recomputed in backward, and no part of
    their layer is compiled. 1: layers stream whole. ``auto``: the fewest parts whose slots take at most a quarter of the GPU
    memory or, if no number does, hardly more than those of 64-MiB parts."""

    micro_batch_size: int | None = None
    """Number of samples that a layer computes at once in training. A larger batch runs in pieces inside each layer: the layer
    is fetched once for all pieces, and their gradients are summed in fp32 (4 bytes of GPU memory for each parameter of one
    layer). Default: the whole batch; if that doesn't fit the GPU, and layers are known to compute each sample by itself, the
    largest pieces that fit."""

    token_tile: int | str = "auto"
    """Number of tokens that token-wise modules (MLPs, norms) compute at once, for sequences whose working set fills a GPU.
    Such a module saves only its input and recomputes each tile in backward; gradients of weights are summed in fp32. 0: all
    tokens. ``auto``: all if a step fits the GPU, 8192 if not or if that is faster. Layers with tiles aren't compiled."""

    join_micro_batches: bool | str = "auto"
    """Whether the micro-batches of a step (the Trainer's ``gradient_accumulation_steps``) run as one batch, layer by layer, if
    the loss is the same and there is one process. Each layer is then fetched, and its gradients offloaded, once a step. Each
    layer's inputs of all micro-batches are held at once, and dropout draws other numbers. ``auto``: if the plan predicts a
    faster step within the GPU memory; true: whenever it is exact; false: never."""

    evaluation_weights: str = "auto"
    """Whether streamed layers stay on the GPU between forwards without gradients (evaluation, ``predict``, ``generate``).
    ``stream``: each forward fetches each layer, in a generation once a token. ``resident``: as many layers as fit stay until a
    model trains or another one computes. ``auto``: the same, from the first forward of a generation, or from the second in a
    row of others."""

    gpu_memory_gib: float | None = None
    """GPU memory that the plan may fill, in GiB. Default: 90% of what is free, since the allocator fragments it."""

    compile_layers: bool | str = "auto"
    """Whether the layers of a training step run through ``torch.compile``, which takes about half a minute, once for all equal
    layers, and makes later steps faster. ``auto``: on a GPU, layers of at least 4 million parameters, from the second step on,
    if the Trainer's number of steps repays it; true: all layers, on the CPU too, from the first step; false: none. A layer
    that can't be compiled runs as it is, and the log says why."""

    tiled_loss: bool = True
    """Whether the loss is computed by tiles of tokens, so that its memory doesn't grow with the batch. Logits are made only if
    they are read. No effect if all logits are small (4 to 64 Mi elements) or the model's head isn't a plain ``nn.Linear``."""

    layer_classes: tuple[str, ...] = ()
    """Class names of the modules that stream. Default: those in ``_no_split_modules``, else classes of repeated modules."""

    def __post_init__(self) -> None:
        if not isinstance(self.placement, PlacementSettings):
            given = require_mapping(self.placement, "megatrain_config.placement")
            for key in given:
                _require_known(key, PlacementSettings, "megatrain_config.placement")
            object.__setattr__(self, "placement", PlacementSettings(**given))
        _require_valid(self, "megatrain_config")
        on_device = self.placement.device_layers
        for name in ("device_layers", "device_states"):
            if self.moments_dtype == "int8" and (count := getattr(self.placement, name)):
                raise ConfigError(
                    f"megatrain_config.placement.{name} is {count}, but moments in 8 bits are stepped on the host only; leave "
                    f"{name} out, or set moments_dtype to bf16"
                )
        if self.host_gradients == "passing" and self.step_schedule not in ("auto", "backward"):
            raise ConfigError(
                "megatrain_config.host_gradients: passing consumes gradients in backward, and step_schedule is "
                f"{self.step_schedule!r}; set step_schedule to auto or backward"
            )
        if self.expert_parts not in ("auto", 1):
            if on_device:
                raise ConfigError(
                    f"megatrain_config.placement.device_layers is {on_device}, but experts in {self.expert_parts} parts "
                    "stream; leave out one of device_layers and expert_parts"
                )
            if self.host_gradients == "passing" and self.micro_batch_size is not None:
                raise ConfigError(
                    f"megatrain_config.micro_batch_size is {self.micro_batch_size}, and gradients of experts in parts are "
                    "added on the host for each piece of a batch, but host_gradients: passing can't add up the gradients of a "
                    "batch's pieces; leave out one of expert_parts, micro_batch_size and host_gradients"
                )
        is_list = isinstance(self.layer_classes, (list, tuple, set, frozenset))
        if not is_list or not all(isinstance(name, str) for name in self.layer_classes):
            raise ConfigError(f"megatrain_config.layer_classes must be a list of class names, got {self.layer_classes!r}")
        object.__setattr__(self, "layer_classes", tuple(self.layer_classes))

    @property
    def passes_gradients(self) -> bool:
        return self.host_gradients == "passing"

    @property
    def gpu_memory_bytes(self) -> int | None:
        return None if self.gpu_memory_gib is None else int(self.gpu_memory_gib * GIB)

    @classmethod
    def from_mapping(cls, *given: Mapping[str, Any] | MegatrainConfig | None) -> MegatrainConfig:
        """Builds the settings from yaml sections or dicts, of which later ones override earlier ones. Those of ``placement``
        are merged one by one, and may be written ``placement.slots: 3`` (for command lines). Raises ``ConfigError`` if a key
        is unknown (the message names the nearest one) or a value is out of range."""
        settings: dict[str, Any] = {}
        placement: dict[str, Any] = {}
        for source in given:
            made = vars(source) if isinstance(source, cls) else source
            for key, value in require_mapping(made, "megatrain_config").items():
                if key in _GONE:
                    raise ConfigError(f"megatrain_config.{key} is gone: {_GONE[key]}")
                if key == "placement":
                    is_made = isinstance(value, PlacementSettings)
                    placement |= vars(value) if is_made else require_mapping(value, "megatrain_config.placement")
                elif str(key).startswith("placement."):
                    placement[key.removeprefix("placement.")] = value
                else:
                    _require_known(key, cls, "megatrain_config")
                    settings[key] = value
        return cls(**settings | {"placement": placement})


CPU_QUOTA = "/sys/fs/cgroup/cpu.max"


def usable_cpu_count(sharers: int | None = None) -> int:
    """The CPUs that this process may use: those of its affinity, divided by the ``sharers`` (the processes that share them, by
    default all local ones), but at most its part of the cgroup's quota, which is divided by all local processes."""
    local = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count //= sharers or local
    with contextlib.suppress(OSError, ValueError), open(CPU_QUOTA) as file:
        quota, period = file.read().split()
        if quota != "max":
            count = min(count, int(quota) // int(period) // local)
    return max(1, count)
