"""Turns a user's model into a running engine: discovery, budget, adoption layer by layer, proxies, hooks."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.config import MegatrainConfig, usable_cpu_count
from megatrain_accelerate.errors import StateError, StepWorkerError, UnsupportedError
from megatrain_accelerate.gradients.fp32_sums import BF16_REMEDY
from megatrain_accelerate.hooks import ModelHook, by_name, run_pre_hooks
from megatrain_accelerate.kernels.host import HostKernels, default_thread_count
from megatrain_accelerate.layers.attention_results import require_attention_to_keep
from megatrain_accelerate.layers.caches import caching_modules, decide_against_a_cache
from megatrain_accelerate.layers.expert_function import run_experts
from megatrain_accelerate.layers.layer import StreamedExperts, StreamedLayer
from megatrain_accelerate.layers.padding import may_leave_padding_out, real_tokens
from megatrain_accelerate.layers.proxy import install_proxy, leave_checkpointing_off, modules_that_checkpoint, remove_proxy
from megatrain_accelerate.layers.resident import ResidentGroup
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.layers.token_tiles import TokenTiles
from megatrain_accelerate.loss.lazy_logits import find_head, tile_head
from megatrain_accelerate.optim.host_step import ENGINE_CLOSED, HostStep
from megatrain_accelerate.parallel.lifeline import ranks_of_run
from megatrain_accelerate.plan.adoption import Adoption, compute_dtypes
from megatrain_accelerate.plan.device_plan import DevicePlan
from megatrain_accelerate.plan.evaluation_weights import is_next_token
from megatrain_accelerate.plan.fake_step import what_sees_a_batch
from megatrain_accelerate.plan.layer_discovery import Discovery, discover_layers, split_experts
from megatrain_accelerate.plan.placement import require_layers
from megatrain_accelerate.progress import progress_bar
from megatrain_accelerate.store.host_limits import anonymous_bytes, promising, require_host_bytes, settings_that_take_less
from megatrain_accelerate.store.layout import FlatLayout
from megatrain_accelerate.store.shared_store import SharedStore
from megatrain_accelerate.store.unit import HostUnit, planned_host_bytes
from megatrain_accelerate.transfer.meter import Meter
from megatrain_accelerate.transfer.streams import Streams

logger = logging.getLogger(__name__)

_MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}

_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()
_attached: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a prepared model, or None."""
    return _engines.get(model)


def all_engines() -> list[Engine]:
    """The engines that aren't closed and whose layers are alive, even if the model around the layers is gone."""
    return [engine for engine in list(_attached.values()) if not engine.is_closed]


def prepared_models() -> list[tuple[nn.Module, Engine]]:
    """The prepared models that are alive, with their engines."""
    return list(_engines.items())


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Moves the modules' own buffers. One that several modules share stays one tensor."""
    moved: dict[int, torch.Tensor] = {}
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = moved.setdefault(id(buffer), buffer.to(device))


class Engine:
    """The streaming engine that is attached to one model.

    It adopts the model: every parameter gets host memory in the unit of its layer, or of its module if that is outside the
    layers (a resident). Layers stream, residents also have a copy on the device, and buffers move to the device. The model's
    own memory is freed meanwhile, so that the host never holds more than the store, one unit and a constant. Parameters keep
    identity, name and shape. The layers' proxies hold the engine, which lives as long as they do, and doesn't hold the model.
    Raises ``UnsupportedError`` if the model can't stream, and ``HostMemoryError`` if it doesn't fit, before it allocates.

    Args:
        model: on the CPU.
        bf16: whether the run's mixed precision is bf16.
        training: False for evaluation: no gradients and no moments, and masters only if a trainable weight computes in bf16.
        accumulates: whether gradients of several backwards will be summed before a step; if so, their memory is counted now.
        show_plan: print the plan's table and, where no progress bar is drawn, a line about the adoption.
        freed_bytes: host memory that is freed meanwhile: moments that optimizers bring from an earlier engine.
    """

    unit_class: type[HostUnit] = HostUnit
    """The class of the units, which allocates their memory. Estimates replace it."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        config: MegatrainConfig,
        *,
        bf16: bool,
        training: bool,
        accumulates: bool = False,
        show_progress: bool = True,
        show_plan: bool = True,
        freed_bytes: int = 0,
    ) -> None:
        self.config = config
        self.device = device
        self.bf16 = bf16
        self.is_closed = self._is_in_whole_forward = False
        self.training = False
        """Whether the engine is prepared for gradients: at the end of this, if they are asked for, or later."""
        self._handles: list[Any] = []
        self._untile_head: Callable[[], None] = lambda: None
        self._adopted: dict[str, list[tuple[str, str, nn.Module | nn.Parameter, str]]] = {}
        """What was adopted of each module's children and parameters, by its name: (registry, key, value, name in errors)."""
        self.prepare_anew: Callable[[nn.Module], None] | None = None
        """Gives the model a new engine that trains what is unfrozen by now. Set by whoever prepared the model."""
        self._dtypes = compute_dtypes(model, bf16)
        ranks = ranks_of_run()
        discovery = split_experts(discover_layers(model, config.layer_classes), config, self._dtypes, device, training, ranks)
        self._holds_masters = training or any(p.requires_grad and p.dtype != self._dtypes[id(p)] for p in model.parameters())
        counts_sums = training and accumulates and config.accumulation_dtype == "fp32"
        self._rank_count = 1 if ranks is None else ranks.size
        parameters_of_units = [parameters for _, parameters in discovery.units()]
        layouts = [FlatLayout.of(parameters, self._dtypes) for parameters in parameters_of_units]
        self.parameter_count = sum(layout.parameter_count for layout in layouts)
        self._streamed_units = len(discovery.layers) + len(discovery.experts)
        freed_bytes += anonymous_bytes(p for unit in parameters_of_units for _, p in unit if p.device.type == "cpu")
        store_bytes = self._require_memory(layouts, training, counts_sums, freed_bytes)
        streams = Streams(device)
        meter = Meter(streams)
        threads_of_rank = None if ranks is None else default_thread_count(usable_cpu_count(ranks.on_these_cpus))
        self.kernels = HostKernels(config.host_threads or threads_of_rank)
        if ranks is not None and discovery.experts and config.micro_batch_size is not None:
            raise UnsupportedError(
                f"megatrain_config.micro_batch_size is {config.micro_batch_size}, and with several processes it can't be "
                "combined with experts in parts: processes may cut a batch into different numbers of pieces, and gradients "
                "are exchanged for each piece; leave out micro_batch_size, or set expert_parts to 1"
            )
        shared = None if ranks is None else SharedStore(ranks, len(layouts))
        layers: list[StreamedLayer] = []
        groups: list[ResidentGroup] = []
        require_layers(len(discovery.layers), config.placement)
        require_attention_to_keep(model, config.placement.kept_attention)
        try:
            adopting = f"adopting {len(discovery.layers)} layers"
            adoption = Adoption(model, discovery, device=device, store_bytes=store_bytes)
            in_logs = f"{adopting} ({self.parameter_count:,} parameters)" if show_plan else None
            progress = progress_bar(self.parameter_count, adopting, "param", show=show_progress, in_logs=in_logs)

            def make_unit(name: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> HostUnit:
                with adoption.of_unit(parameters):
                    unit = self.unit_class(
                        name,
                        parameters,
                        self._dtypes,
                        kernels=self.kernels,
                        register=streams.is_cuda,
                        holds_masters=self._holds_masters,
                        moments_dtype=_MOMENTS[config.moments_dtype],
                        store=shared,
                    )
                progress.update(unit.layout.parameter_count)
                return unit

            with progress:
                first_part = 0
                for index, (name, module) in enumerate(discovery.layers):
                    layers.append(StreamedLayer(index, name, module, make_unit(name, discovery.parameters_of(index))))
                    for spec in discovery.experts_of(index):
                        unit = make_unit(spec.name, list(spec.module.named_parameters()))
                        arguments = (index, spec.name, spec.module, unit)
                        layers[-1].leave_to(StreamedExperts(*arguments, parts=spec.parts, first_part=first_part))
                        first_part += spec.parts
                    for streamed in (layers[-1], *layers[-1].experts):
                        streamed.show_host_weights()
                        streamed.unit.passes_gradients = config.passes_gradients
                for resident in discovery.residents:
                    unit = make_unit(resident.name, resident.parameters)
                    groups.append(ResidentGroup(resident.name, unit, resident.layers_before, streams=streams, meter=meter))
                adoption.finish()
            self.runtime = StreamingRuntime(
                layers, groups, streams=streams, meter=meter, kernels=self.kernels, config=config, shared=shared
            )
            if ranks is not None:
                ranks.meet("adopting the model")  # the first rank has filled the store
                for group in groups:
                    group.show_device_weights()
            if device.type != "meta":  # host memory that an engine will allocate later counts as taken, but not an estimate's
                promising.add(self.runtime)
            for layer in layers:
                install_proxy(layer.module, functools.partial(self.runtime.run_layer, layer), self._drain_for_copy)
            for experts in self.runtime.experts:
                run = functools.partial(run_experts, self.runtime.expert_streams, experts)
                install_proxy(experts.module, run, self._drain_for_copy)
            self.runtime.fp32_sums.is_budgeted = counts_sums
            states = (state for unit in self.runtime.units for state in unit.states)
            self._frozen = [state.parameter for state in states if not state.entry.spec.trainable]
            # Called when the engine is collected, or at exit: waits for steps, brings states on the device to the host, where
            # other ranks may want them, and ends the worker, so that no thread is inside torch when the interpreter ends.
            Finalize(self, self.runtime.states_on_device.leave, exitpriority=1)
            self.device_plan = DevicePlan(self.runtime, config, device, show_plan)
            if training:
                self._begin_training()
            _move_buffers(model.modules(), self.device)
            self._hook(model, discovery)
            self._make_logits_wait(model)
        except BaseException:
            self._give_back(layers, groups)
            raise
        _engines[model] = _attached[id(self)] = self

    @property
    def optimizer_drivers(self) -> list[HostStep]:
        """The drivers, which step the model's parameters on behalf of its optimizers."""
        return [stepper for stepper in self.runtime.steppers if isinstance(stepper, HostStep)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step the model's parameters and are alive."""
        return [driver.optimizer for driver in self.optimizer_drivers if driver.optimizer is not None]

    def enable_training(self) -> None:
        """Prepares an engine for gradients, once. Raises ``HostMemoryError``, with nothing allocated, if they don't fit."""
        if not self.training:
            planned = self._planned_bytes([unit.layout for unit in self.runtime.units])
            more = {kind: planned[kind] for kind in ("gradients", "moments")}
            more["residuals"] = planned["residuals"] - sum(unit.residuals.nbytes for unit in self.runtime.units)
            remedy = settings_that_take_less(self.config, keeps_gradients=self._rank_count > 1)
            require_host_bytes(more, self.config.host_memory_gib, remedy=remedy, ranks=self._rank_count)
            self._begin_training()

    def _begin_training(self) -> None:
        self.training = True
        for unit in self.runtime.units:
            unit.promise("residuals")
            unit.allocate("residuals", touch=False)
            unit.promise("gradients")
        self.runtime.offloader.allocate_slots(self.runtime.gradients_leave)

    def _make_logits_wait(self, model: nn.Module) -> None:
        """With ``tiled_loss``, makes the head return logits that are computed only if they are read (:mod:`.lazy_logits`)."""
        head = find_head(model, (layer.module for layer in self.runtime.layers)) if self.config.tiled_loss else None
        if head is not None:
            own = {id(parameter) for parameter in head.parameters()}
            units = [unit for unit in self.runtime.units if any(id(state.parameter) in own for state in unit.states)]
            calls = self.runtime.calls
            self._untile_head = tile_head(
                head, lambda: [unit.version for unit in units], self._drain_for_copy, lambda: calls.real_tokens
            )

    def _give_back(self, layers: Sequence[StreamedLayer], groups: Sequence[ResidentGroup]) -> None:
        """Undoes an adoption that failed half-way."""
        if "runtime" in self.__dict__:
            self.runtime.worker.close()
            self.runtime.offloader.slots.clear()
        streamed = [*layers, *(experts for layer in layers for experts in layer.experts)]
        self._detach(streamed)
        for unit in [layer.unit for layer in streamed] + [group.unit for group in groups]:
            unit.release()
        self.kernels.close()

    def _detach(self, streamed: Sequence[StreamedLayer]) -> None:
        for handle in self._handles:
            hook = (handle.hooks_dict_ref() or {}).get(handle.id)
            handle.remove()
            if isinstance(hook, ModelHook):
                hook.function = None  # a call of the module that has begun may still run the hook
        self._untile_head()
        for layer in streamed:
            remove_proxy(layer.module, layer.forward)

    def matches(self, model: nn.Module) -> bool:
        """Whether the model still has the parameters that were adopted, with the same shapes and the same ones frozen."""
        adopted = (state for unit in self.runtime.units for state in unit.states)
        kinds = {id(state.parameter): (state.entry.spec.trainable, state.entry.spec.shape) for state in adopted}
        return kinds == {id(parameter): (parameter.requires_grad, tuple(parameter.shape)) for parameter in model.parameters()}

    def _require_memory(self, layouts: list[FlatLayout], training: bool, fp32_sums: bool, freed_bytes: int) -> int:
        """Returns the bytes of the store. Raises ``HostMemoryError`` if they don't fit."""
        planned = self._planned_bytes(layouts, training, fp32_sums)
        planned["residuals"] *= self._holds_masters
        remedy = BF16_REMEDY if fp32_sums else ""
        if training:
            remedy += settings_that_take_less(self.config, keeps_gradients=fp32_sums or self._rank_count > 1)
        require_host_bytes(planned, self.config.host_memory_gib, freed=freed_bytes, remedy=remedy, ranks=self._rank_count)
        return sum(planned.values())

    def _planned_bytes(self, layouts: list[FlatLayout], training: bool = True, fp32_sums: bool = False) -> dict[str, int]:
        passing_units = self._streamed_units if self.config.passes_gradients else 0
        return planned_host_bytes(layouts, _MOMENTS[self.config.moments_dtype], training, fp32_sums, passing_units)

    def _drain_for_copy(self) -> None:
        """Called before a proxy is copied or pickled. A method of the engine, not of the runtime, so that proxies hold it."""
        self.runtime.drain()

    def _hook(self, model: nn.Module, discovery: Discovery) -> None:
        """Registers the engine's hooks on the model's modules, and notes what :meth:`_refuse_replaced` checks."""
        is_causal = may_leave_padding_out(model, [name for name, _ in discovery.layers])
        self._leaves_padding_out = is_causal and what_sees_a_batch(model) is None
        leave_off = functools.partial(leave_checkpointing_off, modules_that_checkpoint(model))
        leave_off()
        for module in model.modules():
            if module is model or hasattr(type(module), "gradient_checkpointing_enable"):  # scripts call inner models, too
                self._handles.append(module.register_forward_pre_hook(ModelHook(leave_off)))
            # Whoever reads all weights at once must see all steps that were taken.
            self._handles.append(module.register_state_dict_pre_hook(ModelHook(self.runtime.drain)))
            begin_loading = ModelHook(self.runtime.begin_loading, with_arguments=True)  # copying a model loads nothing
            self._handles.append(module.register_load_state_dict_pre_hook(begin_loading))
        streamed = [*self.runtime.layers, *self.runtime.experts]
        in_layers = {id(state.parameter) for owner in streamed for state in owner.unit.states}
        outside = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in in_layers]
        layers = [(layer.name, layer.module) for layer in self.runtime.layers if layer.name]
        for kind, registry, named in (("layer", "_modules", layers), ("parameter", "_parameters", outside)):
            for name, adopted in named:
                owner_name, _, key = name.rpartition(".")
                self._adopted.setdefault(owner_name, []).append((registry, key, adopted, f"{kind} {name}"))
        for module in caching_modules(model, [layer.module for layer in self.runtime.layers]):
            hook = ModelHook(decide_against_a_cache, with_arguments=True, runs_without_data=True)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        # With arguments: a hook without them is also called when the model is copied (ModelHook.__reduce__).
        after_forward = ModelHook(self._after_forward, with_arguments=True)
        for inner in model.modules():
            # A PeftModel's ``generate`` calls the inner model.
            if inner is model or hasattr(type(inner), "prepare_inputs_for_generation"):
                before = self._before_forward if inner is model else self._before_forward_inside
                hook = ModelHook(before, with_arguments=True)
                self._handles.append(inner.register_forward_pre_hook(hook, with_kwargs=True))
                self._handles.append(inner.register_forward_hook(after_forward, always_call=True))
        users = (user for spec in discovery.residents for user in spec.users)
        tile_tokens, self.runtime.outside_tiles = self.runtime.token_tile, TokenTiles.of_norms(model, users)
        self.runtime.outside_tiles.tile_tokens = tile_tokens
        self._handles += self.runtime.outside_tiles.hooks_on(model)
        for group, spec in zip(self.runtime.groups, discovery.residents, strict=True):
            hook = ModelHook(functools.partial(self.runtime.before_group_use, group))
            for module in spec.users:
                self._handles.append(module.register_forward_pre_hook(hook))

    def adopt_unfrozen(self, model: nn.Module) -> bool:
        """Prepares the model anew if parameters that were frozen are trained now, and returns whether it did. Raises
        ``HostMemoryError`` if what is trained now doesn't fit."""
        if self.prepare_anew is None or not self.training or not any(parameter.requires_grad for parameter in self._frozen):
            return False
        self.prepare_anew(model)
        return True

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Checks the model and plans for the batch. If parameters were unfrozen a new engine takes over, and its hooks run."""
        self._refuse_replaced(model)
        hooks_before = set(model._forward_pre_hooks)
        if torch.is_grad_enabled() and self.adopt_unfrozen(model):
            return run_pre_hooks(model, args, kwargs, hooks_before)
        self._is_in_whole_forward = True
        self._begin_forward(model, args, kwargs)
        if not torch.is_grad_enabled():
            return None
        if (shared := self.runtime.shared) is not None and shared.is_loading:
            self.runtime.refresh_if_written()
            shared.is_loading = False
        if self.training and model.training:
            inputs = by_name(model, args, kwargs)
            if self._leaves_padding_out:
                self.runtime.calls.real_tokens = real_tokens(inputs)
            started = time.perf_counter()
            before = self.device_plan.current
            self.device_plan.follow(model, inputs)
            if self.runtime.prefetcher.gathers:
                self.runtime.passes.begin_together()
            after = self.device_plan.current
            if after.planned is not before.planned or after.held is not before.held:  # else ranks only waited for one another
                self.runtime.meter.counters.plan_seconds += time.perf_counter() - started
            self.runtime.offloader.allocate_gradients(self.runtime.units)  # now that the plan has told which live on the host
        self.runtime.batch_cut.begin((args, kwargs))  # after planning, which runs other batches
        return None

    def _before_forward_inside(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Treats a call of an inner model that generates, without gradients and by itself, like one of the whole model."""
        if not self._is_in_whole_forward and not torch.is_grad_enabled():
            self._begin_forward(model, args, kwargs)

    def _begin_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.runtime.worker.raise_if_failed()
        self.runtime.end_forward()  # for the case that an exception interrupted the last one
        self.runtime.passes.begin_forward()
        has_graph = torch.is_grad_enabled()
        # This forward needs the memory of weights that are held for evaluations: other models', and for a graph its own, too.
        for engine in all_engines():
            if has_graph or engine is not self:
                engine.device_plan.evaluation_weights.give_up()
        if not has_graph:
            inputs = by_name(model, args, kwargs)
            if checks := self.runtime.checks_before_forward(is_next_token(inputs)):
                self.device_plan.make_room(model, inputs)
            self.runtime.begin_forward(checks)

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        self.runtime.end_forward()
        is_whole_model = engine_of(model) is self  # and not an inner one that generates
        self._is_in_whole_forward = self._is_in_whole_forward and not is_whole_model

    def _refuse_replaced(self, model: nn.Module) -> None:
        """Raises ``StateError`` if a layer, or a parameter outside the layers, was replaced or removed. Parameters inside
        layers are checked when the layer runs."""
        for owner_name, entries in self._adopted.items():
            module: nn.Module | None = None
            with contextlib.suppress(AttributeError):
                module = model.get_submodule(owner_name)
            for registry, key, adopted, name in entries:
                if module is None or getattr(module, registry).get(key) is not adopted:
                    raise StateError(
                        f"{name} was replaced or removed after the model was prepared; change the model (adapters, heads, "
                        "tokens) before accelerator.prepare(), or prepare it anew"
                    )

    def expect_accumulation(self, micro_batches: int) -> None:
        """Prepares for this many backwards before each step, with buffers that are allocated now and not within a step. Raises
        ``HostMemoryError`` if the fp32 sums of the gradients don't fit and weren't counted at adoption."""
        if micro_batches != self.device_plan.micro_batches:
            self.device_plan.micro_batches = micro_batches
            self.device_plan.forget()
        if micro_batches > 1:
            self.runtime.offloader.prepare_accumulation()

    def drain(self) -> None:
        """Blocks until the last step is applied to all weights, and takes over weights that were written from outside."""
        self.runtime.drain()
        self.runtime.refresh_if_written()

    def host_bytes_by_kind(self) -> dict[str, int]:
        """Bytes in the host store now, by what they hold. Of units on the device only memory that ranks share counts."""
        passing_buffers = self.runtime.offloader.passing_buffers
        bytes_by_kind = Counter(gradients=0 if passing_buffers is None else passing_buffers.size_bytes)
        for unit in self.runtime.units:
            if not unit.is_on_device:
                bytes_by_kind.update(unit.bytes_by_kind())
            elif unit.shared is not None:
                bytes_by_kind.update(unit.shared.mapped)
        if self.runtime.activations.pool.size_bytes:
            bytes_by_kind["activations"] = self.runtime.activations.pool.size_bytes
        return dict(bytes_by_kind)

    def close(self) -> None:
        """Detaches the engine, if it isn't closed yet, and leaves a plain model in host memory, with full-precision weights.
        Buffers of modules that another prepared model has, too, stay where they are."""
        if self.is_closed:
            return
        self.is_closed = True
        with contextlib.suppress(StepWorkerError, StateError, UnsupportedError):
            self.runtime.watch.settle()
        for driver in self.optimizer_drivers:
            driver.retire(ENGINE_CLOSED)
        for owner in self.runtime.unit_owners:
            # A parameter whose shape was changed raises, and stays as it is.
            with contextlib.suppress(StepWorkerError, StateError, UnsupportedError):
                owner.refresh_if_written()
        self._detach((*self.runtime.layers, *self.runtime.experts))
        self.device_plan.use_cudnn(True)
        self.runtime.close()
        self.kernels.close()
        for model in [model for model, engine in _engines.items() if engine is self]:
            del _engines[model]
            if self.device.type != "meta":
                used = {module for other in _engines for module in other.modules()}
                _move_buffers((module for module in model.modules() if module not in used), torch.device("cpu"))
