"""Finds the modules of a model that stream, whole or (experts) in parts, and the parameters that stay resident."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig, nearest
from megatrain_accelerate.errors import ConfigError, UnsupportedError
from megatrain_accelerate.gradients.offload import GRADIENT_SLOTS
from megatrain_accelerate.parallel.ranks import Ranks
from megatrain_accelerate.plan.machine import USABLE_SHARE_OF_DEVICE, free_bytes
from megatrain_accelerate.store.layout import FlatLayout, expert_ranges
from megatrain_accelerate.units import MIB

logger = logging.getLogger(__name__)

SLOTS_SHARE = 0.25
"""Share of the GPU memory that a plan may fill. If slots of whole layers take more, their experts stream in parts."""

SMALLEST_PART_BYTES = 64 * MIB
"""Copies of smaller parts don't saturate the link, and their products don't fill a GPU."""

_LITTLE_MORE = 1.05
"""If no number of parts meets the share, slots may take this many times what they take with the most parts."""

_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "config")
"""Attributes that ``use_experts_implementation`` of transformers (integrations/moe.py) sets on a module of experts."""

_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
_PRESENT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names in transformers' configs of the number of experts that a token is sent to, and of the number in a layer."""


@dataclasses.dataclass(frozen=True)
class ResidentSpec:
    """Parameters that one module outside all layers owns, and the modules that read them (ties)."""

    name: str
    owner: nn.Module
    users: tuple[nn.Module, ...]
    """Modules before whose forward the parameters must be valid: the owner, modules that share one of them, and enclosing
    modules that may read a weight without calling its module (``embedding.weight`` as a table, ``nn.MultiheadAttention``)."""
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Pairs of the owner's attribute name and the parameter."""
    layers_before: int
    """Number of layers before them in the model. They are stepped after these layers. 0 for embeddings."""


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """Experts of the layer with the index ``layer``, which stream in ``parts`` parts."""

    layer: int
    name: str
    module: nn.Module
    parts: int = 1

    @property
    def count(self) -> int:
        return int(self.module.num_experts)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Discovery:
    """The units of a model: (name, module) of each layer in model order, the resident parameters, and the experts that have
    units of their own, in the order of their layers."""

    layers: tuple[tuple[str, nn.Module], ...]
    residents: tuple[ResidentSpec, ...]
    experts: tuple[ExpertsSpec, ...] = ()

    def experts_of(self, layer: int) -> list[ExpertsSpec]:
        return [spec for spec in self.experts if spec.layer == layer]

    def parameters_of(self, layer: int) -> list[tuple[str, nn.Parameter]]:
        """The parameters of a layer's own unit, which excludes experts with units of their own, by name in the layer."""
        others = {id(parameter) for spec in self.experts_of(layer) for parameter in spec.module.parameters()}
        return [(key, p) for key, p in self.layers[layer][1].named_parameters() if id(p) not in others]

    def units(self) -> list[tuple[list[nn.Module], list[tuple[str, nn.Parameter]]]]:
        """Modules and parameters of each unit, in the order in which units are made: each layer followed by its experts, then
        residents. A layer's modules include those of its experts."""
        units = []
        for index, (_, layer) in enumerate(self.layers):
            units.append((list(layer.modules()), self.parameters_of(index)))
            experts = [spec.module for spec in self.experts_of(index)]
            units += [(list(module.modules()), list(module.named_parameters())) for module in experts]
        return units + [([spec.owner], list(spec.parameters)) for spec in self.residents]


def _repeated_modules(model: nn.Module, classes: set[str] | None) -> set[int]:
    """Ids of ``ModuleList`` and ``Sequential`` members whose class is in ``classes`` or, if None, occurs at least twice."""
    wanted: set[int] = set()
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            members = [child for child in container if next(child.parameters(), None) is not None]
            counts = collections.Counter(map(type, members))
            chosen = [kind for kind, count in counts.items() if (count > 1 if classes is None else kind.__name__ in classes)]
            wanted.update(id(child) for child in members if type(child) in chosen)
    return wanted


def _no_such_classes(model: nn.Module, asked: Sequence[str]) -> str:
    held: dict[str, list[int]] = {}
    for module in model.modules():
        if module is not model and (size := sum(parameter.numel() for parameter in module.parameters())):
            held.setdefault(type(module).__name__, []).append(size)
    # Classes of blocks first: they are repeated, and each instance is large.
    names = sorted(held, key=lambda name: (len(held[name]) == 1, -min(held[name])))
    meant = [found for name in asked if (found := nearest(name, names))]
    hint = f"; did you mean {', '.join(map(repr, meant))}?" if meant else "."
    classes = ", ".join(f"{name} ({len(held[name])} of them)" if len(held[name]) > 1 else name for name in names)
    return (
        f"megatrain_config.layer_classes names {', '.join(asked)}, and {type(model).__name__} has no repeated layers of "
        f"such a class{hint} Its modules with parameters are {classes or 'none'}"
    )


def find_layers(model: nn.Module, layer_classes: Sequence[str] = ()) -> list[tuple[str, nn.Module]]:
    """(name, module) of each layer in model order, by the rules of :func:`discover_layers`. Empty if there is none."""
    if layer_classes:
        wanted = {id(module) for module in model.modules() if type(module).__name__ in layer_classes}
    else:
        # transformers' models, and every model inside one, name the classes of their blocks.
        declared = [getattr(module, "_no_split_modules", None) for module in model.modules()]
        classes = {name for names in declared if isinstance(names, (list, tuple, set)) for name in names}
        wanted = _repeated_modules(model, classes) or _repeated_modules(model, None)
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer, _ in found[-1:])
        if id(module) in wanted and not is_inside and next(module.parameters(), None) is not None:
            found.append((name, module))
    return found


def discover_layers(model: nn.Module, layer_classes: Sequence[str] = ()) -> Discovery:
    """Finds the layers and resident parameters of ``model``. Layers are its outermost modules of the ``layer_classes``, else
    members of module lists whose classes the model names (``_no_split_modules``), else those of which a list has two of one
    class. Raises an UnsupportedError if there are none, or if they share parameters with each other or with other modules."""
    layers = find_layers(model, layer_classes)
    if not layers and layer_classes:
        raise UnsupportedError(_no_such_classes(model, layer_classes))
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__} has no repeated layers that could stream (no `_no_split_modules` and no "
            "nn.ModuleList with two or more modules of one class). Name the classes of its blocks in "
            "megatrain_config.layer_classes, or train it without the plugin"
        )
    return Discovery(tuple(layers), tuple(_residents(model, layers)))


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Raises an :class:`UnsupportedError` if a trained embedding makes sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise UnsupportedError(
                f"embedding {name} has sparse=True, and sparse gradients aren't supported; create it with sparse=False"
            )


def _residents(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> list[ResidentSpec]:
    in_layers: dict[int, str] = {}
    for name, layer in layers:
        for key, parameter in layer.named_parameters():
            if in_layers.setdefault(id(parameter), name) != name:
                raise UnsupportedError(
                    f"layers {in_layers[id(parameter)]} and {name} share the parameter {key!r}, so neither can stream "
                    "and be stepped on its own. Name the classes of the blocks inside them that share nothing in "
                    "megatrain_config.layer_classes: these stream then, and what is shared stays on the GPU"
                )
    heads = {name for name, _ in layers}
    inside = {id(module) for _, layer in layers for module in layer.modules()}
    readers: dict[int, list[str]] = {}
    outside: dict[str, tuple[nn.Module, int]] = {}  # by name, with the number of layers before each
    layers_seen = 0
    for name, module in model.named_modules():
        layers_seen += name in heads
        if id(module) in inside:
            continue
        outside[name] = (module, layers_seen)
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in in_layers:
                raise UnsupportedError(
                    f"parameter {name}.{key} is shared with layer {in_layers[id(parameter)]}; a weight that is tied to "
                    "one inside a layer can't stream yet. Give each a parameter of its own, or name the classes of the blocks "
                    "inside the layers that don't contain the shared parameter in megatrain_config.layer_classes; it then "
                    "stays on the GPU"
                )
            readers.setdefault(id(parameter), []).append(name)

    def users(name: str) -> Iterator[nn.Module]:
        """Yields the module, the modules around it that hold no layers, and the next one, which holds some, if that may read
        it before its layers run. That module's forward spans its layers', so it mustn't wait for what comes after them."""
        module, seen = outside[name]
        is_embedding = isinstance(module, nn.Embedding)
        yield module
        while name:
            name = name.rpartition(".")[0]
            parent, seen_before = outside[name]
            has_layers = any(id(part) in inside for part in parent.modules())
            if not has_layers or is_embedding or seen == seen_before:
                yield parent
            if has_layers:
                return
            seen = seen_before

    residents: list[ResidentSpec] = []
    taken: set[int] = set()
    for name, (module, seen) in outside.items():
        own = [(k, p) for k, p in module._parameters.items() if p is not None and id(p) not in taken]
        taken.update(id(parameter) for _, parameter in own)
        if own:
            reading = dict.fromkeys(reader for _, parameter in own for reader in readers[id(parameter)])
            using = {id(user): user for reader in reading for user in users(reader)}
            # A forward reads embeddings first, wherever they are: a language model's before its vision tower's layers.
            before = 0 if isinstance(module, nn.Embedding) else seen
            residents.append(ResidentSpec(name, module, tuple(using.values()), tuple(own), before))
    return residents


def _reason_against(module: nn.Module, adapted: Sequence[object]) -> str | None:
    """Why a module that looks like experts can't be cut into parts; None if it can."""
    if any(base is module for base in adapted):
        return "an adapter changes its parameters (PEFT's target_parameters)"
    own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    count = module.num_experts
    if not isinstance(count, int) or count < 2:
        return f"it has {count!r} experts"
    if sum(1 for _ in module.parameters()) != len(own):
        return "modules inside it have parameters of their own"
    if any(parameter.dim() < 2 or parameter.shape[0] != count for parameter in own.values()):
        return f"not all of its parameters have {count} as their first dimension"
    if any(True for _ in module.buffers()):
        return "it has buffers"
    if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p for part in module.modules()):
        return "it draws random numbers (dropout)"
    return None


def _find(layers: Sequence[tuple[str, nn.Module]]) -> tuple[list[ExpertsSpec], list[str]]:
    """The experts of all layers that can be cut into parts, and the reasons why others can't."""
    found: list[ExpertsSpec] = []
    reasons: list[str] = []
    for index, (name, layer) in enumerate(layers):
        adapted = [part.base_layer for part in layer.modules() if hasattr(part, "base_layer")]
        for key, module in layer.named_modules():
            if not key or not all(hasattr(module, mark) for mark in _MARKS):
                continue
            reason = _reason_against(module, adapted)
            if reason is None:
                found.append(ExpertsSpec(index, f"{name}.{key}", module))
            else:
                reasons.append(f"{name}.{key}: {reason}")
    return found, reasons


def _chosen_parts(
    cut: Discovery, dtypes: Mapping[int, torch.dtype], config: MegatrainConfig, training: bool, budget_bytes: int
) -> int:
    """The fewest parts of the experts with which slots take at most their share of the budget, or hardly more than with the
    most parts."""
    whole = [FlatLayout.of(layer.named_parameters(), dtypes) for _, layer in cut.layers]
    rest = [FlatLayout.of(cut.parameters_of(index), dtypes) for index in range(len(cut.layers))]
    experts = [(spec.count, FlatLayout.of(spec.module.named_parameters(), dtypes)) for spec in cut.experts]

    def slot_bytes(parts: int) -> int:
        largest = [expert_ranges(count, parts)[0].layout(of_layer) for count, of_layer in experts]
        kinds = [whole] if parts == 1 else [rest, largest]
        weight_bytes = sum(max(layout.weight_bytes for layout in kind) for kind in kinds)
        gradient_bytes = max(layout.gradient_bytes for kind in kinds for layout in kind)
        return config.placement.slots * weight_bytes + GRADIENT_SLOTS * training * gradient_bytes

    # The most parts whose mean size is worth a copy. Sizes of parts differ by one expert.
    most = max(1, min(min(count, of_layer.weight_bytes // SMALLEST_PART_BYTES) for count, of_layer in experts))
    enough_bytes = max(SLOTS_SHARE * budget_bytes, _LITTLE_MORE * slot_bytes(most))
    return next(parts for parts in range(1, most + 1) if slot_bytes(parts) <= enough_bytes)


def wants_whole_layers(config: MegatrainConfig) -> bool:
    """Whether other settings say where whole layers live, so that ``auto`` cuts no experts."""
    return bool(config.placement.device_layers) or config.evaluation_weights == "resident"


def split_experts(
    discovery: Discovery,
    config: MegatrainConfig,
    dtypes: Mapping[int, torch.dtype],
    device: torch.device,
    training: bool,
    ranks: Ranks | None,
) -> Discovery:
    """Adds to the discovery the experts that are to stream in parts. ``dtypes`` are those in which parameters compute, by
    ``id``. If a number of parts is asked for, raises an UnsupportedError unless the model has experts and all can be cut, and
    a ConfigError for more parts than experts."""
    asked = config.expert_parts
    if asked == 1:
        return discovery
    found, reasons = _find(discovery.layers)
    if asked == "auto":
        budget_bytes = config.gpu_memory_bytes or 0
        if config.gpu_memory_bytes is None and device.type == "cuda":
            budget_bytes = int(USABLE_SHARE_OF_DEVICE * free_bytes(device))
        if ranks is not None and found:  # all must cut alike
            budget_bytes = min(ranks.gather(budget_bytes))
        in_pieces = config.passes_gradients and config.micro_batch_size is not None
        if not budget_bytes or not found or wants_whole_layers(config) or in_pieces:
            return discovery
        cut = dataclasses.replace(discovery, experts=tuple(found))
        parts = _chosen_parts(cut, dtypes, config, training, budget_bytes)
    else:
        parts = int(asked)
        if not found:
            raise UnsupportedError(
                f"megatrain_config.expert_parts is {asked}, and the model has no experts that can stream in parts"
                + (f" ({reasons[0]})" if reasons else " (modules under transformers' use_experts_implementation)")
                + "; leave it out"
            )
        if reasons:  # slots would have to hold the uncut experts
            raise UnsupportedError(
                f"megatrain_config.expert_parts is {asked}, but only the experts of {len(found)} layers can stream in "
                f"parts (the first that can't: {reasons[0]}); leave it out"
            )
        fewest = min(spec.count for spec in found)
        if parts > fewest:
            raise ConfigError(f"megatrain_config.expert_parts is {asked}, but a layer has {fewest} experts; lower it")
    if parts == 1:
        return discovery
    if config.compile_layers is True:
        logger.warning("megatrain: layers whose experts stream in parts run uncompiled")
    return dataclasses.replace(discovery, experts=tuple(dataclasses.replace(spec, parts=parts) for spec in found))


def active_parameters(model: nn.Module) -> int:
    """Number of parameters that one token uses, frozen ones included: all except those of experts that it isn't sent to.
    Experts' parameters are those with ``.experts.`` in their names, as in transformers, adapters on them included. Shared
    experts, to which every token is sent, count in full."""
    config: Any = getattr(model, "config", None)
    total = sum(parameter.numel() for parameter in model.parameters())
    # A config that isn't of transformers, or has several text configs, is read as it is.
    with contextlib.suppress(AttributeError, ValueError):
        config = config.get_text_config()
    chosen, present = _count(config, _CHOSEN), _count(config, _PRESENT)
    if chosen is None or present is None:
        return total
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    return total - experts + experts * chosen // present


def _count(config: Any, names: tuple[str, ...]) -> int | None:
    return next((count for name in names if isinstance(count := getattr(config, name, None), int) and count), None)
