"""Intercepts gradients that autograd itself is about to accumulate in a parameter of the store. Those of a streamed weight
come from outside its layer (a penalty, a regularisation of adapters), on the thread that called backward, while autograd's
thread for the GPU issues copies into the same memory. They are set aside until backward is over and all copies have landed. A
weight that doesn't stream (of a resident group, of a layer on the device) is a leaf itself: its gradients stay where they are,
and several are summed in fp32 (:mod:`.fp32_sums`)."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from megatrain_accelerate.errors import StateError
from megatrain_accelerate.gradients.offload import GradientOffloader
from megatrain_accelerate.hooks import weakly
from megatrain_accelerate.store.parameter import ParameterState
from megatrain_accelerate.store.unit import HostUnit


class _Stash(dict[int, tuple[ParameterState, torch.Tensor]]):
    """The gradients that were set aside in one backward, by the ``id`` of the parameter. The callback that autograd calls at
    its end holds them. If the backward fails, autograd drops both."""


class OutsideGradients:
    """Intercepts gradients of all trained parameters of ``units``. Those of streamed weights are added after backward."""

    def __init__(self, units: Iterable[HostUnit], offloader: GradientOffloader) -> None:
        self._offloader = offloader
        self._lock = threading.Lock()
        self._stashes: weakref.WeakValueDictionary[int, _Stash] = weakref.WeakValueDictionary()
        """By the number of the backward (autograd's graph task)."""
        self._watched: dict[int, list[Any]] = {}
        self.reached: set[int] = set()
        """``id`` of each unit whose gradients ever came from outside its layer: it can't be stepped in backward."""
        for unit in units:
            self._watch(unit)

    def _watch(self, unit: HostUnit) -> None:
        for _, handle in self._watched.get(id(unit), ()):
            handle.remove()
        watched = self._watched[id(unit)] = []
        for state in (state for state in unit.states if state.entry.spec.trainable):
            # The node that accumulates ``parameter.grad``: autograd has one at a time, as long as anybody holds it.
            is_trained = state.parameter.requires_grad
            with torch.inference_mode(False):
                state.parameter.requires_grad_(True)
                node = get_gradient_edge(state.parameter).node
                state.parameter.requires_grad_(is_trained)
            # On the device one thread of autograd accumulates and runs the layers' backward: they can't race.
            sums = self._offloader.sums
            if unit.sums_device is not None or (unit.is_on_device and sums.holds_fresh):
                hook = weakly(sums.stash_for, state)
            elif unit.is_on_device:
                hook = weakly(sums.before_accumulation, state)
            else:
                hook = weakly(self._take, unit, state)
            watched.append((node, node.register_prehook(hook)))

    def moved(self, unit: HostUnit) -> None:
        """To be called when a unit has moved to or from the device: its parameters have other autograd nodes then."""
        if id(unit) in self._watched:
            self._watch(unit)

    def close(self) -> None:
        """Removes the hooks, so that autograd accumulates by itself again."""
        for watched in self._watched.values():
            for _, handle in watched:
                handle.remove()
        self._watched.clear()

    def _take(self, unit: HostUnit, state: ParameterState, arrived: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
        """Sets a streamed weight's gradient aside, on any thread. A StateError if gradients pass, or with several ranks."""
        gradient = arrived[0]
        if gradient is None or gradient.requires_grad:  # with ``create_graph`` autograd keeps it
            return None
        if self._offloader.exchange is not None or self._offloader.passes_gradients:
            kept = "megatrain_config.host_gradients to 'kept' (2 bytes a parameter more)"
            raise StateError(
                f"{unit.name}.{state.name} got a gradient from outside its layer (a penalty on the weights), which can't be "
                f"added to its own; set {kept if self._offloader.exchange is None else 'num_processes: 1'}"
            )
        backward = torch._C._current_graph_task_id()
        with self._lock:
            if (gradients := self._stashes.get(backward)) is None:
                gradients = self._stashes[backward] = _Stash()
                Variable._execution_engine.queue_callback(functools.partial(self._settle, gradients))
            found = gradients.get(id(state.parameter))
            gradients[id(state.parameter)] = state, gradient if found is None else found[1] + gradient
            self.reached.add(id(unit))
        return (None,)

    def _settle(self, gradients: _Stash) -> None:
        self._offloader.wait()
        for state, gradient in gradients.values():
            self._offloader.sums.add(state, gradient)
