"""The runtime of one prepared model: forwards and backwards of its layers, where its units live, its gradients as a whole."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import RankError, StepWorkerError
from megatrain_accelerate.gradients.call_gradients import GradientSums
from megatrain_accelerate.gradients.clipping import Clipping, NormTable
from megatrain_accelerate.gradients.fp32_sums import Fp32Sums
from megatrain_accelerate.gradients.offload import GradientOffloader
from megatrain_accelerate.gradients.outside import OutsideGradients
from megatrain_accelerate.hooks import replaced, weakly
from megatrain_accelerate.kernels.device import device_kernels
from megatrain_accelerate.kernels.host import HostKernels
from megatrain_accelerate.layers.caches import without_caches
from megatrain_accelerate.layers.compiled_layer import CompiledLayers, without_autocast_cache
from megatrain_accelerate.layers.expert_function import ExpertStreams
from megatrain_accelerate.layers.graph_call import GraphCalls
from megatrain_accelerate.layers.layer import StreamedLayer, bound
from megatrain_accelerate.layers.micro_batches import BatchCut
from megatrain_accelerate.layers.nested_tensors import Args, Kwargs, map_tensors, taken_apart
from megatrain_accelerate.layers.passes import Passes
from megatrain_accelerate.layers.resident import ResidentGroup, UnitOwner
from megatrain_accelerate.layers.shared_mappings import has_mappings, with_copies
from megatrain_accelerate.layers.states_on_device import StatesOnDevice
from megatrain_accelerate.layers.token_tiles import TokenTiles
from megatrain_accelerate.layers.unpadded_layer import batch_of
from megatrain_accelerate.layers.watched_parameters import Watch, unwatched
from megatrain_accelerate.store.host_pool import HostPool
from megatrain_accelerate.store.parameter import ParameterState, written_among
from megatrain_accelerate.store.shared_store import SharedStore
from megatrain_accelerate.store.step_worker import StepWorker
from megatrain_accelerate.store.unit import HostUnit
from megatrain_accelerate.transfer.activation_offload import ActivationOffloader
from megatrain_accelerate.transfer.call_order import CallOrder, OpenForward
from megatrain_accelerate.transfer.gather import Gather
from megatrain_accelerate.transfer.meter import Cause, Meter, named_range
from megatrain_accelerate.transfer.parts import Streamed
from megatrain_accelerate.transfer.prefetch import Prefetcher
from megatrain_accelerate.transfer.streams import Streams, WeightSlot
from megatrain_accelerate.units import MIB

TOKENS_BETWEEN_CHECKS = 16
"""In a generation, free memory and writes to weights are checked once in this many tokens: asking the driver takes time,
caches grow little, and nobody is expected to write between two tokens."""

_running: weakref.WeakSet[StreamingRuntime] = weakref.WeakSet()


def streamed_among(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns those of the parameters that are in the host store of any model."""
    running = list(_running)
    return [p for p in parameters if any(runtime.state_of(p) is not None for runtime in running)]


def forwards_are_open() -> bool:
    """Whether any model has a forward whose backward is still to come."""
    return any(runtime.open_forwards for runtime in list(_running))


LayerRunner = Callable[[StreamedLayer, Args, Kwargs], Any]


class StreamingRuntime:
    """The streams, slots, step worker and gradients of one model. Its ``layers`` are in the order of their indices, and bring
    their experts that stream in parts. Its ``groups`` (*residents*: parameters outside the layers, whose weights stay on the
    device) are in model order."""

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        groups: Sequence[ResidentGroup],
        *,
        streams: Streams,
        meter: Meter,
        kernels: HostKernels,
        config: MegatrainConfig,
        shared: SharedStore | None = None,
    ) -> None:
        self.shared = shared
        self.ranks = None if shared is None else shared.ranks
        """The ranks that train the model together, and share a store. None with one process."""
        self.layers, self.groups = list(layers), list(groups)
        self.experts = [experts for layer in self.layers for experts in layer.experts]
        self.unit_owners: list[UnitOwner] = [*self.layers, *self.experts, *self.groups]
        """All that has a host unit. The ``experts`` of a layer have one for all of their parts."""
        self.streams, self.meter, self.kernels, self.worker = streams, meter, kernels, StepWorker()
        self.config = config
        self.norms = NormTable(self.units, streams.is_cuda)
        self.fp32_sums = Fp32Sums(self.units, config, streams.device, kernels, 1 if shared is None else shared.ranks.size)
        """The sums of several backwards' gradients. :attr:`piece_sums` are those of the pieces of a batch, in one backward."""
        gather = None if shared is None else Gather(shared.file, shared.ranks)
        self.prefetcher = Prefetcher(self.layers, config.placement.slots, meter, gather)
        expert_parts = [part for experts in self.experts for part in experts.parts]
        kinds = (self.layers, self.experts, expert_parts)
        layouts, of_experts, of_parts = ([fetched.unit.layout for fetched in kind] for kind in kinds)
        passing = config.passes_gradients
        self.offloader = GradientOffloader(
            layouts, of_experts, of_parts, self.worker, meter, self.norms, self.fp32_sums, passes=passing, shared=shared
        )
        self.steppers = self.offloader.steppers
        self.outside_tiles = TokenTiles(())  # for norms outside the layers
        # On the CPU stand-in memory needn't be page-locked, and models are tiny.
        segment_bytes, limit = 256 * MIB if streams.is_cuda else MIB, config.host_memory_gib
        pool = HostPool(segment_bytes, kernels=kernels, register=streams.is_cuda, host_memory_gib=limit)
        self.activations = ActivationOffloader(pool, meter)
        self.keep_states_on_host: Callable[[], None] = lambda: self.place((), groups_on_device=False)
        """Moves all units and their states to the host, for an optimizer that works there alone. Set by the plan."""
        self.compiled = CompiledLayers(config.compile_layers, streams.device)
        self.piece_sums = GradientSums(streams.device, layouts)
        self.batch_cut = BatchCut(config.micro_batch_size)
        self._states: dict[int, ParameterState] = {id(state.parameter): state for unit in self.units for state in unit.states}
        self.watch = Watch((state.parameter for state in self._states.values()), weakly(self.settle))
        """Brings weights and gradients up to date when somebody first touches a parameter. On after a step, a clipping or a
        backward that isn't the last before a step, until the next backward begins."""
        self.passes = Passes(
            self.layers, self.groups, self.prefetcher, self.offloader, self.watch, weakly(self._backward_is_over)
        )
        self.calls = GraphCalls(
            self.passes, self.prefetcher, self.offloader, self.piece_sums, self.activations, self.batch_cut, self.compiled
        )
        self._owners: dict[int, UnitOwner] = {id(state): owner for owner in self.unit_owners for state in owner.unit.states}
        hook = weakly(self.resident_gradient_ready)
        residents = [state for group in self.groups for state in group.unit.states if state.entry.spec.trainable]
        self._handles: list[Any] = [state.parameter.register_post_accumulate_grad_hook(hook) for state in residents]
        self.outside = OutsideGradients(self.units, self.offloader)
        self.steps_taken = 0
        """Optimizer steps so far. Skipped ones don't count."""
        self.fake_run: LayerRunner | None = None
        """Runs the layers in a fake run or a measurement of the plan. None while they stream."""
        self._plain_slots: dict[int, WeightSlot] = {}
        """All layers' slots by index, during a forward without a graph in which layers run as plain modules; else empty."""
        self._next_tokens = 0
        """Forwards in a row that each computed one more token of a generation, see :meth:`checks_before_forward`."""
        self.clipping = Clipping(self.norms, self.fp32_sums, self._states)
        self.expert_streams = ExpertStreams(
            Prefetcher(expert_parts, config.placement.slots, meter),
            CallOrder(len(expert_parts), leader=self.passes.order),
            self.offloader,
            torch.zeros((), device=streams.device, requires_grad=True),
            lambda: self.fake_run is not None,
        )
        self.states_on_device = StatesOnDevice(streams, self.worker, kernels, shared)
        if streams.is_cuda:
            # A thread's current GPU is at first the first one, where the worker's launches would make a context.
            self.worker.submit(
                "setting the worker's device", functools.partial(torch.cuda.set_device, streams.h2d_stream.device_index)
            )
        _running.add(self)

    @property
    def token_tile(self) -> int:
        """Tokens of a tile in which token-wise parts of the layers, and norms outside them, run; 0 for no tiles."""
        return self.outside_tiles.tile_tokens

    @token_tile.setter
    def token_tile(self, tokens: int) -> None:
        for tiles in (self.outside_tiles, *(layer.tiles for layer in self.layers)):
            tiles.tile_tokens = tokens

    @property
    def units(self) -> list[HostUnit]:
        """All host units: layers, experts that stream in parts, then resident groups."""
        return [owner.unit for owner in self.unit_owners]

    @property
    def promised_bytes(self) -> int:
        """Host memory that will be needed and isn't allocated yet, see :meth:`HostUnit.promise`."""
        return self.offloader.promised_bytes + sum(unit.promised_bytes for unit in self.units)

    def in_forward_order(self) -> list[UnitOwner]:
        """All owners of units in the order in which the next forward needs them, which is that of their steps: groups before
        the layer that follows them, experts behind their layer. Sorting keeps the order below for equal keys."""
        owners: list[UnitOwner] = [*self.groups, *self.layers, *self.experts]
        return sorted(owners, key=lambda owner: owner.layers_before if isinstance(owner, ResidentGroup) else owner.index)

    @property
    def gradients_leave(self) -> bool:
        """Whether gradients of any layer are offloaded to the host."""
        return any(not layer.unit.is_on_device for layer in self.layers) or any(e.has_trainable for e in self.experts)

    def state_of(self, parameter: torch.Tensor) -> ParameterState | None:
        """Returns the parameter's state in the host store, or None if it isn't this model's."""
        return self._states.get(id(parameter))

    def owner_of(self, state: ParameterState) -> UnitOwner:
        """Returns the layer, experts or group whose unit has the parameter."""
        return self._owners[id(state)]

    def trains(self, parameter: torch.Tensor) -> bool:
        """Whether it is a parameter of this model that was trainable when the model was prepared."""
        state = self.state_of(parameter)
        return state is not None and state.row is not None

    # ------------------------------------------------------------------ forward and backward of a layer

    @contextlib.contextmanager
    def layers_run_by(self, runner: LayerRunner) -> Iterator[None]:
        """While the body runs, proxies call ``runner(layer, args, kwargs)`` instead of streaming."""
        with replaced(self, "fake_run", runner), self.outside_tiles.at_work_anywhere():
            yield

    def run_layer(self, layer: StreamedLayer, _: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer's proxy. The second argument is the proxy, the layer's module itself."""
        if self.fake_run is not None:
            arguments = without_caches(args, kwargs) if torch.is_grad_enabled() else (args, kwargs)
            return with_copies(functools.partial(self.fake_run, layer), *arguments)
        has_graph = torch.is_grad_enabled()
        if not has_graph and layer.index in self._plain_slots:
            with bound(layer, self._plain_slots[layer.index].views(layer.unit.layout)):
                return layer.forward(*args, **kwargs)
        if self.clipping.factors or self.clipping.stepped:  # a cheap check, since every call of a layer comes here
            self._scale_clipped(more_gradients_follow=has_graph)
        if has_graph:
            layer.refuse_unfrozen()
            arguments = without_caches(args, kwargs)
            if layer.has_trainable or any(tensor.requires_grad for tensor in taken_apart(arguments)[0]):
                self.prefetcher.let_go()  # also if a layer is called by itself, and no forward of the model did it
                tape, position, open_forward = self.passes.record(layer)
                if self._is_plain:
                    return self._run_plain(layer, open_forward, *arguments)
                if has_mappings(*arguments):
                    return with_copies(functools.partial(self.calls.run, layer, tape, position), *arguments)
                return self.calls.run(layer, tape, position, *arguments)
            with torch.no_grad():
                return self._run_streamed(layer, args, kwargs)
        return self._run_streamed(layer, args, kwargs)

    def _run_streamed(self, layer: StreamedLayer, args: Args, kwargs: Kwargs) -> Any:
        """Runs a layer without a graph."""
        tape, position = self.passes.order.record(layer.index)
        upcoming = tape.order.after_forward(tape, position, self.prefetcher.look_ahead, backward_follows=False)
        slot = self.prefetcher.acquire(layer, upcoming)
        try:
            self.passes.wait_for_head(layer)
            with bound(layer, slot.views(layer.unit.layout)):
                if self.calls.real_tokens is None:
                    return map_tensors(self._outside_slots, layer.run(args, kwargs))
                row, args, kwargs = layer.unpadded.in_a_row(self.calls.real_tokens, args, kwargs)
                return batch_of(row, map_tensors(self._outside_slots, layer.run(args, kwargs, row)))
        finally:
            self.prefetcher.release(slot)

    def _outside_slots(self, output: torch.Tensor) -> torch.Tensor:
        """Returns a layer's output, or a copy of one that shares a slot's memory, where another layer's weights will lie."""
        if output.layout is torch.strided and output.untyped_storage().data_ptr() in self.prefetcher.at_address:
            return output.clone()
        return output

    def checks_before_forward(self, is_next_token: bool) -> bool:
        """Counts this forward of the whole model, without a graph. Returns whether free memory and writes to weights are to be
        checked before it: always, but in a generation only every few tokens."""
        self._next_tokens = self._next_tokens + 1 if is_next_token else 0
        return self._next_tokens == 0 or self._next_tokens % TOKENS_BETWEEN_CHECKS == 1

    def begin_forward(self, checks_writes: bool) -> None:
        """Begins a forward of the whole model without a graph. If all layers have slots of their own (held for evaluations, or
        on the device), they run as plain modules until it is over, unless ``checks_writes`` finds that one was written to."""
        own_slots = {} if self.experts or self.token_tile else self.prefetcher.own_slots_of_all()
        if own_slots and checks_writes:
            with unwatched():
                if written_among([state.handle for layer in self.layers for state in layer.unit.states]):
                    return  # a layer takes over what was written when it is fetched
        if own_slots:
            self._scale_clipped(more_gradients_follow=False)
            for group in self.groups:  # some code reads the head's weight without calling the head
                group.wait_for_step()
        self._plain_slots = own_slots

    def end_forward(self) -> None:
        """Called when a forward of the whole model ends, or the next one begins if an exception interrupted it."""
        self._plain_slots = {}
        self.calls.real_tokens = None
        if self.passes.is_together:
            self.passes.is_together = False
            self.prefetcher.issue_all()  # gathers that were chosen, for which other ranks may wait

    @property
    def _nothing_streams(self) -> bool:
        """Whether all layers live on the device, without experts in parts, and compute with their own parameters."""
        return not self.experts and self.prefetcher.all_on_device

    @property
    def _is_plain(self) -> bool:
        """Whether the model fits the device with its states and activations, so that training runs layers as plain modules."""
        return self._nothing_streams and self.runs_whole and len(self.calls.policy.kept) == len(self.layers)

    @property
    def runs_whole(self) -> bool:
        """Whether layers compute a whole batch at once, and neither pieces nor tiles of it."""
        return self.batch_cut.size is None and not self.token_tile

    def _run_plain(self, layer: StreamedLayer, open_forward: OpenForward, args: Args, kwargs: Kwargs) -> Any:
        """Runs a layer of a model that fits. Autograd saves its parameters themselves and accumulates their gradients."""
        if self.watch.is_on:
            self.watch.release(state.parameter for state in layer.unit.states)
        layer.own_parameters()
        self._refresh(layer)
        self.passes.wait_for_head(layer)
        row, args, kwargs = layer.unpadded.in_a_row(self.calls.real_tokens, args, kwargs)
        captures = self.compiled.wants(layer, row)
        _, budget_of_kept = self.calls.policy.budgets
        with named_range(f"megatrain::forward ({layer.name})"), without_autocast_cache():
            output = batch_of(row, self.compiled.run(layer, captures, args, kwargs, budget_of_kept, row))
        # The graph holds the hook, which keeps ``open_forward`` alive.
        note_backward = functools.partial(weakly(self.passes.note_backward), open_forward)
        for tensor in taken_apart(output)[0]:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(note_backward)
        return output

    def resident_gradient_ready(self, parameter: torch.Tensor) -> None:
        """Called when autograd has accumulated a resident's gradient in a backward. In the last one before a step its copy to
        the host begins while layers are still in backward."""
        self.passes.note_backward()
        if self.offloader.exchange is not None:
            return  # the ranks' gradients are exchanged at the end, in one order on all of them
        state = self._states[id(parameter)]
        self.fp32_sums.unstash(state)
        if self.offloader.is_last_backward():
            self.offloader.fetch(self.owner_of(state), [state])

    def _backward_is_over(self, task: int, succeeded: bool) -> None:
        """Called when a backward ends: completes what it made, or takes that back if an exception ended it."""
        self.calls.end_backward(task, succeeded)
        self.passes.end_backward(task, succeeded)
        if not succeeded:
            return
        self.activations.settle()
        self.worker.raise_if_failed()
        self.meter.harvest()  # while the GPU is busy; without logs its events would pile up over the steps
        is_last_backward = self.offloader.is_last_backward()
        exchange = self.offloader.exchange
        if exchange is not None:
            trained = [state for state in self._states.values() if state.row is not None]
            exchange.exchange_accumulated(self.fp32_sums, trained, drops=is_last_backward)
        if not is_last_backward:
            self.watch.begin()
        else:
            for group in self.groups if exchange is not None else ():
                self.offloader.fetch(group, group.unit.states)
            self._send_norms()
            # From here on anybody may read or drop `parameter.grad`. Gradients that stay on the device are there already.
            if not self._nothing_streams:
                with self.meter.blocked_by(Cause.BACKWARD_END), named_range("megatrain::wait_for_gradients"):
                    self.offloader.wait()
            if exchange is not None:
                exchange.add_up_norms(self.norms.norms)
            if not self.worker.is_idle:  # layers are stepped in this backward
                self.watch.begin()

    def may_step_in_backward(self, layer: Streamed) -> bool:
        """Whether the layer can't get another gradient before the step."""
        is_reached = id(layer.unit) in self.outside.reached
        return self.offloader.is_last_backward() and self.passes.is_only_call(layer) and not is_reached

    def before_group_use(self, group: ResidentGroup) -> None:
        """Called before a module runs that reads a group's weights: makes them those of the last step, or what was written."""
        if self.fake_run is None:
            self._scale_clipped(more_gradients_follow=torch.is_grad_enabled())
            group.refresh_if_written()
            group.wait_for_step()
            if self.watch.is_on:
                self.watch.release(state.parameter for state in group.unit.states)

    @property
    def gathers_groups(self) -> bool:
        """Whether ranks step groups on their devices, and gather the stepped weights. The ranks' common plan decides, since a
        single rank may have moved its units for an evaluation, or have no share of a small group."""
        planned = self.calls.policy
        return self.prefetcher.gathers and bool(planned.states_on_device) and not planned.groups_on_device

    @property
    def states_may_move(self) -> bool:
        """Whether states may live on the device: every optimizer can step there, and kernels for its moments exist."""
        return not any(stepper.needs_states_on_host for stepper in self.steppers) and self.config.moments_dtype != "int8"

    @property
    def open_forwards(self) -> int:
        """Number of forward passes whose backward is still to come. Until then no unit may move."""
        return len(self.passes.open_forwards)

    # ------------------------------------------------------------------ placement

    def place(self, on_device: Collection[int], groups_on_device: bool, states_on_device: Collection[int] = ()) -> None:
        """Moves the units of layers ``on_device`` (indices), and with ``groups_on_device`` those of groups, to the device, all
        others to the host. Layers ``states_on_device`` that are on the host are stepped on the device, which has residuals and
        moments of this rank's share (what it steps). With any such layer, so are groups on the host. May be called between
        steps only. Waits for work in flight. Raises a StepWorkerError if an earlier step failed."""
        targets: list[tuple[UnitOwner, bool]] = [(layer, layer.index in on_device) for layer in self.layers]
        targets += [(group, groups_on_device) for group in self.groups]
        stepped: list[UnitOwner] = [layer for layer in self.layers if layer.index in states_on_device]
        stepped += self.groups if stepped else []
        whole = {id(owner) for owner, comes in targets if comes}
        units = [owner.unit for owner in stepped if id(owner) not in whole]
        with_states = [unit for unit in units if unit.share.begin < unit.share.end]
        changes = with_states != self.states_on_device.units
        if not changes and all(owner.unit.is_on_device == comes for owner, comes in targets):
            return
        # A forward in inference mode may call this to make room. What it leaves behind must be ordinary tensors.
        with torch.inference_mode(False), torch.no_grad():
            self.drain()
            self.refresh_if_written()
            self.offloader.wait()
            self.streams.synchronize()
            if changes:  # other ranks, too, have states of a unit that moves to the device whole
                self.states_on_device.bring(of_all=any(comes and not owner.unit.is_on_device for owner, comes in targets))
                self.states_on_device.place([])
            self._relocate(targets)
            if self.offloader.takes_gradients:
                self.offloader.allocate_slots(self.gradients_leave)
            if changes:
                self.states_on_device.place(with_states)

    def _relocate(self, targets: Sequence[tuple[UnitOwner, bool]]) -> None:
        """Moves units between the host and the device. ``targets`` says of each layer and group whether it is to live on the
        device. A torch.OutOfMemoryError or HostMemoryError if a unit doesn't fit: those before it have moved then."""
        leaving = [owner for owner, stays in targets if owner.unit.is_on_device and not stays]
        arriving = [owner for owner, comes in targets if comes and not owner.unit.is_on_device]
        device = self.streams.device
        kernels = device_kernels(device, self.kernels) if arriving else self.kernels
        # Slots of single layers hold memory of units that leave the device.
        self.prefetcher.drop_own_slots()
        try:
            # Those that leave come first, and free memory for those that arrive.
            for owners, *where in ((leaving, None, self.kernels), (arriving, device, kernels)):
                for owner in owners:
                    owner.unit.move(*where)
                    if isinstance(owner, ResidentGroup):
                        owner.show_device_weights()
                    for state in owner.unit.states:
                        state.normed = None
                    self.outside.moved(owner.unit)
                torch.cuda.empty_cache()  # the freed blocks have sizes that others don't ask for
        finally:
            self.prefetcher.note_moves()

    def bring_states(self) -> None:
        """Makes weights, residuals and moments on the host those of the last step (see :meth:`StatesOnDevice.bring`), or
        those that somebody has written since. Raises what :meth:`drain` does."""
        self.drain()
        self.refresh_if_written()
        self.states_on_device.bring()

    # ------------------------------------------------------------------ gradients as a whole

    def collect_gradients(self) -> None:
        """Copies every gradient that is still on the device to the host store, and waits for it. With several ranks raises an
        ``UnsupportedError`` if a script wrote to or assigned gradients of layers on the host."""
        self.watch.end()
        self.calls.settle()
        self.offloader.wait()
        self.clipping.refuse_written()
        if self.clipping.has_stepped():  # nobody dropped the gradients of a step: the next one must find them scaled
            self.worker.drain()
            self.clipping.settle_stepped(more_gradients_follow=False)
        for group in self.groups:
            self.offloader.fetch(group, group.unit.states)
        self._send_norms()
        self.offloader.wait()
        if self.offloader.exchange is not None:
            self.offloader.exchange.refuse_rewritten((*self.layers, *self.experts))

    def _send_norms(self) -> None:
        """Sends the norms that aren't known yet of gradients that stay on the device because their layers live there: autograd
        accumulated them, or the ranks exchanged them."""
        if self._nothing_streams or self.ranks is not None:
            states = [state for layer in self.layers if layer.unit.is_on_device for state in layer.trainable]
            self.offloader.send_from_device("norms", [s for s in states if s.parameter.grad is not None and not s.has_norm])

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Has the next step scale the gradients so that their global norm is at most ``max_norm``. Those of other modules are
        scaled in place, as torch does it. Returns the norm before clipping, on the host."""
        is_behind = self.watch.is_on  # steps may be under way, for which nothing here waits
        self.collect_gradients()
        parameters = list(parameters)
        exchange = self.offloader.exchange
        if exchange is not None and any(self.state_of(p) is None and p.grad is not None for p in parameters):
            exchange.require_equal(float(self.clipping.total_norm(parameters)))
        norm = self.clipping.clip(parameters, max_norm)
        if self.open_forwards:
            self.clipping.settle(more_gradients_follow=True)  # the backwards of the open forwards add to them
        if is_behind or self.clipping.has_unscaled():
            self.watch.begin()
        return norm

    # ------------------------------------------------------------------ state as a whole

    def _scale_clipped(self, more_gradients_follow: bool) -> None:
        """Scales clipped gradients before a forward. Afterwards somebody may read them, or, if ``more_gradients_follow``, a
        backward adds to them."""
        with unwatched():
            if self.clipping.has_unscaled():
                self.worker.drain()
                self.clipping.settle(more_gradients_follow)

    def settle(self) -> None:
        """Makes weights and gradients what plain PyTorch would show. Raises a StepWorkerError if a step failed."""
        self.offloader.wait()
        self.drain()
        self.refresh_if_written()
        self.clipping.settle(more_gradients_follow=False)

    def drain(self) -> None:
        """Blocks until all submitted work is applied and visible on host and device. A StepWorkerError if some failed."""
        self._next_tokens = 0  # the caller may write to weights: a generation's next forward checks for that
        self.worker.drain()
        for group in self.groups:
            group.wait_for_step()
        if self.ranks is not None:
            for owner in self.unit_owners:
                owner.gate.wait()
        self.wait_for_fetches()

    def wait_for_fetches(self) -> None:
        """Blocks until weights that were fetched are read, so that the host's may be written. Those of a backward have been,
        but a forward without gradients ends before its kernels and the copies that wait for them."""
        for prefetcher in (self.prefetcher, self.expert_streams.prefetcher):
            prefetcher.wait_for_copies()

    def begin_loading(self, *_: Any) -> None:
        """Hook: ``load_state_dict`` is about to write to weights."""
        self.drain()
        if self.shared is not None:
            self.shared.is_loading = True

    def refresh_if_written(self) -> None:
        """Takes over weights that somebody wrote to any parameter since the last check."""
        for owner in self.unit_owners:
            self._refresh(owner)

    def _refresh(self, owner: UnitOwner) -> None:
        version = owner.unit.version
        owner.refresh_if_written()
        if owner.unit.version != version:
            self.outside.moved(owner.unit)  # autograd made new nodes if data of another dtype were there for a while

    def close(self) -> None:
        """Ends the worker, and gives the parameters ordinary host memory with their masters, which are in full precision."""
        self.watch.end()
        with contextlib.suppress(StepWorkerError, RankError):
            self.drain()
            self.states_on_device.bring()
        self.states_on_device.leave()
        self.streams.synchronize()
        self.states_on_device.place([])
        for handle in self._handles:
            handle.remove()
        for closed in (self.outside, self.offloader, self.activations, self.norms, self.piece_sums):
            closed.close()
        for unit in self.units:
            unit.release()
        # Frees their memory: an optimizer that outlives the engine holds the runtime through its driver.
        self.prefetcher.close()
        self.expert_streams.prefetcher.close()
        for owner in self.unit_owners:
            owner.release()
        self._states.clear()
        self._owners.clear()
        self.offloader.slots.clear()
