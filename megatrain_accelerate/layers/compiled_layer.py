"""Compiled layers: one ``torch.compile`` for all equal layers. Where it fails, a layer runs its own code.

Layers are equal if they run the same function on parameters of the same names, shapes and dtypes. They share one compiled
function of module and inputs: dynamo lifts the weights bound to the module into inputs of its graph, so that neither layer nor
slot matters. Layers that differ in what else the code reads of a module (a window, a flag) get graphs of their own, and so do
those that record something inside (router logits), which is returned beside the output (:mod:`.output_recorder`).

The compiler's partitioner decides what backward recomputes. At a *memory budget* of 1.0 it saves what backward reads, except
what costs nearly nothing. At 0.0 it saves the inputs alone. In between it recomputes first what is cheapest
(``torch._functorch.config.activation_memory_budget``). Every budget above 0.0 saves attention's results: the partitioner
judges single tensors, and misses the cost of an operation that has several results. Each budget has a graph of its own, which
rounds in its own way. A recompute would draw other random numbers. So a graph that draws some saves everything, and where
memory is short such a layer runs its own code, which a checkpoint runs again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import operator
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._mode_utils import no_dispatch
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.layers import output_recorder
from megatrain_accelerate.layers.attention_results import attention_flops, drop_rate, is_attention, named_arguments
from megatrain_accelerate.layers.inductor_memory import overwriting_pass
from megatrain_accelerate.layers.layer import StreamedLayer
from megatrain_accelerate.layers.nested_tensors import Args, Kwargs, tensors_in
from megatrain_accelerate.layers.output_recorder import Captures
from megatrain_accelerate.layers.padding import RealTokens
from megatrain_accelerate.layers.proxy import warn_once
from megatrain_accelerate.layers.shared_mappings import has_mappings
from megatrain_accelerate.layers.unpadded_layer import attend_within_samples, causal_attention

logger = logging.getLogger(__name__)

SMALLEST_LAYER_PARAMETERS = 4_000_000
"""``auto`` compiles layers of at least so many parameters: kernels of smaller ones take less time than their launches."""

MOST_KINDS = 8
"""The most kinds of unequal layers to compile: a model in which every layer differs would compile for that many minutes."""

RECOMPILE_LIMIT = 16
"""The most graphs of one kind of layers, for different masks, attributes and sizes. Dynamo's limit is 8. A layer that reads
a counter would need a graph a call, and should give up."""

CANDIDATES = (0.01, 0.1, 0.2, 0.4, 0.6, 0.8)
"""Budgets that are tried between 0.0 and 1.0. Several may give the same graph. The smallest saves hardly more than attention's
results, which cost the most time for their bytes."""

_FLOPS_PER_BYTE = 200.0
"""Operations of matrix products that a GPU does while it moves one byte of its memory: about 100 to 250 on GPUs with bf16."""

_ATTENTION_SLOWNESS = 1.5
"""Time of attention's forward, relative to a matrix product of as many operations."""

_LEAST_DIFFERENCE = 0.03
"""Share of the activations by which two budgets must differ to count as distinct."""

_KEYS_ALIGNED = 8
"""Attention's kernels take masks whose rows begin at multiples of so many elements."""

_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")

_kind_numbers = itertools.count()


def _in_one_line(error: BaseException) -> str:
    """Describes the exception that the compiler met first, without its pages of advice."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException) and inner is not error:
        return _in_one_line(inner)
    text = " ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
    return f"{type(error).__name__}: {text[:200]}"


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """A memory budget, and its effect relative to those of 1.0 (saves everything) and 0.0 (recomputes everything)."""

    value: float
    saved_share: float
    """Bytes saved: 0 stands for as many as at 0.0, 1 for as many as at 1.0."""
    recompute_share: float
    """Time of the recompute: 1 stands for as much as at 0.0, 0 for as little as at 1.0."""


NOTHING = MemoryBudget(0.0, 0.0, 1.0)
EVERYTHING = MemoryBudget(1.0, 1.0, 0.0)


@dataclasses.dataclass(eq=False)
class _Kind:
    """Layers that share a compiled ``function`` at one memory budget, for all input sizes above 1 if ``sizes_vary``."""

    name: str
    memory_budget: float
    sizes_vary: bool
    gave_up: bool = False
    is_random: bool = False
    """Whether one of its graphs draws random numbers, or may do so because its backend doesn't let them be inspected."""
    budgets: tuple[MemoryBudget, ...] = ()
    """The distinct budgets that its layers could be compiled with. Known only of a kind whose own budget is 0.0."""
    function: Any = None


def _to_compile(forward: Callable[..., Any], channels: set[str]) -> Callable[..., Any]:
    """Returns a class's forward, unbound, which also returns what it records in these channels."""
    collector = output_recorder.collector()

    def run_layer(module: nn.Module, args: Args, kwargs: Kwargs, samples: tuple[torch.Tensor, ...]) -> Any:
        recorded: dict[str, list[Any]] = {channel: [] for channel in channels}
        row = _samples_of_a_row(*samples) if samples else None
        if collector is None:
            return forward(module, *args, **kwargs), recorded, row
        # Set inside what dynamo traces: only there does dynamo follow transformers' hooks.
        token = collector.set(recorded)
        try:
            return forward(module, *args, **kwargs), recorded, row
        finally:
            collector.reset(token)

    # Dynamo keeps graphs and their limit by code object, and what it learnt of dynamic sizes by name. If kinds shared these,
    # the second kind's weights would have dynamic sizes.
    code = run_layer.__code__.replace(co_name=f"run_layer_{next(_kind_numbers)}")
    return types.FunctionType(code, run_layer.__globals__, code.co_name, None, run_layer.__closure__)


def _draws(node: torch.fx.Node) -> bool:
    """Whether the node draws random numbers. With a probability of zero, which attention mostly has, it draws none."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    rate = drop_rate(operation, node.args, node.kwargs)
    return rate is None or bool(rate)


def _is_attention(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_attention(node.target)


class CompiledLayers:
    """Runs the layers of one engine compiled where ``wanted`` (``megatrain_config.compile_layers``) says so and it works."""

    def __init__(self, wanted: bool | str, device: torch.device) -> None:
        self._smallest = SMALLEST_LAYER_PARAMETERS if wanted == "auto" else 0
        # The engine of an estimate, on the meta device, stands for one on a GPU.
        self._is_on = device.type in ("cuda", "meta") if wanted == "auto" else bool(wanted)
        self.backend: str | Callable[..., Callable[..., Any]] = "inductor"
        """What compiles dynamo's graphs: the name of a backend that dynamo knows, or a function."""
        self._kinds: dict[Any, _Kind] = {}
        # Cached, to warn once for each name and reason.
        self._note_eager = functools.cache(functools.partial(logger.warning, "megatrain: %s runs uncompiled: %s"))
        self.is_optional = self._is_on and wanted == "auto"
        """Whether the plan may decide not to compile."""
        self.pays: bool | None = None
        """Whether the training is long enough to repay compiling; None if unknown. Set by the plan if it may decide."""
        self.sizes_vary = False
        """Whether inputs of layers have other sizes in other batches. Set by the plan before a batch runs."""
        self.compilations = 0

    @property
    def may_compile(self) -> bool:
        return self._is_on and self.pays is not False

    def suits(self, layer: StreamedLayer) -> Captures | None:
        """Returns what hooks inside the layer record, if the settings, its size and its hooks let it run compiled; else None.
        Dynamo doesn't notice hooks that come and go, so those inside may do nothing but record."""
        if layer.experts or not self.may_compile or layer.unit.layout.parameter_count < self._smallest:
            return None
        captures = output_recorder.captures_inside(layer.module)
        if captures is None:
            self._note_eager(type(layer.module).__name__, "hooks are registered inside it")
        return captures

    def wants(self, layer: StreamedLayer, row: RealTokens | None = None) -> Captures | None:
        """Returns what :meth:`suits` does if this call, on a ``row`` if there is one, should run compiled; else None."""
        # A mode that watches operations (a FLOP counter) should see them all. A graph would hold all tiles of tokens at once.
        if torch._C._len_torch_dispatch_stack() > 0 or layer.tiles.tile_tokens:
            return None
        captures = self.suits(layer)
        return None if captures is None or self._kind_of(layer, captures, 1.0, row) is None else captures

    def recomputes(
        self, layer: StreamedLayer, captures: Captures, memory_budget: float = 0.0, row: RealTokens | None = None
    ) -> bool:
        """Whether a layer that :meth:`wants` approved can be compiled so that its backward recomputes activations. Only the
        compilation tells whether it draws random numbers: if so, that one call keeps its activations."""
        kind = self._kind_of(layer, captures, memory_budget, row)
        return kind is not None and not kind.is_random

    def budgets(self, layer: StreamedLayer, captures: Captures, row: RealTokens | None = None) -> tuple[MemoryBudget, ...]:
        """Returns the distinct budgets of a layer that was compiled with a budget of 0.0; empty if they aren't known."""
        kind = self._kind_of(layer, captures, 0.0, row)
        return () if kind is None or kind.is_random else kind.budgets

    def run(
        self,
        layer: StreamedLayer,
        captures: Captures | None,
        args: Args,
        kwargs: Kwargs,
        memory_budget: float,
        row: RealTokens | None,
    ) -> Any:
        """Runs the layer's forward with the weights that are bound to it, with gradients enabled. It runs compiled, or as the
        layer's own code if compiling fails or ``captures``, which :meth:`wants` gave, is None. :meth:`recomputes` must have
        approved a memory budget below 1.0. The arguments are batches, or the tokens of ``row``. Raises what the layer's own
        code raises."""
        kind = None if captures is None else self._kind_of(layer, captures, memory_budget, row)
        if kind is None or has_mappings(args, kwargs):
            return layer.run(args, kwargs, row)
        samples = () if row is None else (row.begins, row.span)
        for tensor in tensors_in((args, kwargs, samples)) if kind.sizes_vary else ():
            # Sizes that the layer's code ties to its weights become static again. Those of 1 and 0 always are.
            torch._dynamo.maybe_mark_dynamic(tensor, [index for index, size in enumerate(tensor.shape) if size > 1])
        try:
            limit = replaced(torch._dynamo.config, "recompile_limit", RECOMPILE_LIMIT)
            # Dynamo guards on autocast's cache, which is off in a recompute.
            with limit, without_autocast_cache(), warnings.catch_warnings():
                # Dynamo reads ``.grad`` of inputs, and torch warns since hidden states in autograd's graph aren't leaves.
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
                output, recorded, _ = kind.function(layer.module, args, kwargs, samples)
            output_recorder.enter([(channel, value) for channel, values in recorded.items() for value in values])
            return output
        except Exception as error:
            if not any(cause.__module__.startswith(_COMPILERS) for cause in type(error).__mro__):
                raise  # by the layer's own code or the device
            reason = _in_one_line(error)
        # Dynamo has restored the RNG state from before the compilation (``preserve_global_state`` in its convert_frame.py).
        # Wrong arguments fail in the compiler too. Then this call raises the layer's own error, and nothing is given up.
        output = layer.run(args, kwargs, row)
        kind.gave_up = True
        self._note_eager(kind.name, reason)
        return output

    def _kind_of(self, layer: StreamedLayer, captures: Captures, memory_budget: float, row: RealTokens | None) -> _Kind | None:
        """Returns the layer's kind, or None if it runs its own code, which is logged once."""
        forward = getattr(layer.forward, "__func__", None)
        name = type(layer.module).__name__
        if forward is None or getattr(layer.forward, "__self__", None) is not layer.module:
            self._note_eager(name, "its forward was replaced by something that isn't a method of it")
            return None
        sizes_vary = self.sizes_vary or row is not None  # rows have other numbers of tokens in other batches
        key = (forward, layer.unit.layout.key, captures, row is not None, memory_budget, sizes_vary)
        kind = self._kinds.get(key)
        if kind is None:
            reason = _missing_in_torch()
            if reason is None and len({key[:-2] for key in (*self._kinds, key)}) > MOST_KINDS:
                reason = f"the model has more than {MOST_KINDS} kinds of layers that differ in code, parameters or outputs"
            if reason is not None:
                self._note_eager(name, reason)
                return None
            kind = _Kind(name, memory_budget, sizes_vary)
            # Dynamo doesn't guard on the budget: the backend sets it, also when a graph is compiled anew.
            backend = functools.partial(self._compile, kind)
            kind.function = torch.compile(_to_compile(forward, {at[1] for at in captures}), backend=backend, fullgraph=True)
            self._kinds[key] = kind
        return None if kind.gave_up else kind

    def _compile(self, kind: _Kind, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        """Dynamo's backend: compiles forward and backward of one graph at once, so that neither can fail later."""
        warn_once(f"compiling {kind.name} (half a minute, once for all equal layers; compile_layers: false leaves it out)")
        self.compilations += 1
        # Keeps saved buffers for a second backward. Set for the process, since each backward reads it, on autograd's thread.
        if hasattr(torch._functorch.config, "donated_buffer"):
            torch._functorch.config.donated_buffer = False
        settings: dict[str, Any] = {"force_non_lazy_backward_lowering": True}
        options: dict[str, Any] = {}
        if kind.sizes_vary:
            _keep_attention_within_samples(graph.graph)
            _pad_keys(graph.graph)
            graph.recompile()
        if self.backend != "inductor":
            kind.is_random = True
        else:
            # Dropout must draw what the layer's own code draws, which has to repeat the run after a failure.
            options["config_patches"] = {"fallback_random": True}
            if (overwriting := overwriting_pass()) is not None:
                options["config_patches"]["_post_fusion_custom_pass"] = overwriting
            if kind.sizes_vary and hasattr(torch._inductor.config.triton, "mix_order_reduction"):
                # With it Inductor makes graphs for few, more and many tokens, or a single one that slows the shortest most.
                options["config_patches"]["triton.mix_order_reduction"] = False
            if kind.memory_budget < 1.0:
                settings["activation_memory_budget"] = kind.memory_budget
                options["config_patches"]["joint_custom_pre_pass"] = _looking_at(kind)
                if kind.memory_budget == 0.0 and hasattr(torch._inductor.config, "custom_partitioner_fn"):
                    options["config_patches"]["custom_partitioner_fn"] = _asking_for_budgets(kind)
                settings["enable_autograd_cache"] = False  # a graph found there wouldn't be inspected
        with torch._functorch.config.patch(settings):
            compiled: Callable[..., Any] = torch._dynamo.lookup_backend(self.backend)(graph, inputs, **options)
        return compiled


@torch.compiler.allow_in_graph
def _samples_of_a_row(begins: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """Makes both arguments inputs of a graph, of which dynamo drops what the layer's own code doesn't read."""
    return begins.clone()


def _keep_attention_within_samples(graph: torch.fx.Graph) -> None:
    """Has attention in the graph of a layer on a row see the samples (:mod:`.unpadded_layer`)."""
    for row in graph.find_nodes(op="call_function", target=_samples_of_a_row):
        begins, span = row.args
        for node in graph.find_nodes(op="call_function", target=torch.nn.functional.scaled_dot_product_attention):
            query, key, value, others = causal_attention(node.args, node.kwargs)
            with graph.inserting_before(node):
                longest = graph.call_method("size", (span, 0))
            node.target, node.args, node.kwargs = attend_within_samples, (query, key, value, begins, longest), others


def _pad_keys(graph: torch.fx.Graph) -> None:
    """Pads attention's keys, values and mask to the next multiple of :data:`_KEYS_ALIGNED` keys, which nobody attends to. Else
    rows of the mask that aren't aligned are copied, in a graph of their own. Not with dropout: other elements would drop."""
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    pad = torch.nn.functional.pad
    for node in graph.find_nodes(op="call_function", target=torch.nn.functional.scaled_dot_product_attention):
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        mask = given.get("attn_mask")
        if len(node.args) > len(names) or not isinstance(mask, torch.fx.Node) or given.get("dropout_p"):
            continue
        example = mask.meta["example_value"]
        if example.dtype is not torch.bool or not isinstance(example.shape[-1], torch.SymInt):
            continue
        with graph.inserting_before(node):
            length = graph.call_method("size", (mask, -1))
            # Pads by at least one key: where there may be none to add, graphs differ.
            blocks = graph.call_function(operator.floordiv, (length, _KEYS_ALIGNED))
            whole = graph.call_function(operator.mul, (blocks, _KEYS_ALIGNED))
            rest = graph.call_function(operator.sub, (length, whole))
            more = graph.call_function(operator.sub, (_KEYS_ALIGNED, rest))
            given["attn_mask"] = graph.call_function(pad, (mask, (0, more)))
            for name in ("key", "value"):
                given[name] = graph.call_function(pad, (given[name], (0, 0, 0, more)))
        node.args, node.kwargs = (), given


def _looking_at(kind: _Kind) -> Any:
    """Returns a pass of Inductor's over the joint graph of forward and backward, before it is partitioned. One that draws
    random numbers is to save everything. Attention's results are marked to be saved, which a budget of 0.0 ignores."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Look(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            if any(map(_draws, graph.nodes)):
                kind.is_random = True
                torch._functorch.config.activation_memory_budget = 1.0  # until the end of this compilation
            for node in filter(_is_attention, graph.nodes):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

        def uuid(self) -> str:
            return "megatrain_accelerate: random numbers, attention"

    return Look()


def _asking_for_budgets(kind: _Kind) -> Any:
    """Returns Inductor's own partitioner, which first tells what it would do with other budgets."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Ask(CustomPartitionerFn):
        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
            if not kind.is_random:
                # The layer compiles without an answer, too.
                with warnings.catch_warnings(), contextlib.suppress(Exception):
                    warnings.simplefilter("ignore")
                    kind.budgets = budgets_of(gm, joint_inputs, options)
            return min_cut_rematerialization_partition(gm, joint_inputs, **options)

        def uuid(self) -> str:
            return "megatrain_accelerate: memory budgets"

        def __reduce__(self) -> Any:  # part of the key of Inductor's cache
            return str, (self.uuid(),)

    return Ask()


def budgets_of(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> tuple[MemoryBudget, ...]:
    """Returns the distinct budgets, from 0.0 to 1.0, of a joint graph of forward and backward, which is neither compiled nor
    changed. It is as the partitioner gets it with these ``options``: nodes have values without data, attention is marked."""
    found = {value: _saved_and_recomputed(graph, inputs, options, value) for value in (0.0, *CANDIDATES, 1.0)}
    (least, most_again), (most, again_in_any_case) = found[0.0], found[1.0]
    if most <= least or most_again <= again_in_any_case:
        return NOTHING, EVERYTHING
    budgets = [NOTHING]
    for value in CANDIDATES:
        saved, again = found[value]
        share = (saved - least) / (most - least)
        again_share = (again - again_in_any_case) / (most_again - again_in_any_case)
        is_other = budgets[-1].saved_share + _LEAST_DIFFERENCE <= share <= 1.0 - _LEAST_DIFFERENCE
        if is_other and 0.0 < again_share < budgets[-1].recompute_share:
            budgets.append(MemoryBudget(value, share, again_share))
    return (*budgets, EVERYTHING)


def _saved_and_recomputed(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any], value: float
) -> tuple[int, float]:
    """Returns the bytes that a budget saves besides the inputs, and the cost of what it recomputes: bytes written, or for
    matrix products the bytes that the GPU could move meanwhile."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    with torch._functorch.config.patch(activation_memory_budget=value):
        forward, backward = min_cut_rematerialization_partition(torch.fx.GraphModule(graph, copied), inputs, **options)
    outputs = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    given = {_storage(node) for node in forward.graph.nodes if node.op == "placeholder"}
    saved = {_storage(node): _bytes(node) for node in outputs[options["num_fwd_outputs"] :]}
    made = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    again = [node for node in backward.graph.nodes if node.op == "call_function" and node.name in made]
    return sum(size for storage, size in saved.items() if storage not in given), sum(map(_costs, again))


def _storage(node: torch.fx.Node) -> Any:
    """Identifies what a tensor shares with its views. Any other value shares nothing."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


def _bytes(node: torch.fx.Node) -> int:
    value = _concrete(node.meta.get("val"))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def _concrete(value: Any) -> Any:
    """Returns a node's value without data, with this call's sizes in place of symbolic ones, on which no guard is set."""
    if isinstance(value, torch.SymInt):
        return value.node.hint or 1
    if not isinstance(value, torch.Tensor):
        return value
    with no_dispatch():
        return torch.empty([_concrete(size) for size in value.shape], dtype=value.dtype, device="meta")


def _costs(node: torch.fx.Node) -> float:
    given: Any = torch.fx.map_arg((node.args, node.kwargs), lambda argument: _concrete(argument.meta.get("val")))
    args, kwargs = given
    if _is_attention(node):
        named = named_arguments(node.target, args, kwargs)
        flops = attention_flops(node.name, args)
        if flops is None:  # samples in one row (T tokens, heads, head size); argument 6 is the longest one's length
            flops = 4.0 * args[0].numel() * args[6]
        is_causal = named.get("is_causal", named.get("causal"))
        return _ATTENTION_SLOWNESS * flops * (0.5 if is_causal else 1.0) / _FLOPS_PER_BYTE
    formula: Callable[..., Any] | None = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if formula is not None:
        with contextlib.suppress(Exception):  # an operation that torch's formula refuses counts as any other
            return float(formula(*args, **kwargs, out_val=_concrete(node.meta["val"]))) / _FLOPS_PER_BYTE
    return float(_bytes(node))


def _missing_in_torch() -> str | None:
    """Says why this version of torch can't compile layers; None if it can."""
    import torch._dynamo
    import torch._functorch.config

    if not hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        return f"torch {torch.__version__} can't compile a layer's backward together with its forward; a newer one can"
    return None


class without_autocast_cache:
    """While the body runs, autocast caches no cast weight, which would outlive its slot."""

    def __enter__(self) -> None:
        self._cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_cache_enabled(self._cached)


def without_saving() -> saved_tensors_hooks:
    """Returns a context manager under which autograd saves nothing, for a graph that is dropped at once."""
    return saved_tensors_hooks(lambda _: None, _remember)


def _remember(_: Any) -> Any:
    raise UnsupportedError(
        "backward reached the inside of a streamed layer without passing through its outputs (torch.autograd.grad() inside "
        "its forward, or a loss stored in an attribute). This isn't possible where experts stream in parts, or while the plan "
        "measures layers. Return the loss with the output, or name other layers in megatrain_config.layer_classes"
    )
