"""What a compiled layer costs, read off its graph: operations, memory traffic of fused kernels, what is saved and alive.

The layer is traced by AOTAutograd on tensors without data and cut in forward and backward by the partitioner that
``torch.compile`` uses (torch/_functorch/partitioners.py), so what a compiled layer keeps for backward is known without
compiling it. Which kernels run is guessed by ``fused_kernels.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from megatrain_accelerate.estimate.fused_kernels import FusedKernels
from megatrain_accelerate.estimate.graph_nodes import is_attention, is_kernel, operation, size_bytes, source, values
from megatrain_accelerate.planning.step_memory import grouped_flops, is_grouped_product
from megatrain_accelerate.streaming.layer import StreamedLayer
from megatrain_accelerate.streaming.nested_tensors import tensors_in

_CAUSAL_SHARE = 0.5
"""Of all pairs of tokens: what a causal attention kernel computes."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or a convolution."""

    flops: float
    moved_bytes: float = 0.0
    """Of its operands and its result."""
    is_grouped: bool = False
    """Whether each token meets the matrix of its expert."""

    def times(self, factor: float) -> Product:
        """``factor`` times as many, one after the other."""
        return Product(factor * self.flops, factor * self.moved_bytes, self.is_grouped)


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
        """The most that is alive above what is there when it begins."""
        return max(self.alive_bytes, default=0)

    def times(self, factor: float) -> GraphCosts:
        """The costs of ``factor`` times as many runs, one after the other."""
        products = tuple(product.times(factor) for product in self.products)
        return GraphCosts(products, factor * self.attention_flops, factor * self.traffic_bytes, self.alive_bytes)

    @property
    def product_flops(self) -> float:
        """Of all products."""
        return sum(product.flops for product in self.products)


@dataclasses.dataclass(frozen=True)
class LayerGraph:
    """A layer's compiled forward, what a recompute runs of it (``streaming/recompute_graph.py``), and its backward."""

    forward: GraphCosts
    recompute: GraphCosts
    backward: GraphCosts
    kept_bytes: int
    """What forward saves for backward, inputs, outputs and weights left out."""
    output_bytes: int

    def times(self, factor: float) -> LayerGraph:
        """The layer on ``factor`` times as many pieces of a batch, one after the other."""
        kept, output = round(factor * self.kept_bytes), round(factor * self.output_bytes)
        forward, recompute, backward = (run.times(factor) for run in (self.forward, self.recompute, self.backward))
        return LayerGraph(forward, recompute, backward, kept, output)


@dataclasses.dataclass(frozen=True)
class TensorShape:
    """A tensor among a call's arguments, without the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorShape:
        """Of a tensor with or without data."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: str = "cpu") -> torch.Tensor:
        """A tensor of this shape."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


@dataclasses.dataclass
class _Traced:
    """What the partitioner was given and made."""

    forward: fx.Graph | None = None
    backward: fx.Graph | None = None
    outputs: int = 0


def trace_layer(layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerGraph:
    """Traces one call of a layer.

    Args:
        layer: of an engine on the meta device.
        args, kwargs: the call's, with a :class:`TensorShape` in the place of each tensor.

    Raises:
        Exception: whatever the layer or the tracer raises if its code can't be traced without data.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    traced = _Traced()

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for node in joint.graph.nodes:
            # The partitioner knows attention kernels of GPUs, not the one that stands for them here.
            if is_attention(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        options["compiler"] = "inductor"
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        traced.forward, traced.backward, traced.outputs = forward.graph, backward.graph, options["num_fwd_outputs"]
        return forward, backward

    def call(weights: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        with layer.bound(weights):
            return layer.run(args, kwargs)

    function = aot_function(
        call,
        fw_compiler=_interpreted,
        bw_compiler=_interpreted,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        dynamic=False,
    )
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), _fake_buffers(layer.module):
        weights = [
            torch.empty(entry.spec.shape, dtype=entry.spec.dtype, requires_grad=entry.spec.trainable)
            for entry in layer.unit.layout.entries
        ]
        args, kwargs = tree_map_only(TensorShape, lambda shape: shape.empty(), (args, kwargs))
        function(weights, args, kwargs)
    assert traced.forward is not None
    assert traced.backward is not None
    return _measured_graphs(traced.forward, traced.backward, traced.outputs)


def _interpreted(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(gm.forward)


@contextlib.contextmanager
def _fake_buffers(module: nn.Module) -> Iterator[None]:
    """Buffers on the meta device are tensors of the CPU while the body runs."""
    before = [(part, dict(part._buffers)) for part in module.modules()]
    try:
        for part, buffers in before:
            part._buffers.update(
                {name: torch.empty_like(b, device="cpu") for name, b in buffers.items() if b is not None and b.is_meta}
            )
        yield
    finally:
        for part, buffers in before:
            part._buffers.update(buffers)


def _measured_graphs(forward: fx.Graph, backward: fx.Graph, outputs: int) -> LayerGraph:
    results = _results(forward)
    returned = {source(node) for node in results[:outputs] if isinstance(node, fx.Node)}
    saved = {source(node) for node in results[outputs:] if isinstance(node, fx.Node)}
    saved = {node for node in saved - returned if node.op != "placeholder"}
    # Placeholders of the backward graph bear the names of what forward saved.
    freed = {source(node).name for node in results[outputs:] if isinstance(node, fx.Node)} & {node.name for node in saved}
    return LayerGraph(
        forward=_costs(forward, freed=set()),
        recompute=_costs(_without_outputs(forward, outputs), freed=set()),
        backward=_costs(backward, freed=freed | {node.name for node in results[outputs:] if source(node) in saved}),
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


def _costs(graph: fx.Graph, freed: set[str]) -> GraphCosts:
    """Adds up one graph.

    Args:
        graph: flat, functional operations.
        freed: names of placeholders whose memory is given back after their last use.
    """
    kernels = FusedKernels(graph)
    products = tuple(_product(node) for node in graph.nodes if _is_product(node))
    attention = [_attention_flops(node) for node in graph.nodes if is_attention(node)]
    return GraphCosts(products, sum(attention), kernels.traffic_bytes(), kernels.alive_bytes(freed))


def _results(graph: fx.Graph) -> Sequence[Any]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    results: Sequence[Any] = output.args[0]
    return results


def _numbers(node: fx.Node) -> tuple[Any, Any]:
    """The node's arguments with tensors without data in the place of nodes."""
    made: tuple[Any, Any] = fx.map_arg((node.args, node.kwargs), lambda used: used.meta.get("val"))
    return made


def _is_product(node: fx.Node) -> bool:
    return is_kernel(node) and not is_attention(node) and operation(node) != "getitem"


def _product(node: fx.Node) -> Product:
    args, kwargs = _numbers(node)
    operands = tensors_in((args, kwargs))
    moved_bytes = sum(tensor.nbytes for tensor in [*operands, *values(node)])
    if is_grouped_product(operation(node)):
        return Product(grouped_flops(args[0], args[1]), moved_bytes, is_grouped=True)
    flops = flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=node.meta["val"])  # type: ignore[union-attr]
    return Product(float(flops), moved_bytes)


def _attention_flops(node: fx.Node) -> float:
    """Two products of all pairs of tokens in forward, five in backward (FlashAttention-2, arXiv 2307.08691)."""
    args, kwargs = _numbers(node)
    tensors = [value for value in args if isinstance(value, torch.Tensor) and value.dim() == 4]
    is_backward = "backward" in operation(node)
    query, key = tensors[1:3] if is_backward else tensors[:2]
    is_causal = any(value is True for value in [*args, *kwargs.values()])
    pairs = query.shape[-2] * key.shape[-2] * (_CAUSAL_SHARE if is_causal else 1.0)
    return (5 if is_backward else 2) * 2.0 * query.shape[0] * query.shape[1] * pairs * query.shape[-1]
