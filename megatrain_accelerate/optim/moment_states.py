"""How an optimizer's ``state`` shows the store's moments, and how the store takes them over from one. fp32 and bf16 moments
have the keys of ``torch.optim.AdamW``. 8-bit ones have keys of their own while they are in use, so that nobody takes codes
for moments. ``state_dict()`` shows them in fp32, which any optimizer can load."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from megatrain_accelerate.kernels.moments import FloatMoments, Int8Moments, Moments, moment_bytes
from megatrain_accelerate.store.host_limits import available_host_bytes
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.units import GIB

logger = logging.getLogger(__name__)

RESIDUAL_KEY = "master_residual"
"""Key of the masters' residuals (their low 16 bits, int16) in the optimizer's state. Stock optimizers ignore it."""

RESIDUALS_KEY = "master_residuals"
"""Key, in an optimizer's ``state_dict()``, of the residuals of parameters for which the optimizer has no state: it has stepped
them without one, or hasn't yet. They are there by the parameter's key. Stock optimizers ignore this, too."""

_INT8_KEYS = ("exp_avg_int8", "exp_avg_sq_int8", "exp_avg_scale", "exp_avg_sq_scale")
_FLOAT_KEYS = ("exp_avg", "exp_avg_sq")


def _keyed(moments: Moments | None) -> Iterable[tuple[str, torch.Tensor]]:
    keys = _INT8_KEYS if isinstance(moments, Int8Moments) else _FLOAT_KEYS
    return zip(keys, moments or (), strict=False)  # empty without moments


def views_of(state: ParameterState, promised: Moments | None = None) -> dict[str, Any]:
    """Views of a parameter's moments (else those ``promised``) and residual, by their keys in an optimizer's state."""
    views: dict[str, Any] = dict(_keyed(state.moments or promised))
    return views if state.residual is None else {**views, RESIDUAL_KEY: state.residual}


def shows(entry: dict[str, Any], state: ParameterState) -> bool:
    """Whether the moments and the residual in an optimizer's state for a parameter are the store's own views. They are
    compared by identity, since this is asked of every parameter at every step."""
    if entry.get(RESIDUAL_KEY) is not state.residual:
        return False
    moments = state.moments
    if isinstance(moments, FloatMoments):  # the loop below takes three times as long
        return entry.get("exp_avg") is moments.exp_avg and entry.get("exp_avg_sq") is moments.exp_avg_sq
    return "exp_avg" not in entry and all(entry.get(key) is view for key, view in _keyed(moments))


def show(entry: dict[str, Any], state: ParameterState) -> None:
    """Puts the store's views into an optimizer's state for a parameter, in place of moments of any kind."""
    for key in (*_FLOAT_KEYS, *_INT8_KEYS):
        entry.pop(key, None)
    entry.update(views_of(state))


def take_over(state: ParameterState, values: dict[str, Any]) -> None:
    """Sets a parameter's moments from an optimizer's state for it, which may have moments of any of the three kinds. An empty
    one means zeros. If it has two kinds, the one that the store doesn't use counts: somebody put it there."""
    ours, coded = state.moments, _coded(values)
    assert ours is not None
    if not values:
        for view in ours:
            view.zero_()
    elif isinstance(ours, Int8Moments) and (coded is None or "exp_avg" in values):
        ours.encode(values["exp_avg"], values["exp_avg_sq"])
    else:
        theirs: Iterable[torch.Tensor] = (values[key] for key in _FLOAT_KEYS)
        if coded is not None:
            theirs = coded if isinstance(ours, Int8Moments) else coded.decode()
        for view, value in zip(ours, theirs, strict=True):
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)


def without_residual(entry: dict[str, Any]) -> dict[str, Any]:
    """A new dict: an optimizer's state for a parameter as a stock optimizer would hold it."""
    return {name: value for name, value in entry.items() if name != RESIDUAL_KEY}


def own_copies(entries: Iterable[dict[str, Any] | None], host_memory_gib: float | None) -> None:
    """Replaces the store's views in the entries by copies, so that they belong to the optimizer alone. If the host has no
    memory for these, it empties the entries with a warning: moments of an optimizer that isn't used mustn't end a training."""
    filled = [entry for entry in entries if entry]
    wanted = _tensor_bytes(filled)
    free = available_host_bytes(host_memory_gib) if wanted else 0
    if wanted > free:
        logger.warning(
            "megatrain: moments of parameters that an optimizer doesn't step for now are dropped, since they would take "
            "%.1f GiB of host memory and %.1f are free; if it steps these again, it begins without moments",
            wanted / GIB,
            free / GIB,
        )
    for entry in filled:
        if wanted > free:
            entry.clear()
        else:
            entry.update({k: value.to("cpu", copy=True) for k, value in entry.items() if isinstance(value, torch.Tensor)})


def _coded(values: dict[str, Any]) -> Int8Moments | None:
    return Int8Moments(*(values[key] for key in _INT8_KEYS)) if _INT8_KEYS[0] in values else None


def _bytes_of_coded(entries: dict[Any, dict[str, Any]], dtype: torch.dtype) -> int:
    """Bytes that the 8-bit moments among these entries take in ``dtype``."""
    coded = [moments for values in entries.values() if (moments := _coded(values)) is not None]
    return sum(moment_bytes(moments.exp_avg.numel(), dtype) for moments in coded)


def _tensor_bytes(entries: Iterable[dict[str, Any]]) -> int:
    return sum(value.nbytes for values in entries for value in values.values() if isinstance(value, torch.Tensor))


def saved_bytes(entries: dict[Any, dict[str, Any]], host_memory_gib: float | None) -> int:
    """Bytes of the tensors that :func:`shown_in_fp32` would return for these entries, without making them."""
    held, wanted = _tensor_bytes(entries.values()), _bytes_of_coded(entries, torch.float32)
    if not wanted or wanted > available_host_bytes(host_memory_gib):
        return held
    return held + wanted - _bytes_of_coded(entries, torch.int8)


def shown_in_fp32(entries: dict[Any, dict[str, Any]], host_memory_gib: float | None) -> dict[Any, dict[str, Any]]:
    """A copy of the per-parameter part of a ``state_dict()`` with 8-bit moments decoded, for 8 bytes a parameter of host
    memory. If these aren't free the codes stay, which only this package loads (under any ``moments_dtype``): a checkpoint
    mustn't end the run that it is to save."""
    wanted = _bytes_of_coded(entries, torch.float32)
    free = available_host_bytes(host_memory_gib) if wanted else 0
    if wanted > free:
        logger.warning(
            "megatrain: AdamW's moments are saved in 8 bits, under the keys %s, since in fp32 they would take %.1f GiB of "
            "host memory and %.1f are free; such a checkpoint can be continued with megatrain_accelerate only",
            ", ".join(_INT8_KEYS),
            wanted / GIB,
            free / GIB,
        )
        return entries
    shown = dict(entries)
    for key, values in entries.items():
        if (moments := _coded(values)) is not None:
            kept = {name: value for name, value in values.items() if name not in _INT8_KEYS}
            shown[key] = {**kept, **dict(zip(_FLOAT_KEYS, moments.decode(), strict=True))}
    return shown
