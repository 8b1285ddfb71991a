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
"""Of whole numbers; None and ``auto`` are allowed where they are the default."""
_GONE = {
    "gradient_slots": "two were always enough; remove the key",
    "max_nonfinite_steps": "the fifth such step in a row stops a run; remove the key",
    "pin_memory": "memory is page-locked wherever there is a GPU; remove the key",
    "resident_layers": "it was predicted to gain less than 1% of a step; placement.device_layers keeps whole layers there",
    "huge_pages": "the store asks for huge pages in any case; remove the key",
}
"""Settings of earlier versions that have no successor of a similar name, and what became of them."""
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
    """The known name that a misspelt one was most likely meant to be; None if all differ too much."""
    return next(iter(difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)), None)


def _require_known(key: object, kind: type, section: str) -> None:
    """Raises a :class:`ConfigError` where ``kind``, the settings of ``section``, has no field of this name."""
    known = [field.name for field in dataclasses.fields(kind)]
    if key in known:
        return
    inner = [field.name for field in dataclasses.fields(PlacementSettings)] if kind is MegatrainConfig else []
    meant = nearest(str(key), [*known, *inner])
    hint = f"did you mean {f'placement.{meant}' if meant in inner else meant!r}? " if meant else ""
    raise ConfigError(f"{section} has no setting {key!r}; {hint}known settings: {', '.join(known)}")


def _require_valid(settings: MegatrainConfig | PlacementSettings, section: str) -> None:
    """Raises a :class:`ConfigError` where a value by itself has the wrong type or lies outside its range."""
    for field in dataclasses.fields(settings):
        default: Any = field.default
        value, name = getattr(settings, field.name), f"{section}.{field.name}"
        known, minimum = CHOICES.get(field.name, ()), _MINIMA.get(field.name)
        if known and not any(type(value) is type(choice) and value == choice for choice in known):  # 1 isn't true
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
    if settings is None:  # a section of a yaml file with nothing below it
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{section} must be a mapping of settings, got {type(settings).__name__}: {settings!r}")
    return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """What experts may fix of the plan (``placement``). What is left out, or None, the plan chooses as it finds fastest.
    Raises ``ConfigError`` where a value has the wrong type or lies outside its range."""

    kept_layers: int | None = None
    """Layers whose activations stay on the GPU until backward instead of being recomputed, counted from the model's end; 0
    recomputes all. The plan keeps as many as fit the GPU memory by the predicted peak of the largest batch so far."""

    offloaded_layers: int | None = None
    """Layers whose activations go to host memory in forward and come back in backward instead of being recomputed: spread over
    those before the kept ones, so that the link has time. Costs host memory."""

    kept_attention: int | None = None
    """Recomputed layers whose attention's results wait where the layer's inputs do, so that attention, of a long sequence most
    of a layer's time, isn't computed again; counted from the last layer that isn't kept. These aren't compiled. The plan
    chooses so of layers with tiles only (``token_tile``)."""

    offloaded_inputs: bool | None = None
    """Send the inputs of recomputed layers, and kept results of their attention, to host memory until backward, for sequences
    whose inputs alone fill the GPU: true of all layers, false of none. The plan chooses how many, from the model's start."""

    device_layers: int | None = None
    """Layers that live on the GPU whole, masters and moments too (12 bytes a parameter, gradients 2 more), and are stepped
    there, counted from the model's start; -1 stands for all layers, and the embeddings and the head with them."""

    device_states: int | None = None
    """Layers, behind those that live on the GPU, that stay on the host and are stepped on the GPU: each process has its share
    of their masters and moments there (12 bytes a parameter, divided by the processes). -1 stands for all of them. Left
    out, the plan chooses how many, of several processes only."""

    slots: int = 2
    """Device buffers that hold one streamed layer's weights each; at least 2 (one computes, one is filled)."""

    def __post_init__(self) -> None:
        _require_valid(self, "megatrain_config.placement")


@dataclasses.dataclass(frozen=True)
class MegatrainConfig:
    """Settings of megatrain_accelerate. Every field has a default; an unknown key is an error. Raises ``ConfigError`` where a
    value has the wrong type or lies outside its range."""

    step_schedule: str = "auto"
    """When the optimizer's arithmetic runs. ``deferred``: after ``step()``, a layer at a time, before the layer is
    fetched again. ``backward``: as soon as a layer's gradient is on the host; only right without gradient clipping.
    ``serial``: inside ``step()``. ``auto``: ``backward`` under a Trainer whose ``max_grad_norm`` is 0,
    that doesn't look for a batch size and runs no code of the user's between backward and step, else ``deferred``. All
    give the same bits."""

    host_threads: int | None = None
    """Threads of the fused host kernels; by default the CPUs that this process may use, less two for the launcher."""

    host_memory_gib: float | None = None
    """Host memory that the process may take, in GiB; by default what the cgroup and the machine have free."""

    accumulation_dtype: str = "fp32"
    """In what gradients of several backwards before a step are added up. ``fp32``: exactly as fp32 gradients would be; takes 2
    bytes a parameter of host memory more while gradients are accumulated. ``bf16``: without them, rounding after each."""

    host_gradients: str = "kept"
    """Where streamed layers' gradients are on the host. ``kept``: each in a place of its own until the step. ``passing``: in a
    few buffers, consumed by the step in backward: 12 bytes a parameter instead of 14. Not with gradient clipping, accumulation
    or other optimizers than Adam and AdamW (errors), and ``parameter.grad`` of a layer shows not-a-number."""

    moments_dtype: str = "fp32"
    """In what AdamW's moments are kept: ``fp32``; ``bf16``, for 4 bytes a parameter less; or ``int8``, 8-bit codes with a
    scale for each block of 128, for 5.9 less, on the host only. The smaller ones are rounded stochastically, and a run hasn't
    the bits of fp32 moments. ``docs/moments.md`` has the measured effect on the loss."""

    placement: PlacementSettings = PlacementSettings()
    """For experts: where layers, their activations and their weights are, as far as the plan isn't to choose it."""

    expert_parts: int | str = "auto"
    """Into how many parts the experts of a layer are cut, each fetched and computed for itself, and stepped so after backward,
    for mixtures of experts whose layers are large. Such experts always stream, are computed again in backward, and aren't
    compiled, nor is the rest of their layer. 1: layers stream whole; ``auto``: the fewest parts with which slots take no more
    than a quarter of the GPU memory, or, where none do, hardly more than with parts of 64 MiB."""

    micro_batch_size: int | None = None
    """Samples that a layer computes at once in training: a larger batch runs in pieces inside each layer, which is fetched
    once for all of them and whose gradients are summed in fp32 (4 bytes for each parameter of one layer on the GPU). By
    default the whole batch, or the largest pieces with which a step fits the GPU where whole batches don't and the layers are
    known to compute each sample for itself."""

    token_tile: int | str = "auto"
    """Tokens that a layer's token-wise parts (MLPs, norms) compute at once, for sequences whose working set fills a GPU. Such
    a part keeps its input alone and computes each tile again in backward, with weights' gradients summed in fp32. 0: all
    tokens; ``auto``: all where a step fits the GPU, else, or if that is faster, 8192. Layers with tiles aren't compiled."""

    join_micro_batches: bool | str = "auto"
    """With the Trainer's ``gradient_accumulation_steps`` above 1, run a step's micro-batches as one batch, layer by layer,
    where that gives the same loss: layers are fetched, and gradients leave, once a step. Each layer's inputs of all
    micro-batches are held at once, and dropout draws other numbers. ``auto``: where the plan predicts a faster step within
    the GPU memory; true: wherever it is exact; false: never."""

    evaluation_weights: str = "auto"
    """What becomes of streamed layers' weights between forwards without gradients (evaluation, ``predict``, ``generate``).
    ``stream``: each layer is fetched in each forward, which for generation is once a token. ``resident``: layers stay on the
    GPU, all that fit, until a model trains again. ``auto``: the same from the second such forward in a row on."""

    gpu_memory_gib: float | None = None
    """GPU memory that the plan may fill, in GiB; by default 90% of what is free, since the allocator fragments it."""

    compile_layers: bool | str = "auto"
    """Run the layers of a training step through ``torch.compile``: once for all equal layers, about half a minute, and steps
    are faster from then on. ``auto``: on a GPU, layers of at least 4 million parameters, from the second step on, where the
    Trainer's number of steps pays for it; true: all, on the CPU too, from the first step; false: none. A log line says why a
    layer can't be compiled and runs as it is."""

    tiled_loss: bool = True
    """Compute the loss by tiles of tokens, so that its memory doesn't grow with the batch; logits are made only if they are
    read. Where all logits are small (64 Mi elements), or the model's head isn't a plain ``nn.Linear``, nothing changes."""

    layer_classes: tuple[str, ...] = ()
    """Class names of the modules that stream; by default what the model names in ``_no_split_modules``."""

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
                    "added on the host for each piece of a batch, which those that pass can't be; leave out one of "
                    "expert_parts, micro_batch_size and host_gradients"
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
        """Builds the settings from yaml sections or dicts, of which later ones count. Those of ``placement`` count one by one,
        and may be written ``placement.slots: 3``, for command lines. Raises ``ConfigError`` where a key is unknown (the
        message names the nearest one) or a value is out of range."""
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
    """CPUs that this process may use: those of its affinity, divided by the processes that share them (``sharers``; all local
    ones by default), and of the cgroup's quota what falls to each local process."""
    local = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count //= sharers or local
    with contextlib.suppress(OSError, ValueError), open(CPU_QUOTA) as file:
        quota, period = file.read().split()
        if quota != "max":
            count = min(count, int(quota) // int(period) // local)
    return max(1, count)
