"""What a layer costs that nobody has measured: the graph of a compiled one, and seconds.

The layer is traced by AOTAutograd on tensors without data and cut in forward and backward by the partitioner that
``torch.compile`` uses (torch/_functorch/partitioners.py), so what a compiled layer keeps for backward is known without
compiling it. Which kernels run is guessed by ``fused_kernels.py``.

Seconds are those of operations at shares of the machine's speeds, fitted to a few measured trainings on one H200
(docs/estimate_method.md lists them). They say how far a training stays behind what ``plan/machine.py`` measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from megatrain_accelerate.estimate.fused_kernels import (
    FusedKernels,
    is_attention,
    is_kernel,
    operation,
    size_bytes,
    source,
    values,
)
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.nested_tensors import tensors_in
from megatrain_accelerate.plan.machine import Machine
from megatrain_accelerate.plan.step_memory import OpCosts, attention_flops, grouped_flops, is_grouped_product
from megatrain_accelerate.plan.step_profile import LayerProfile

PRODUCTS = 0.98
"""Matrix products of layers, of the speed of a large product that the GPU keeps up."""
GROUPED = 0.79
"""Products with the matrices of many experts in one kernel, of the same: tiles that groups fill in part, and no kernel
chosen for each."""
ATTENTION = 0.74
"""Attention kernels, of the same; counted without the half that a causal one skips."""
SINGLE = 0.70
"""What isn't compiled, but for products and attention: of the speed of a copy within device memory. Kernels of one
operation each reduce, broadcast, or read slices and rows that aren't aligned."""
OUTSIDE = 0.955
"""All that runs outside the layers, the loss above all: of that speed, and of a copy's within device memory."""
_CAUSAL_SHARE = 0.5
"""Of all pairs of tokens: what a causal attention kernel computes."""
_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or a convolution."""

    flops: float
    moved_bytes: float = 0.0
    """Of its operands, the weights among them, and its result."""
    is_grouped: bool = False
    """Whether each token meets the matrix of its expert."""


@dataclasses.dataclass(frozen=True)
class GraphCosts:
    """What one run of a graph takes on the device."""

    products: tuple[Product, ...]
    attention_flops: float
    """Of attention kernels, the causal half where they skip the rest."""
    traffic_bytes: float
    """Read and written by fused kernels."""
    alive_bytes: tuple[int, ...]
    """At each operation: what is alive above what is there when it begins."""

    @property
    def peak_bytes(self) -> int:
        return max(self.alive_bytes, default=0)

    @property
    def product_flops(self) -> float:
        return sum(product.flops for product in self.products)


@dataclasses.dataclass(frozen=True)
class LayerGraph:
    """A layer's compiled forward, what a recompute runs of it, and its backward."""

    forward: GraphCosts
    recompute: GraphCosts
    backward: GraphCosts
    kept_bytes: int
    """What forward saves for backward, inputs, outputs and weights left out."""
    output_bytes: int


class WithoutAttentionDropout(TorchFunctionMode):
    """Calls of torch's attention drop nothing out while the body runs.

    A GPU's attention kernels drop out as they go, and keep no scores. The CPU's, which stand for them here, can't: with
    dropout torch takes products and a softmax there, with the scores of all pairs of tokens in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_dropped = False
        """Whether a call would have."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            kwargs = {**dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)), **kwargs}
            self.has_dropped |= bool(kwargs.get("dropout_p"))
            return func(**{**kwargs, "dropout_p": 0.0})
        return func(*args, **kwargs)


def trace_layer(layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerGraph:
    """Traces one call of a layer of an engine, with tensors of the meta device.

    Raises:
        Exception: whatever the layer or the tracer raises if its code can't be traced without data.
    """
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    traced: list[tuple[fx.Graph, fx.Graph, int]] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for node in joint.graph.nodes:
            # The partitioner knows attention kernels of GPUs, not the one that stands for them here.
            if is_attention(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        options["compiler"] = "inductor"
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        traced.append((forward.graph, backward.graph, options["num_fwd_outputs"]))
        return forward, backward

    def call(weights: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        with layer.bound(weights):
            return layer.run(args, kwargs)

    function = aot_function(
        call,
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=partition,
        decompositions=select_decomp_table(),
        dynamic=False,
    )

    def without_data(like: Any) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, requires_grad=like.requires_grad)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        named_buffers = layer.module.named_buffers(remove_duplicate=False)
        buffers = {name: torch.empty_like(buffer, device="cpu") for name, buffer in named_buffers if buffer.is_meta}
        specs = [entry.spec for entry in layer.unit.layout.entries]
        weights = [torch.empty(spec.shape, dtype=spec.dtype, requires_grad=spec.trainable) for spec in specs]
        with _reparametrize_module(layer.module, buffers):
            function(weights, *tree_map_only(torch.Tensor, without_data, (args, kwargs)))
    return _measured_graphs(*traced[0])


def _measured_graphs(forward: fx.Graph, backward: fx.Graph, outputs: int) -> LayerGraph:
    (output,) = (node for node in forward.nodes if node.op == "output")
    results: Sequence[Any] = output.args[0]
    returned = {source(node) for node in results[:outputs] if isinstance(node, fx.Node)}
    handed_on = [node for node in results[outputs:] if isinstance(node, fx.Node)]
    saved = {node for node in map(source, handed_on) if node not in returned and node.op != "placeholder"}
    # Placeholders of the backward graph bear the names of what forward saved.
    freed = {node.name for node in handed_on if source(node) in saved}
    return LayerGraph(
        forward=_costs(forward),
        recompute=_costs(_without_outputs(forward, outputs)),
        backward=_costs(backward, freed),
        kept_bytes=sum(size_bytes(node) for node in saved),
        output_bytes=sum(size_bytes(node) for node in returned),
    )


def _without_outputs(forward: fx.Graph, outputs: int) -> fx.Graph:
    """What is saved, and what that is made of."""
    shorter = fx.Graph()
    results = shorter.graph_copy(forward, {})
    shorter.output(tuple(results[outputs:]))  # type: ignore[index, arg-type]
    shorter.eliminate_dead_code()
    return shorter


def _costs(graph: fx.Graph, freed: Collection[str] = ()) -> GraphCosts:
    """Adds up a graph of functional operations; ``freed``: see :meth:`FusedKernels.alive_bytes`."""
    kernels = FusedKernels(graph)
    products = tuple(_product(node) for node in graph.nodes if _is_product(node))
    attention = [_attention_flops(node) for node in graph.nodes if is_attention(node)]
    return GraphCosts(products, sum(attention), kernels.traffic_bytes(), kernels.alive_bytes(freed))


def _numbers(node: fx.Node) -> tuple[Any, Any]:
    """The node's arguments with tensors without data in the place of nodes."""
    return fx.map_arg((node.args, node.kwargs), lambda used: used.meta.get("val"))


def _is_product(node: fx.Node) -> bool:
    return is_kernel(node) and not is_attention(node) and operation(node) != "getitem"


def _product(node: fx.Node) -> Product:
    args, kwargs = _numbers(node)
    moved_bytes = sum(tensor.nbytes for tensor in [*tensors_in((args, kwargs)), *values(node)])
    if is_grouped_product(operation(node)):
        return Product(grouped_flops(args[0], args[1]), moved_bytes, is_grouped=True)
    flops = flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=node.meta["val"])  # type: ignore[union-attr]
    return Product(float(flops), moved_bytes)


def _attention_flops(node: fx.Node) -> float:
    args, kwargs = _numbers(node)
    is_causal = any(value is True for value in [*args, *kwargs.values()])
    return (attention_flops(operation(node), args) or 0.0) * (_CAUSAL_SHARE if is_causal else 1.0)


def extended(once: Any, twice: Any, times: float) -> Any:
    """What ``times`` the sequences of ``once`` cost; ``twice`` is of two times as many.

    Both are dataclasses, tuples and numbers of one structure; what is no number is taken from ``twice``, and what is None in
    either is None. Bytes and operations lie on a line. Seconds needn't: they are reckoned afterwards, since a product of few
    tokens may be bound by its weights' bytes.
    """
    if once is None or twice is None:
        return None
    if dataclasses.is_dataclass(twice) and not isinstance(twice, type):
        names = [field.name for field in dataclasses.fields(twice) if field.init]
        parts = {name: extended(getattr(once, name), getattr(twice, name), times) for name in names}
        return dataclasses.replace(twice, **parts)
    if isinstance(twice, tuple):
        if len(once) != len(twice):
            # Alive at each operation of graphs that were cut otherwise: the peaks are on a line.
            once, twice = (max(once, default=0),), (max(twice, default=0),)
        return tuple(extended(first, second, times) for first, second in zip(once, twice, strict=True))
    if isinstance(twice, bool) or not isinstance(twice, (int, float)):
        return twice
    on_the_line = once + (twice - once) * (times - 1)
    return round(on_the_line) if isinstance(twice, int) else on_the_line


def graph_seconds(costs: GraphCosts, machine: Machine) -> float:
    """Of a compiled layer's forward or backward."""
    return _products_seconds(costs, machine) + _attention_seconds(costs, machine) + costs.traffic_bytes / machine.device_bytes


def _products_seconds(costs: GraphCosts, machine: Machine) -> float:
    """A product of short rows (a head's queries with its keys) is bound by what it reads and writes."""
    return sum(
        max(
            product.flops / ((GROUPED if product.is_grouped else PRODUCTS) * machine.device_flops),
            product.moved_bytes / machine.device_bytes,
        )
        for product in costs.products
    )


def _attention_seconds(costs: GraphCosts, machine: Machine) -> float:
    return costs.attention_flops / (ATTENTION * machine.device_flops)


def compiled_profile(dry: LayerProfile, graph: LayerGraph, machine: Machine) -> LayerProfile:
    """The profile of a call that runs compiled; ``dry`` and ``graph`` may be of its first piece."""
    forward = graph_seconds(graph.forward, machine)
    return dry.keeping(
        graph.kept_bytes,
        forward_bytes=graph.forward.peak_bytes,
        kept_forward_bytes=graph.forward.peak_bytes,
        kept_backward_bytes=graph.backward.peak_bytes,
        recomputed_bytes=max(graph.forward.peak_bytes, graph.kept_bytes + graph.backward.peak_bytes),
        forward_seconds=forward,
        kept_forward_seconds=forward,
        recompute_seconds=graph_seconds(graph.recompute, machine),
        backward_seconds=graph_seconds(graph.backward, machine),
    )


def uncompiled_profile(
    dry: LayerProfile, graph: LayerGraph | None, pieces: float, by_tiles: bool, machine: Machine
) -> LayerProfile:
    """The profile of a call that runs as it is written: each operation reads and writes memory.

    Args:
        graph: of the call's first piece, which runs ``pieces`` times; None where the layer can't be traced, and attention
            isn't counted.
        by_tiles: whether the call runs by tiles of tokens, and its parts once more in backward.
    """

    def seconds(costs: OpCosts, compiled: GraphCosts | None) -> float:
        traffic = costs.traffic_bytes / (SINGLE * machine.device_bytes)
        if compiled is None:
            return costs.flops / (PRODUCTS * machine.device_flops) + traffic
        # By tiles the parts' products are the layer's, some of them more than once.
        times = costs.flops / max(1.0, compiled.product_flops) if by_tiles else pieces
        return times * _products_seconds(compiled, machine) + pieces * _attention_seconds(compiled, machine) + traffic

    forward = seconds(dry.forward, graph.forward if graph else None)
    return dataclasses.replace(
        dry,
        forward_seconds=forward,
        kept_forward_seconds=forward,
        backward_seconds=seconds(dry.backward, graph.backward if graph else None),
        attention_seconds=pieces * _attention_seconds(graph.forward, machine) if graph and by_tiles else None,
    )
