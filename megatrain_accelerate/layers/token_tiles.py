"""Runs the token-wise parts of a layer by tiles of tokens, so that their intermediate results exist for one tile at a time.

A *part* is a submodule such as an MLP or a norm. It saves only its inputs and weights. In backward each tile is recomputed
with a graph, and gradients of weights are summed in fp32. The idea is that of chunked feed-forward layers (Liu and Abbeel,
arXiv 2305.19370) and of DeepSpeed's tiled MLP (arXiv 2506.13996). Shapes: B samples, T tokens, H heads.

A trial on a few tokens shows which parts treat every token alone, so that no model has to be known by name. Sums, products and
softmaxes propagate NaN, whatever the weights are. So a part may run by tiles if making one token NaN makes no other token NaN,
and if some tokens give the same results alone as among others. Decisions (which expert, which tokens are dropped) propagate no
NaN, and tiles would draw other random numbers than the whole batch, so that parts with either run whole.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatrain_accelerate.hooks import ModelHook, has_hooks_inside
from megatrain_accelerate.layers.execution_state import autocast_restored, put_in, rng_state_restored
from megatrain_accelerate.layers.nested_tensors import Args, Kwargs, taken_apart, tensors_in
from megatrain_accelerate.layers.proxy import is_proxy

AUTO_TILE_TOKENS = 8192
"""Tokens of a tile that the plan chooses. Matrix products of as many rows run at full speed, and the widest tensors of a layer
of several billion parameters take a few hundred MiB."""

verdicts: dict[Hashable, str | None] = {}
"""Results of the trials of all engines of the process, by kind of module and of call. See :func:`reason_against`."""

_PLAIN = (bool, int, float, str, types.NoneType, types.EllipsisType)
"""Types of arguments that have no tokens. An ellipsis stands for a tensor that was taken out."""

_TOKENS = 8
_SPOILT = (0, 3, 7)
"""Tokens of a trial that are made NaN in turn. A part that looks back, ahead or to both sides propagates one of them."""
_PART = (2, 3)
"""Index of the first of the trial's tokens that run alone, and their number."""
_MIXING = ("convolution", "_pad", "roll", "shift", "_pool", "fft", "flip", "unfold", "im2col", "upsample", "cumsum", "cumprod")
"""Words in the names of operations that combine tokens at a distance that an argument gives."""
_WEIGHT = 0.01
"""The value of every weight in a trial. Which tokens depend on which doesn't hinge on it."""
TOLERANCE = 0.02
"""The largest difference between the results of tokens alone and among others, relative to the largest result. Kernels for
other sizes round differently, in bf16 by 0.4%."""
_WORTH_TILING = 2.5
"""Tiles save nothing for a part that allocates less than this many times its output (1 for a product, with a bias up to 2)."""
_Tile = TypeVar("_Tile")
_runs_few = False
_times = 1


def is_plain(argument: Any) -> bool:
    """Whether an argument has no tokens and nothing that a part could write into."""
    return isinstance(argument, _PLAIN) or (isinstance(argument, tuple) and all(map(is_plain, argument)))


@contextlib.contextmanager
def few_tiles() -> Iterator[None]:
    """Makes loops over :func:`tiles` run few of them in the body, in every thread (autograd has its own). It is for fake runs,
    where all tiles are alike and an operation of any size takes as long as its launch."""
    global _runs_few, _times
    before, _runs_few = _runs_few, True
    try:
        yield
    finally:
        _runs_few, _times = before, 1  # the generator of a loop that failed may still be suspended


def times() -> int:
    """How many tiles the running one stands for."""
    return _times


def tiles(every: Sequence[_Tile]) -> Iterator[_Tile]:
    """Yields the tiles of a loop, or parts of experts, in order. Under :func:`few_tiles` it yields the first two and the last:
    the first may allocate what all use (a sum to add to), and the second stands for all others before the last."""
    global _times
    if not _runs_few or len(every) < 4:
        yield from every
        return
    yield every[0]
    before, _times = _times, _times * (len(every) - 2)
    try:
        yield every[1]
    finally:
        _times = before
    yield every[-1]


class TokenTiles:
    """Runs the token-wise ones among ``parts`` (name and module, of one layer or outside of all) by tiles of tokens."""

    def __init__(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        self.tile_tokens = 0
        """Tokens of a tile, over all samples, or 0 to run everything whole. The plan sets it between steps."""
        self._parts = {part: name for name, part in parts}
        self.found: dict[str, str | None] = {}
        """For each part that was called with a row for each token, by name: why its last such call ran whole, or None if it
        ran by tiles. Parts within one that ran by tiles aren't listed."""

    @classmethod
    def of_layer(cls, layer: nn.Module) -> TokenTiles:
        return cls((name, child) for name, child in layer.named_modules() if child is not layer)

    @classmethod
    def of_norms(cls, model: nn.Module, modules: Iterable[nn.Module]) -> TokenTiles:
        """Tiles for the norms among ``modules`` outside the layers: those whose weights are all vectors. A last norm makes
        several tensors in fp32, each twice as large as its input."""
        names = {module: name for name, module in model.named_modules()}
        parameters = {module: list(module.parameters()) for module in modules}
        return cls((names[m], m) for m, own in parameters.items() if own and all(p.dim() == 1 for p in own))

    @property
    def tiled_names(self) -> list[str]:
        return [name for name, reason in self.found.items() if reason is None]

    def at_work(self, args: Args, kwargs: Kwargs) -> contextlib.AbstractContextManager[None]:
        """Makes the parts run by tiles in the body, which calls the layer with these arguments."""
        shape = tokens_of(args, kwargs) if self.tile_tokens else None
        return contextlib.nullcontext() if shape is None else self.at_work_anywhere(shape)

    @contextlib.contextmanager
    def at_work_anywhere(self, shape: tuple[int, int] | None = None) -> Iterator[None]:
        """Makes the parts run by tiles in the body, on batches of this shape (B, T). Without one, as outside of layers, the
        arguments of each part's own call tell the shape."""
        own = {part: part.__dict__.get("forward") for part in self._parts if self.tile_tokens}
        try:
            for part in own:
                part.__dict__["forward"] = functools.partial(self._run, shape, part, part.forward)
            yield
        finally:
            for part, forward in own.items():
                part.__dict__.pop("forward", None)
                if forward is not None:
                    part.__dict__["forward"] = forward

    def hooks_on(self, model: nn.Module) -> list[Any]:
        """Registers hooks by which the parts run by tiles in each call of the model. Fake runs skip hooks."""
        at_work = contextlib.ExitStack()

        def begin(*_: Any) -> None:
            at_work.close()  # left open by a call that was interrupted
            at_work.enter_context(self.at_work_anywhere())

        # With arguments, since a ModelHook without them is called when the model is copied.
        end = ModelHook(lambda *_: at_work.close(), with_arguments=True)
        return [
            model.register_forward_pre_hook(ModelHook(begin, with_arguments=True)),
            model.register_forward_hook(end, always_call=True),
        ]

    def _run(
        self, shape: tuple[int, int] | None, part: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        shape = shape or tokens_of(args, kwargs)
        if shape is None or shape[0] * shape[1] <= self.tile_tokens:
            return forward(*args, **kwargs)
        call = PartCall(part, forward, args, kwargs)
        dim, reason = call.token_dim(shape), None
        if dim is not None:
            # The kind is found anew for each call: a dropout rate may have been set since.
            reason = reason_against(part, part.modules(), call.kind(dim), functools.partial(examine, call, dim))
            self.found[self._parts[part]] = reason
        if dim is None or reason is not None:
            return forward(*args, **kwargs)
        call.dim, call.length = dim, max(1, self.tile_tokens // (shape[0] if dim else 1))
        return _TiledFunction.apply(call, *call.tensors, *(table[name] for table, name in call.places))


def code_of(module: nn.Module) -> Hashable:
    """A key that is equal for modules of the same classes, functions, plain attributes, and shapes and dtypes of weights."""
    parts = []
    for child in module.modules():
        plain = [
            (name, value if isinstance(value, (bool, int, float, str)) else getattr(value, "__qualname__", ""))
            for name, value in sorted(child.__dict__.items())
            if (isinstance(value, (bool, int, float, str)) and "idx" not in name) or callable(value)
        ]
        shapes = [(name, tuple(p.shape), p.dtype) for name, p in child._parameters.items() if p is not None]
        parts.append((type(child), tuple(plain), tuple(shapes), tuple(child._modules)))
    return tuple(parts)


def tokens_of(args: Args, kwargs: Kwargs) -> tuple[int, int] | None:
    """(B, T) of a call's hidden states, its first floating-point tensor of at least three dimensions. None if it has none."""
    tensors = tensors_in((args, kwargs))
    return next(((t.shape[0], t.shape[1]) for t in tensors if t.is_floating_point() and t.dim() >= 3), None)


class PartCall:
    """One call of a part, whose arguments are taken apart and put together again for each tile."""

    def __init__(self, part: nn.Module, forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
        self._forward = forward
        self.tensors, self._put_together = taken_apart((args, kwargs))
        self.tensor_count = len(self.tensors)
        self._rest = self._put_together([...] * self.tensor_count)
        self.part = part
        self.dim = self.length = 0
        """A tile has ``length`` tokens of each sample along ``dim``, the last one maybe fewer."""

    @functools.cached_property
    def places(self) -> list[tuple[dict[str, Any], str]]:
        """For each of the part's parameters the dict that holds it, and its name in the dict."""
        return [(table, name) for table, name, _ in _held([module._parameters for module in self.part.modules()])]

    def token_dim(self, shape: tuple[int, int]) -> int | None:
        """The dimension of tokens: 1 of (B, T, ...), 2 of (B, H, T, ...), 0 of (B * T, ...). None if tensors differ in it, or
        if the part could write into an argument such as a list."""
        found = {self._dim_of(tensor, shape) for tensor in self.tensors}
        args, kwargs = self._rest
        return found.pop() if len(found) == 1 and all(map(is_plain, (*args, *kwargs.values()))) else None

    @staticmethod
    def _dim_of(tensor: torch.Tensor, shape: tuple[int, int]) -> int | None:
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return None
        if tensor.dim() >= 3 and tuple(tensor.shape[:2]) == shape:
            return 1
        if tensor.dim() >= 4 and (tensor.shape[0], tensor.shape[2]) == shape:
            return 2
        return 0 if tensor.shape[0] == shape[0] * shape[1] else None

    def kind(self, dim: int) -> Hashable:
        """What calls must share for one trial to decide on all of them: the part's :func:`code_of`, whether autocast is on,
        and the arguments, except for the numbers of samples and tokens and the values of tensors."""
        tensors = tuple(((*t.shape[1:dim], *t.shape[dim + 1 :]), t.dtype, t.device.type) for t in self.tensors)
        return (code_of(self.part), dim, tensors, repr(self._rest), torch.is_autocast_enabled())

    def starts(self, like: torch.Tensor) -> Iterator[int]:
        """The index of the first token of each tile, for tensors as long as ``like``."""
        return tiles(range(0, like.shape[self.dim], self.length))

    def tile(self, tensors: Sequence[torch.Tensor], start: int) -> list[torch.Tensor]:
        return [t.narrow(self.dim, start, min(self.length, t.shape[self.dim] - start)) for t in tensors]

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self._put_together(tensors)
        return self._forward(*args, **kwargs)

    def gradients(
        self, tile: list[torch.Tensor], needs: Sequence[bool], trained: list[torch.Tensor], grad_output: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of a recomputed tile's inputs that need one, then of ``trained`` weights. None where none flows."""
        tile = [tensor.detach().requires_grad_(need) for tensor, need in zip(tile, needs, strict=True)]
        leaves = [*(tensor for tensor in tile if tensor.requires_grad), *trained]
        with torch.enable_grad():
            output = self.run(tile)
        if not output.requires_grad:  # the part runs under no_grad, or detaches its inputs
            return [None] * len(leaves)
        return torch.autograd.grad(output, leaves, grad_output, allow_unused=True)


class _TiledFunction(torch.autograd.Function):
    """A part's call, tile by tile. Forward makes no graph, backward one for each tile."""

    @staticmethod
    def forward(ctx: Any, call: PartCall, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = tensors[: call.tensor_count]
        call.tensors = []  # else they would live as long as the graph
        ctx.call, ctx.autocast = call, autocast_restored(tensors[0].device.type)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        output: torch.Tensor | None = None
        for start in call.starts(inputs[0]):
            made = call.run(call.tile(inputs, start))
            if output is None:
                end = call.dim + 1
                output = made.new_empty((*inputs[0].shape[:end], *made.shape[end:]))
            call.tile([output], start)[0].copy_(made)
        assert output is not None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor | None) -> Any:
        call: PartCall = ctx.call
        if grad_output is None:
            return (None,) * len(ctx.needs_input_grad)
        count = call.tensor_count
        needs = ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors  # read once, since a checkpoint around the part unpacks them only once
        inputs, weights = saved[:count], saved[count:]
        leaves = [weight.detach().requires_grad_(need) for weight, need in zip(weights, needs[count:], strict=True)]
        gradients = [torch.empty_like(t) if need else None for t, need in zip(inputs, needs[:count], strict=True)]
        wanted = [gradient for gradient in gradients if gradient is not None]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        sums: dict[int, torch.Tensor] = {}
        with ctx.autocast(), put_in([(*place, leaf) for place, leaf in zip(call.places, leaves, strict=True)]):
            for start in call.starts(inputs[0]):
                (of_output,) = call.tile([grad_output], start)
                found = call.gradients(call.tile(inputs, start), needs[:count], trained, of_output)
                for place, gradient in zip(call.tile(wanted, start), found, strict=False):
                    place.zero_() if gradient is None else place.copy_(gradient)
                for row, gradient in enumerate(found[len(wanted) :]):
                    if gradient is not None:
                        sums[row] = sums[row].add_(gradient) if row in sums else gradient.to(torch.float32, copy=True)
                del found  # frees the gradients before the next tile allocates its own
                gradient = None
        totals = iter(sums[row].to(leaf.dtype) if row in sums else None for row, leaf in enumerate(trained))
        return (None, *gradients, *(next(totals) if need else None for need in needs[count:]))


def examine(call: PartCall, dim: int) -> str | None:
    """Tries a part out on made-up tokens along ``dim``. Returns why it isn't to run by tiles, else None. Of the tensors of
    ``call`` only shapes, dtypes and device count."""
    if any(True for _ in call.part.buffers()):  # which may be statistics of the tokens
        return "it has buffers"
    return tried_out(call.part, call.tensors[0].device, functools.partial(_examine, call, dim))


def reason_against(
    module: nn.Module, parts: Iterable[nn.Module], kind: Hashable, trial: Callable[[], str | None]
) -> str | None:
    """Why a module of these ``parts`` has to run on whole batches, as its author wrote it, or None if it needn't. ``trial``
    runs once in the process for all modules and calls of the same ``kind``."""
    if has_hooks_inside(module):  # which should see whole tensors, and each once
        return "hooks are registered inside it"
    if any(map(is_proxy, parts)):
        # The proxy would record a trial's call as one of the layer's, and the layer's recompute would expect its result.
        return "its experts stream in parts"
    if kind not in verdicts:
        verdicts[kind] = trial()
    return verdicts[kind]


def tried_out(module: nn.Module, device: torch.device, trial: Callable[[torch.device], str | None]) -> str | None:
    """Calls ``trial`` with the device to use, while constants replace the module's weights and buffers. The RNG state stays as
    it is, and no active mode sees the trial. Returns its result, or why the module can't be tried out."""
    if device.type == "cuda" and not torch.cuda.is_available():
        device = torch.device("cpu")
    matrices: dict[torch.dtype, torch.Tensor] = {}

    def constant(tensor: torch.Tensor) -> torch.Tensor:
        number = _WEIGHT if tensor.is_floating_point() else 1
        # One number is expanded to all. But kernels that compute all experts at once need one expert's matrix in memory.
        shape = (1, *tensor.shape[1:]) if tensor.dim() > 2 else ()
        return torch.full(shape, number, dtype=tensor.dtype, device=device).expand(tensor.shape)

    def in_memory(weight: torch.Tensor) -> torch.Tensor:
        # A product copies a matrix that is expanded from one number, or is a hundred times slower (bf16 on CPUs without
        # AVX-512). So matrices are allocated: those of a dtype share the memory of the largest.
        if weight.dim() != 2:
            return constant(weight)
        if weight.dtype not in matrices:
            matrices[weight.dtype] = constant(weight).contiguous().flatten()
        return matrices[weight.dtype][: weight.numel()].view(weight.shape)

    # The RNG state is restored, since a forward may include a trial that draws, and its recompute does not.
    with rng_state_restored(device), _disable_current_modes(), torch.no_grad():
        try:
            weights = _held([child._parameters for child in module.modules()])
            weights.sort(key=lambda row: row[2].numel(), reverse=True)
            buffers = _held([child._buffers for child in module.modules()])
            held = [(table, name, in_memory(weight)) for table, name, weight in weights]
            with put_in([*held, *((table, name, constant(buffer)) for table, name, buffer in buffers)]):
                return trial(device)
        except Exception as error:  # a user's module may raise anything here
            return f"it can't be tried out ({type(error).__name__}: {str(error)[:80]})"


def _held(tables: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    return [(table, name, at) for table in tables for name, at in table.items() if at is not None]


def _examine(call: PartCall, dim: int, device: torch.device) -> str | None:
    inputs = [_made_up(example, dim, device) for example in call.tensors]
    versions = [tensor._version for tensor in inputs]
    with _Watch() as watch:
        whole = call.run(inputs)
    if watch.decision is not None:
        return watch.decision
    if not isinstance(whole, torch.Tensor) or whole.dim() <= dim or whole.shape[: dim + 1] != inputs[0].shape[: dim + 1]:
        return "it doesn't return one tensor of a row for each token"
    if versions != [tensor._version for tensor in inputs]:
        return "it writes to its inputs"
    if not whole.is_floating_point() or not bool(whole.isfinite().all()):
        return "it returns integers, or non-finite numbers, for made-up tokens"
    for token in _SPOILT:
        spoilt = [tensor.clone() for tensor in inputs]
        for tensor in spoilt:
            tensor.select(dim, token).fill_(float("nan"))
        others = [place for place in range(_TOKENS) if place != token]
        found = call.run(spoilt).index_select(dim, torch.tensor(others, device=whole.device))
        if bool(found.isnan().any()):
            return "a token's output depends on other tokens"
    alone = call.run([_part(tensor, dim) for tensor in inputs])
    expected = _part(whole, dim)
    if alone.shape != expected.shape:
        return "it doesn't return one tensor of a row for each token"
    if float((alone - expected).abs().max()) > TOLERANCE * float(expected.abs().max()):
        return "a token's output depends on its position"
    if watch.made_bytes < _WORTH_TILING * whole.nbytes:
        return "it allocates little besides its output"
    return None


class _Watch(TorchDispatchMode):
    """Adds up the bytes of new tensors, and notes why an operation can't run by tiles."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.made_bytes = 0
        self.decision: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs))
        made = tensors_in(result)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        self.made_bytes += sum(tensor.nbytes for tensor in made if tensor.untyped_storage()._cdata not in known)
        # Integers that are made from other numbers are decisions: which is the largest, how many there are, where.
        is_whole = [[not t.is_floating_point() and t.dtype != torch.bool for t in tensors] for tensors in (made, given)]
        counts = any(is_whole[0]) and not all(is_whole[1])
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.decision = "it draws random numbers"
        elif func is torch.ops.aten._local_scalar_dense.default or counts:
            self.decision = "it makes discrete choices that depend on values"
        elif any(word in str(func) for word in _MIXING):
            # maybe from further away than the trial's tokens reach
            self.decision = "it may combine neighbouring tokens (convolution, shift, cumulative sum)"
        return result


def _made_up(example: torch.Tensor, dim: int, device: torch.device) -> torch.Tensor:
    shape = (*(() if dim == 0 else (1, *example.shape[1:dim])), _TOKENS, *example.shape[dim + 1 :])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, example.dtype)


def _part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.narrow(dim, *_PART).contiguous()
