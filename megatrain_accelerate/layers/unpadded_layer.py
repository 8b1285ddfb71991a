"""Calls a layer on the real tokens of a batch alone, so that nothing in the layer computes padding.

The tokens of all samples are concatenated to one row, (1, N, ...) instead of (B, T, ...), and each sample attends only to
itself. Flash attention takes such rows together with the offsets of their samples (Dao, arXiv 2307.08691), as in BERT's
training (Zeng et al., arXiv 2208.08124) and transformers' ``DataCollatorWithFlattening``. The engine makes the row before each
layer and the batch after it, so that model, script and collator needn't know.

A trial on two made-up samples shows whether a layer can run so. If one sample's tokens are made NaN, the results and gradients
of the other must stay finite. Its results must also equal those of a run on it alone. So a layer that mixes tokens by other
means than torch's attention (a convolution, a recurrence) computes padding, and so does one that draws random numbers.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.hooks import has_hooks_inside
from megatrain_accelerate.layers.execution_state import RngState
from megatrain_accelerate.layers.nested_tensors import Args, Kwargs, map_tensors, taken_apart
from megatrain_accelerate.layers.padding import RealTokens
from megatrain_accelerate.layers.saved_tensors import innermost_hooks
from megatrain_accelerate.layers.token_tiles import TOLERANCE, code_of, is_plain, reason_against, tried_out

_LENGTHS = (3, 5)
"""Tokens of each sample of a trial."""
_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
"""The largest head size that flash attention takes. It must also be a multiple of 8."""

_REMEDY = "; pad on the left (tokenizer.padding_side = 'left') to have padding computed"
"""The remedy where a layer's attention isn't the one that the trial saw."""


class _Role(enum.Enum):
    """The first dimensions of a tensor among a layer's arguments, for B samples of T tokens."""

    TOKENS = "B, T"
    COLUMNS = "1, T"
    COLUMN = "T"
    MASK = "B or 1, 1, T, T"
    NUMBER = ""


class UnpaddedLayer:
    """Decides whether a layer of the model can run on real tokens alone, and makes its arguments for that."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._forward = module, module.forward
        self._found: dict[Hashable, str | None] = {}
        """Why the layer computes padding, or None if it needn't, by all that may differ between its calls."""

    def in_a_row(self, real: RealTokens | None, args: Args, kwargs: Kwargs) -> tuple[RealTokens | None, Args, Kwargs]:
        """The real tokens and the layer's arguments as one row of them, or None and the unchanged arguments if padding has to
        be computed."""
        if real is None or innermost_hooks() is not None:  # a checkpoint around the layer recomputes it without ``real``
            return None, args, kwargs
        tensors, put_together = taken_apart((args, kwargs))
        roles = [_role(tensor, real) for tensor in tensors]
        if not self._can(real, tensors, roles, put_together):
            return None, args, kwargs
        row = [_in_a_row(tensor, role, real) for tensor, role in zip(tensors, roles, strict=True)]
        return (real, *put_together(row))

    def _can(
        self, real: RealTokens, tensors: list[torch.Tensor], roles: list[_Role | None], put_together: Callable[[Any], Any]
    ) -> bool:
        rest = put_together([...] * len(tensors))
        if None in roles or not all(map(is_plain, (*rest[0], *rest[1].values()))):
            return False
        # Dropout rates may have been set since the last call, and hooks come and go.
        rates = ("p", "attention_dropout")
        modules = [(child.training, *(getattr(child, rate, 0) for rate in rates)) for child in self._module.modules()]
        # Numbers may differ in each step (``num_items_in_batch``), but flags decide what is computed.
        plain = [value if isinstance(value, (bool, str)) else type(value) for value in (*rest[0], *rest[1].values())]
        dtypes = [tensor.dtype for tensor in tensors]
        key = (*roles, *dtypes, *plain, *modules, torch.is_autocast_enabled(), has_hooks_inside(self._module))
        if key not in self._found:
            trial = functools.partial(_examine, tensors, roles, put_together, self._forward)
            self._found[key] = self._reason_against((key, repr(rest)), tensors, trial)
        windows = [getattr(child, "sliding_window", None) for child in self._module.modules()]
        if self._found[key] is not None or any(isinstance(window, int) and window < real.width for window in windows):
            return False
        masks = (tensor for tensor, role in zip(tensors, roles, strict=True) if role is _Role.MASK)
        return all(map(real.hides_padding_alone, masks))

    def _reason_against(self, key: Hashable, tensors: list[torch.Tensor], trial: Callable[..., str | None]) -> str | None:
        children = [child for child in self._module.modules() if child is not self._module]
        # Llama 4 scales queries by their index in the row, from some thousands of tokens on.
        if any(getattr(at, "attn_temperature_tuning", False) and not getattr(at, "use_rope", False) for at in children):
            return "its queries are scaled by position in the row"
        shapes = tuple((tensor.shape[2:], tensor.dtype, tensor.device.type) for tensor in tensors)
        tried = functools.partial(tried_out, self._module, tensors[0].device, trial)
        return reason_against(self._module, children, (key, code_of(self._module), shapes), tried)


def _role(tensor: torch.Tensor, real: RealTokens) -> _Role | None:
    """The role of an argument, or None if its shape leaves doubt."""
    samples, width, shape = len(real.lengths), real.width, tuple(tensor.shape)
    if not shape:
        return _Role.NUMBER
    if shape[:2] == (samples, width) and shape[2:] != (width, width):
        return _Role.TOKENS
    if tensor.requires_grad:
        return None
    if shape[2:] == (width, width):
        return _Role.MASK if shape[:2] in ((samples, 1), (1, 1)) else None
    if shape[:2] == (1, width):
        return _Role.COLUMNS
    return _Role.COLUMN if shape == (width,) != (samples,) else None


def _in_a_row(tensor: torch.Tensor, role: _Role | None, real: RealTokens) -> torch.Tensor | None:
    if role is _Role.TOKENS:
        return real.row(tensor)
    if role is _Role.COLUMNS or role is _Role.COLUMN:
        return real.columns_of(tensor, 1 if role is _Role.COLUMNS else 0)
    return tensor if role is _Role.NUMBER else None


def batch_of(row: RealTokens | None, output: Any) -> Any:
    """A layer's output, with its tensors put back into batches if the layer ran on a row."""
    return output if row is None else map_tensors(row.batch, output)


class SampleAttention(TorchFunctionMode):
    """Keeps torch's attention of each of the ``real`` tokens of a row within the token's sample, in the body. Raises an
    ``UnsupportedError`` for attention that isn't causal or has a mask."""

    def __init__(self, real: RealTokens) -> None:
        super().__init__()
        self._real = real

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value, others = causal_attention(args, kwargs)
        if any((len(t), t.shape[2]) != (1, len(self._real.index)) for t in (query, key, value)):
            raise UnsupportedError(
                "a layer's attention uses queries or keys that aren't the batch's tokens, which isn't supported where padding "
                f"is left out{_REMEDY}"
            )
        real = self._real
        return attend_within_samples(query, key, value, real.begins, max(real.counts), counts=real.counts, **others)


def causal_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The queries, keys, values and other arguments of a call of torch's attention. Raises an ``UnsupportedError`` if it isn't
    causal or has a mask."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (given.pop(name) for name in names[:3])
    if given.pop("attn_mask", None) is not None or given.pop("is_causal", False) is not True:
        raise UnsupportedError(
            f"a layer's attention has a mask or isn't causal, which isn't supported where padding is left out{_REMEDY}"
        )
    return query, key, value, given


def attend_within_samples(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    begins: torch.Tensor,
    longest: int,
    *,
    counts: Sequence[int] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Causal attention of each sample of a row to itself. Queries are (1, heads, N, head size), keys and values may have fewer
    heads. Samples begin at ``begins`` (B + 1,) and have ``counts`` tokens, ``longest`` at most. A compiled graph doesn't know
    ``counts`` (None), and raises an ``UnsupportedError`` on a GPU where flash attention can't run."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    size = query.shape[3]
    suits = size % 8 == 0 and size <= _LARGEST_HEAD and key.shape[3] == value.shape[3] == size and query.dtype in _HALVES
    may_flash = query.is_cuda and torch.backends.cuda.flash_sdp_enabled()
    if suits and may_flash and torch.cuda.get_device_capability(query.device) >= (8, 0):
        by_token = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        # As in ``torch.nn.attention.varlen`` of newer versions of torch.
        made = torch.ops.aten._flash_attention_forward(
            *by_token, begins, begins, longest, longest, dropout_p, True, False, scale=scale
        )
        return made[0].transpose(0, 1)[None]
    if counts is None and query.is_cuda:
        raise UnsupportedError(
            "a compiled layer that leaves padding out needs flash attention, which is switched off or doesn't support head "
            f"size {size} (of values: {value.shape[3]}) in {query.dtype} on this GPU{_REMEDY}"
        )
    if counts is None:
        places = torch.arange(query.shape[2], device=query.device)
        sample = torch.bucketize(places, begins, right=True)
        mask = (sample[:, None] == sample) & (places <= places[:, None])
        return scaled_dot_product_attention(query, key, value, mask, dropout_p, False, scale=scale, enable_gqa=enable_gqa)
    each = []
    for begin, end in itertools.pairwise(itertools.accumulate(counts, initial=0)):
        q, k, v = (tensor[:, :, begin:end] for tensor in (query, key, value))
        if begin < end:
            each.append(scaled_dot_product_attention(q, k, v, None, dropout_p, True, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(each, dim=2)


def _examine(
    tensors: list[torch.Tensor], roles: list[_Role | None], put_together: Any, forward: Any, device: torch.device
) -> str | None:
    """Tries a layer on a row of two made-up samples and on one of them alone. Returns why it computes padding, or None."""
    first, second = _LENGTHS
    real = RealTokens.of_counts(_LENGTHS, _LENGTHS, second, device)
    row = [_made_up(tensor, role, device) for tensor, role in zip(tensors, roles, strict=True)]

    def run(given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        args, kwargs = put_together(given)
        return taken_apart(forward(*args, **kwargs))[0]

    def spoilt(tokens: slice) -> list[torch.Tensor | None]:
        return [_spoilt(tensor, role, tokens) for tensor, role in zip(row, roles, strict=True)]

    def gradients(given: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        leaves = [None if t is None else t.detach().requires_grad_(t.is_floating_point()) for t in given]
        of_tokens = [tensor for tensor, role in zip(leaves, roles, strict=True) if role is _Role.TOKENS]
        wanted = [tensor for tensor in of_tokens if tensor is not None and tensor.requires_grad]
        with torch.enable_grad():
            with SampleAttention(real):
                results = [made[:, first:] for made in run(leaves)]
            # Gives autograd's thread a CUDA context, without which cuBLAS warns.
            torch.ones((), device=device, requires_grad=True).mul(2.0).backward()
            # Outside of SampleAttention: in training, too, a checkpoint inside the layer recomputes without it.
            found = torch.autograd.grad(results, wanted, [torch.ones_like(made) for made in results], allow_unused=True)
        return [gradient[:, first:] for gradient in found if gradient is not None]

    generators = RngState(device)
    with SampleAttention(real):
        whole = run(row)
        if generators.has_advanced():
            return "it draws random numbers"
        beside = [made[:, first:] for made in run(spoilt(slice(0, first)))]
        before = [made[:, :first] for made in run(spoilt(slice(first, None)))]
    if not all(bool(found.isfinite().all()) for found in gradients(spoilt(slice(0, first)))):
        return "gradients of a sample depend on other samples"
    if not whole or any(made.shape[:2] != (1, first + second) or not made.is_floating_point() for made in whole):
        return "it doesn't return one row of floating-point numbers for each token"
    if not all(bool(made.isfinite().all()) for made in (*whole, *beside, *before)):
        return "a sample's results depend on other samples"
    alone = run([_cut(tensor, role, slice(first, None)) for tensor, role in zip(row, roles, strict=True)])
    for made, expected in zip(whole, alone, strict=True):
        difference = (made[:, first:] - expected).abs().max()
        if float(difference) > TOLERANCE * float(expected.abs().max()):
            return "a sample's results depend on its position in the row"
    return None


def _made_up(tensor: torch.Tensor, role: _Role | None, device: torch.device) -> torch.Tensor | None:
    """A tensor with this one's role, dtype and other dimensions, and made-up values for the trial's row."""
    if role is _Role.MASK:
        return None
    if role is _Role.NUMBER:
        return torch.ones((), dtype=tensor.dtype, device=device)
    shape = (sum(_LENGTHS),) if role is _Role.COLUMN else (1, sum(_LENGTHS), *tensor.shape[2:])
    if tensor.is_floating_point():
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, tensor.dtype)
    places = torch.cat([torch.arange(length) for length in _LENGTHS])
    return places.reshape(*shape[:2], *(1 for _ in shape[2:])).expand(shape).to(device, tensor.dtype)


def _spoilt(tensor: torch.Tensor | None, role: _Role | None, tokens: slice) -> torch.Tensor | None:
    if tensor is None or role is _Role.NUMBER or not tensor.is_floating_point():
        return tensor
    found = tensor.clone()
    _cut(found, role, tokens).fill_(float("nan"))  # type: ignore[union-attr]
    return found


def _cut(tensor: torch.Tensor | None, role: _Role | None, tokens: slice) -> torch.Tensor | None:
    if tensor is None or role is _Role.NUMBER:
        return tensor
    return tensor[tokens] if role is _Role.COLUMN else tensor[:, tokens]
