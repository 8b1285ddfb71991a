"""Which modules of a model stream, and which parameters stay resident."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from megatrain_accelerate.config import nearest
from megatrain_accelerate.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class ResidentSpec:
    """Parameters that one module owns outside all layers, and every module that reads one of them (ties).

    Attributes:
        name: the owner's.
        modules: the owner, and those with which it shares a parameter.
        users: modules before whose forward the parameters must be valid: ``modules``, and those around them that may read a
            weight without calling its module (``embedding.weight`` as a table, ``nn.MultiheadAttention``).
        parameters: by the owner's attribute.
        layers_before: how many layers come before them in the model; they are stepped after those. 0 for embeddings.
    """

    name: str
    modules: tuple[nn.Module, ...]
    users: tuple[nn.Module, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]
    layers_before: int


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """The experts of a layer that stream in parts.

    Attributes:
        layer: the layer's index.
        name: the module's.
        module: their module.
        parts: in how many.
    """

    layer: int
    name: str
    module: nn.Module
    parts: int


@dataclasses.dataclass(frozen=True)
class Discovery:
    """The model, taken apart: (name, module) of each layer in model order, the resident parameters, and those experts of the
    layers that have units of their own, in the order of the layers."""

    layers: tuple[tuple[str, nn.Module], ...]
    residents: tuple[ResidentSpec, ...]
    experts: tuple[ExpertsSpec, ...] = ()

    def experts_of(self, layer: int) -> list[ExpertsSpec]:
        """Those of one layer."""
        return [spec for spec in self.experts if spec.layer == layer]

    def parameters_of(self, layer: int) -> list[tuple[str, nn.Parameter]]:
        """The parameters of a layer's own unit, by name in the layer."""
        others = {id(parameter) for spec in self.experts_of(layer) for parameter in spec.module.parameters()}
        return [(key, p) for key, p in self.layers[layer][1].named_parameters() if id(p) not in others]

    def parameter_groups(self) -> list[list[tuple[str, nn.Parameter]]]:
        """The parameters of each unit, in the order in which units are made: each layer and its experts, then residents."""
        groups = []
        for layer in range(len(self.layers)):
            groups.append(self.parameters_of(layer))
            groups += [list(spec.module.named_parameters()) for spec in self.experts_of(layer)]
        return groups + [list(spec.parameters) for spec in self.residents]


def _declared_classes(model: nn.Module) -> set[str]:
    """Class names in ``_no_split_modules`` of the model and of every model inside it (transformers)."""
    names: set[str] = set()
    for module in model.modules():
        declared = getattr(module, "_no_split_modules", None)
        if isinstance(declared, (list, tuple, set)):
            names.update(declared)
    return names


def _outermost(model: nn.Module, wanted: set[int]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found[-1:])
        if id(module) in wanted and not inside and next(module.parameters(), None) is not None:
            found.append((name, module))
    return found


def _repeated_modules(model: nn.Module, classes: set[str] | None) -> set[int]:
    """Ids of members of a ``ModuleList`` or ``Sequential`` with at least two members of one class, in ``classes``."""
    wanted: set[int] = set()
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        members = [child for child in container if next(child.parameters(), None) is not None]
        if classes is None:
            counts = {type(child): sum(type(other) is type(child) for other in members) for child in members}
            wanted.update(id(child) for child in members if counts[type(child)] > 1)
        else:
            wanted.update(id(child) for child in members if type(child).__name__ in classes)
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
        classes = set(layer_classes)
        wanted = {id(module) for module in model.modules() if type(module).__name__ in classes}
    else:
        wanted = _repeated_modules(model, _declared_classes(model)) or _repeated_modules(model, None)
    return _outermost(model, wanted)


def discover_layers(model: nn.Module, layer_classes: Sequence[str] = ()) -> Discovery:
    """Finds the streaming units of ``model``.

    Layers are the outermost repeated modules of the classes that the user or the model (``_no_split_modules``) names;
    for a model that names none, the members of its outermost module lists with two or more members of one class.

    Args:
        model: the model as handed to ``accelerator.prepare()``.
        layer_classes: class names from ``megatrain_config.layer_classes``; they override what the model names.

    Raises:
        UnsupportedError: no layer was found, or layers share parameters with each other or with other modules.
    """
    layers = find_layers(model, layer_classes)
    if not layers and layer_classes:
        raise UnsupportedError(_no_such_classes(model, layer_classes))
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__} has no repeated layers that could stream (no `_no_split_modules` and no "
            "nn.ModuleList with two or more modules of one class). Name the classes of its blocks in "
            "megatrain_config.layer_classes, or train it without the plugin"
        )
    in_layers = _owners_in_layers(layers)
    return Discovery(tuple(layers), tuple(_residents(model, layers, in_layers)))


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Checks that all gradients will be dense.

    Raises:
        UnsupportedError: an embedding that is trained makes sparse ones.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise UnsupportedError(
                f"{name} is an embedding with sparse=True, whose gradient is a sparse tensor; only dense ones are summed, "
                "clipped and stepped here. Make it with sparse=False"
            )


def _owners_in_layers(layers: Sequence[tuple[str, nn.Module]]) -> dict[int, str]:
    """Layer name by id of each parameter in it; refuses parameters that two layers share."""
    owners: dict[int, str] = {}
    for name, layer in layers:
        for key, parameter in layer.named_parameters():
            if owners.setdefault(id(parameter), name) != name:
                raise UnsupportedError(
                    f"layers {owners[id(parameter)]} and {name} share the parameter {key!r}, so that neither could be stepped "
                    "for itself. Name the classes of the blocks inside them that share nothing in "
                    "megatrain_config.layer_classes: these stream then, and what is shared stays on the GPU"
                )
    return owners


def _residents(model: nn.Module, layers: Sequence[tuple[str, nn.Module]], in_layers: dict[int, str]) -> list[ResidentSpec]:
    heads = {name for name, _ in layers}
    inside = {id(module) for _, layer in layers for module in layer.modules()}
    readers: dict[int, list[nn.Module]] = {}
    outside: list[tuple[str, nn.Module, int]] = []
    around: dict[int, _Surroundings] = {}
    layers_seen = 0
    for name, module in model.named_modules():
        layers_seen += name in heads
        if id(module) in inside:
            continue
        # Embeddings are read first wherever they stand: those of a language model before the layers of its vision tower.
        before = 0 if isinstance(module, nn.Embedding) else layers_seen
        outside.append((name, module, before))
        parent = around.get(id(model.get_submodule(name.rpartition(".")[0]))) if name else None
        around[id(module)] = _Surroundings(module, any(id(part) in inside for part in module.modules()), layers_seen, parent)
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in in_layers:
                raise UnsupportedError(
                    f"parameter {name}.{key} is shared with layer {in_layers[id(parameter)]}; a weight that is tied to "
                    "one inside a layer can't stream yet. Give each a parameter of its own, or name the classes of the blocks "
                    "inside the layers that don't hold it in megatrain_config.layer_classes: it stays on the GPU then"
                )
            readers.setdefault(id(parameter), []).append(module)
    residents: list[ResidentSpec] = []
    taken: set[int] = set()
    for name, module, before in outside:
        own = [(k, p) for k, p in module._parameters.items() if p is not None and id(p) not in taken]
        taken.update(id(parameter) for _, parameter in own)
        if own:
            modules = {id(reader): reader for _, parameter in own for reader in readers[id(parameter)]}
            users = {id(user): user for reader in modules.values() for user in around[id(reader)].users()}
            residents.append(ResidentSpec(name, tuple(modules.values()), tuple(users.values()), tuple(own), before))
    return residents


@dataclasses.dataclass(frozen=True)
class _Surroundings:
    """A module outside the layers, and what is around it."""

    module: nn.Module
    holds_layers: bool
    layers_seen: int
    """Layers that come before the module in the model."""
    parent: _Surroundings | None

    def users(self) -> list[nn.Module]:
        """The module, what is around it up to the outermost without layers, and a parent with layers that may read it first.

        Such a parent runs for as long as its layers: it waits for what its layers need, not for what comes after them.
        """
        found, here = [self.module], self
        while here.parent is not None and not here.parent.holds_layers:
            here = here.parent
            found.append(here.module)
        parent = here.parent
        if parent is not None and (isinstance(self.module, nn.Embedding) or here.layers_seen == parent.layers_seen):
            found.append(parent.module)
        return found


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    """The module of a qualified name, or None if the model has none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
