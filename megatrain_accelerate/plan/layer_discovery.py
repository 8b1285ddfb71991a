"""Which modules of a model stream, whole or (experts) in parts, and which parameters stay resident."""

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
from megatrain_accelerate.plan.machine import USABLE_SHARE_OF_DEVICE
from megatrain_accelerate.store.layout import FlatLayout, expert_ranges
from megatrain_accelerate.units import MIB

logger = logging.getLogger(__name__)

SLOTS_SHARE = 0.25
"""Of the GPU memory that a plan may fill: more than that for slots of whole layers, and their experts stream in parts."""

SMALLEST_PART_BYTES = 64 * MIB
"""Smaller parts don't fill the link, and their products don't fill a GPU."""

_LITTLE_MORE = 1.05
"""Where no number of parts reaches the share, fewer of them do whose slots are this much larger than those of the most."""

_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "config")
"""What ``use_experts_implementation`` of transformers (integrations/moe.py) leaves on a module of experts."""

_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
_PRESENT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configurations of transformers call the experts that a token is sent to, and those of a layer."""


@dataclasses.dataclass(frozen=True)
class ResidentSpec:
    """Parameters that one module owns outside all layers, and every module that reads one of them (ties)."""

    name: str
    owner: nn.Module
    users: tuple[nn.Module, ...]
    """Modules before whose forward the parameters must be valid: the owner, those with which it shares one, and those around
    them that may read a weight without calling its module (``embedding.weight`` as a table, ``nn.MultiheadAttention``)."""
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """By the owner's attribute."""
    layers_before: int
    """How many layers come before them in the model; they are stepped after those. 0 for embeddings."""


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """The experts of a layer, by its index, that stream in ``parts`` parts."""

    layer: int
    name: str
    module: nn.Module
    parts: int = 1

    @property
    def count(self) -> int:
        return int(self.module.num_experts)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Discovery:
    """The model, taken apart: (name, module) of each layer in model order, the resident parameters, and those experts of the
    layers that have units of their own, in the order of the layers."""

    layers: tuple[tuple[str, nn.Module], ...]
    residents: tuple[ResidentSpec, ...]
    experts: tuple[ExpertsSpec, ...] = ()

    def experts_of(self, layer: int) -> list[ExpertsSpec]:
        return [spec for spec in self.experts if spec.layer == layer]

    def parameters_of(self, layer: int) -> list[tuple[str, nn.Parameter]]:
        """The parameters of a layer's own unit, by name in the layer."""
        others = {id(parameter) for spec in self.experts_of(layer) for parameter in spec.module.parameters()}
        return [(key, p) for key, p in self.layers[layer][1].named_parameters() if id(p) not in others]

    def units(self) -> list[tuple[list[nn.Module], list[tuple[str, nn.Parameter]]]]:
        """The modules and the parameters of each unit, in the order in which units are made: each layer and its experts, then
        residents. Modules of experts are among their layer's, too."""
        units = []
        for index, (_, layer) in enumerate(self.layers):
            units.append((list(layer.modules()), self.parameters_of(index)))
            experts = [spec.module for spec in self.experts_of(index)]
            units += [(list(module.modules()), list(module.named_parameters())) for module in experts]
        return units + [([spec.owner], list(spec.parameters)) for spec in self.residents]


def _repeated_modules(model: nn.Module, classes: set[str] | None) -> set[int]:
    """Ids of members of a ``ModuleList`` or ``Sequential`` with at least two members of one class, in ``classes``."""
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
    # Those of the blocks first: repeated, and large in each instance.
    names = sorted(held, key=lambda name: (len(held[name]) == 1, -min(held[name])))
    meant = [found for name in asked if (found := nearest(name, names))]
    hint = f"; did you mean {', '.join(map(repr, meant))}?" if meant else "."
    classes = ", ".join(f"{name} ({len(held[name])} of them)" if len(held[name]) > 1 else name for name in names)
    return (
        f"megatrain_config.layer_classes names {', '.join(asked)}, and {type(model).__name__} has no repeated layers of "
        f"such a class{hint} Its modules with parameters are {classes or 'none'}"
    )


def find_layers(model: nn.Module, layer_classes: Sequence[str] = ()) -> list[tuple[str, nn.Module]]:
    """(name, module) of each layer of ``model``, in model order; see :func:`discover_layers`. Empty if nothing is repeated."""
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
    """Finds the streaming units of ``model``. Layers are the outermost repeated modules of the classes that the user or the
    model (``_no_split_modules``) names; else the members of its outermost module lists with two or more members of one class.
    An UnsupportedError if no layer was found, or layers share parameters with each other or with other modules."""
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
    """Raises :class:`UnsupportedError` if an embedding that is trained makes sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise UnsupportedError(f"embedding {name} makes sparse gradients, which aren't stepped: make it with sparse=False")


def _residents(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> list[ResidentSpec]:
    in_layers: dict[int, str] = {}
    for name, layer in layers:
        for key, parameter in layer.named_parameters():
            if in_layers.setdefault(id(parameter), name) != name:
                raise UnsupportedError(
                    f"layers {in_layers[id(parameter)]} and {name} share the parameter {key!r}, so that neither could be "
                    "stepped for itself. Name the classes of the blocks inside them that share nothing in "
                    "megatrain_config.layer_classes: these stream then, and what is shared stays on the GPU"
                )
    heads = {name for name, _ in layers}
    inside = {id(module) for _, layer in layers for module in layer.modules()}
    readers: dict[int, list[str]] = {}
    outside: dict[str, tuple[nn.Module, int]] = {}  # by name, with how many layers come before each in the model
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
                    "inside the layers that don't hold it in megatrain_config.layer_classes: it stays on the GPU then"
                )
            readers.setdefault(id(parameter), []).append(name)

    def users(name: str) -> Iterator[nn.Module]:
        """The module, what is around it up to the outermost without layers, and a parent with layers that may read it first:
        it runs for as long as its layers, and waits for what they need, not for what comes after them."""
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
            # Embeddings are read first wherever they stand: those of a language model before the layers of its vision tower.
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
    """The experts of each layer, and why others can't be cut."""
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
    """The fewest parts of the experts with which slots don't take more than their share of the budget, or hardly more than
    with the most."""
    whole = [FlatLayout.of(layer.named_parameters(), dtypes) for _, layer in cut.layers]
    rest = [FlatLayout.of(cut.parameters_of(index), dtypes) for index in range(len(cut.layers))]
    experts = [(spec.count, FlatLayout.of(spec.module.named_parameters(), dtypes)) for spec in cut.experts]

    def slot_bytes(parts: int) -> int:
        largest = [expert_ranges(count, parts)[0].layout(of_layer) for count, of_layer in experts]
        kinds = [whole] if parts == 1 else [rest, largest]
        weight_bytes = sum(max(layout.weight_bytes for layout in kind) for kind in kinds)
        gradient_bytes = max(layout.gradient_bytes for kind in kinds for layout in kind)
        return config.placement.slots * weight_bytes + GRADIENT_SLOTS * training * gradient_bytes

    # Parts that are still worth a copy, on average: their sizes differ by one expert.
    most = max(1, min(min(count, of_layer.weight_bytes // SMALLEST_PART_BYTES) for count, of_layer in experts))
    enough_bytes = max(SLOTS_SHARE * budget_bytes, _LITTLE_MORE * slot_bytes(most))
    return next(parts for parts in range(1, most + 1) if slot_bytes(parts) <= enough_bytes)


def wants_whole_layers(config: MegatrainConfig) -> bool:
    """Whether other settings say of whole layers where they are to be, so that ``auto`` cuts nothing."""
    return bool(config.placement.device_layers) or config.evaluation_weights == "resident"


def split_experts(
    discovery: Discovery,
    config: MegatrainConfig,
    dtypes: Mapping[int, torch.dtype],
    device: torch.device,
    training: bool,
    ranks: Ranks | None,
) -> Discovery:
    """The discovery with the experts that are to stream in parts; ``dtypes`` are those in which parameters compute, by ``id``.
    An UnsupportedError if parts are asked for, and the model has no experts that can be cut, or others that can't; a
    ConfigError for more parts than there are experts."""
    asked = config.expert_parts
    if asked == 1:
        return discovery
    found, reasons = _find(discovery.layers)
    if asked == "auto":
        budget_bytes = config.gpu_memory_bytes or 0
        if config.gpu_memory_bytes is None and device.type == "cuda":
            budget_bytes = int(USABLE_SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[0])
        if ranks is not None and found:  # they cut alike
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
        if reasons:  # the slots would be as large as those
            raise UnsupportedError(
                f"megatrain_config.expert_parts is {asked}, and the experts of {len(found)} layers could stream in parts, but "
                f"not all of the model's ({reasons[0]}); leave it out"
            )
        fewest = min(spec.count for spec in found)
        if parts > fewest:
            raise ConfigError(f"megatrain_config.expert_parts is {asked}, but a layer has {fewest} experts; lower it")
    if parts == 1:
        return discovery
    if config.compile_layers is True:
        logger.warning("megatrain: layers whose experts stream in parts aren't compiled, and run as they are")
    return dataclasses.replace(discovery, experts=tuple(dataclasses.replace(spec, parts=parts) for spec in found))


def active_parameters(model: nn.Module) -> int:
    """Parameters that a token meets, frozen ones too: all, but for the experts that it isn't sent to. Experts are the
    parameters with ``.experts.`` in their names, adapters on them among them, as transformers has them. Shared experts,
    which every token is sent to, count whole."""
    config: Any = getattr(model, "config", None)
    total = sum(parameter.numel() for parameter in model.parameters())
    # One that isn't of transformers, or has several texts, speaks for itself.
    with contextlib.suppress(AttributeError, ValueError):
        config = config.get_text_config()
    chosen, present = _count(config, _CHOSEN), _count(config, _PRESENT)
    if chosen is None or present is None:
        return total
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    return total - experts + experts * chosen // present


def _count(config: Any, names: tuple[str, ...]) -> int | None:
    return next((count for name in names if isinstance(count := getattr(config, name, None), int) and count), None)
