"""Accelerate's ``prepare``, clipping and ``free_memory`` while the plugin is active."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatrain_accelerate.activation import config_for
from megatrain_accelerate.checkpoint.checkpoints import optimizer_files_mapped
from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.engine import Engine, all_engines, engine_of
from megatrain_accelerate.errors import ConfigError, StateError, StepWorkerError, UnsupportedError
from megatrain_accelerate.integrations.shared_parts import refuse_calls, take_over
from megatrain_accelerate.integrations.telemetry import trace_if_asked
from megatrain_accelerate.integrations.training_arguments import require_precision, require_undivided
from megatrain_accelerate.integrations.wrapping import arguments_of
from megatrain_accelerate.layers.runtime import streamed_among
from megatrain_accelerate.layers.watched_parameters import unwatched
from megatrain_accelerate.optim.fused_step import FusedStep
from megatrain_accelerate.optim.host_optimizer import adopt_optimizer
from megatrain_accelerate.optim.host_step import ANOTHER_MODELS, TAKEN_OVER, driver_of, parameters_of
from megatrain_accelerate.plan.layer_discovery import find_layers, refuse_sparse_gradients
from megatrain_accelerate.store.parameter import ParameterState

logger = logging.getLogger(__name__)

# Attributes of an Accelerator: optimizers, by id, whose model isn't prepared yet, and the modules of one ``prepare`` call.
_WAITING = "_megatrain_waiting_optimizers"
_TOGETHER = "_megatrain_prepared_together"


def _engines(accelerator: Any) -> list[Engine]:
    """The engines of the models that an Accelerator prepared."""
    return [engine for engine in map(engine_of, accelerator._models) if engine is not None]


def require_servable(accelerator: Any) -> None:
    """Raises ``ConfigError`` if there is no GPU and the CPU wasn't asked for, or if FSDP, DeepSpeed or Megatron-LM place the
    model, ``UnsupportedError`` for any third device, fp16, fp8, a divided model or whole-model compilation: when an
    Accelerator is made, and when it prepares, since ``enable()`` may come later."""
    if accelerator.device.type not in ("cuda", "cpu"):
        raise UnsupportedError(
            f"megatrain streams to CUDA devices, not to {accelerator.device}; run on an NVIDIA GPU, or without megatrain"
        )
    # The state may have been made before the Accelerator, and knows only its own arguments.
    asked_for_cpu = getattr(accelerator.state, "_cpu", False) or parse_flag_from_env("ACCELERATE_USE_CPU")
    if accelerator.device.type == "cpu" and not asked_for_cpu:
        raise ConfigError(
            "megatrain found no CUDA device. Check `nvidia-smi` and torch.cuda.is_available(), or ask for the CPU, for tests "
            "and a first look: `use_cpu: true` in the yaml, `--use_cpu` on a Trainer script, or ACCELERATE_USE_CPU=true"
        )
    require_precision(accelerator.mixed_precision)
    if (kind := accelerator.distributed_type.value) not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise ConfigError(
            f"{kind} and megatrain both decide where the model lives; remove one of the two (of the Accelerator's arguments "
            "fsdp_plugin, deepspeed_plugin or megatron_lm_plugin)"
        )
    require_undivided(getattr(accelerator, "parallelism_config", None))
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    if plugin is not None and str(getattr(plugin.backend, "value", plugin.backend)).upper() != "NO":
        raise UnsupportedError("megatrain swaps weights under the model; leave torch_compile (dynamo_backend) off")


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Notes which modules are prepared in one call, for :func:`_is_beside`."""
    accelerator.__dict__[_TOGETHER] = [item for item in args if isinstance(item, nn.Module)]
    try:
        return original(accelerator, *args, **kwargs)
    finally:
        del accelerator.__dict__[_TOGETHER]


def _is_beside(accelerator: Any, model: nn.Module, config: MegatrainConfig) -> bool:
    """Whether a module (a head, a critic, a loss) is left to Accelerate beside a model that streams: they share no parameter,
    and it has no repeated layers or is smaller than one layer of a model that is prepared with it or was before."""
    engines = _engines(accelerator)
    if any(engine.runtime.state_of(parameter) is not None for engine in engines for parameter in model.parameters()):
        return False
    others = [other for other in accelerator.__dict__.get(_TOGETHER, []) if other is not model]
    sizes = [layer.parameter_count for engine in engines for layer in engine.runtime.layers]
    layers = [layer for other in others for _, layer in find_layers(other, config.layer_classes)]
    sizes += [sum(map(torch.numel, layer.parameters())) for layer in layers]
    has_layers = bool(find_layers(model, config.layer_classes) or find_layers(model))
    return bool(sizes) and (not has_layers or sum(map(torch.numel, model.parameters())) < max(sizes))


def prepare_model(
    original: Callable[..., nn.Module],
    accelerator: Any,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    """Attaches the engine, then lets Accelerate do its bookkeeping and autocast, without placement and wrapping. A small
    module beside a model that streams is left to Accelerate. Raises as :func:`require_servable` does; ``UnsupportedError`` if
    the model can't stream, or another model's optimizer holds trained parameters of it; ``HostMemoryError`` if it doesn't fit;
    ``ConfigError`` if the settings exclude gradient accumulation."""
    require_servable(accelerator)
    config = config_for(arguments_of(accelerator))
    if engine_of(model) is None and _is_beside(accelerator, model, config):
        return original(accelerator, model, device_placement=device_placement, evaluation_mode=evaluation_mode)
    _attach(accelerator, model, config, evaluation_mode)
    prepared = original(accelerator, model, device_placement=False, evaluation_mode=True)
    _adopt_waiting(accelerator)
    return prepared


def _attach(accelerator: Any, model: nn.Module, config: MegatrainConfig, evaluation_mode: bool) -> Engine:
    """Attaches the engine that a model needs. Optimizers of engines that are closed for it wait to be adopted by it."""
    engine, bf16 = engine_of(model), accelerator.mixed_precision == "bf16"
    accumulation, arguments = accelerator.gradient_accumulation_steps, arguments_of(accelerator)
    left_behind: list[torch.optim.Optimizer] = []
    gradients: dict[nn.Parameter, torch.Tensor] = {}
    if engine is not None:
        changed = None
        if not engine.matches(model):
            changed = "parameters were added, replaced, frozen or unfrozen since the model was prepared"
        elif not evaluation_mode and (engine.config, engine.bf16) != (config, bf16):
            changed = "the model was prepared with other settings, or another mixed precision"
        if changed is not None:
            logger.warning("megatrain: %s; preparing it again", changed)
            left_behind = engine.optimizers
            if not engine.config.passes_gradients:
                with contextlib.suppress(StepWorkerError, StateError, UnsupportedError):  # a resized parameter, for example
                    engine.runtime.watch.settle()
                    gradients = {parameter: parameter.grad for parameter in model.parameters() if parameter.grad is not None}
            engine.close()
            engine = None
    if not evaluation_mode:
        require_steps_in_backward_possible(config, accumulation)
        refuse_sparse_gradients(model)
    if engine is None:
        if getattr(model, "hf_device_map", None):
            raise UnsupportedError("the model was loaded with a device_map, but megatrain places weights; load it without")
        earlier_models, earlier_optimizers, was_trained = take_over(model, config)
        for optimizer in (one for other in _engines(accelerator) for one in other.optimizers):
            _refuse_two_models(optimizer, model)
        engine = Engine(
            model,
            accelerator.device,
            config,
            bf16=bf16,
            training=was_trained or not evaluation_mode,
            accumulates=accumulation > 1,
            show_progress=accelerator.is_local_main_process and not getattr(arguments, "disable_tqdm", False),
            show_plan=accelerator.is_local_main_process,
            freed_bytes=_moment_bytes([*left_behind, *earlier_optimizers], model),
        )
        if getattr(arguments, "use_vllm", False) and getattr(arguments, "vllm_enable_sleep_mode", False):
            # TRL's vLLM in this process uses its share by turns with the training. One that never sleeps has taken it already.
            engine.device_plan.budget.reserved_share = float(arguments.vllm_gpu_memory_utilization)
        # The engine must not hold the Accelerator, which holds the model: both would live for ever.
        gradient_state = accelerator.gradient_state
        engine.runtime.offloader.is_last_backward = lambda: bool(gradient_state.sync_gradients)
        engine.prepare_anew = functools.partial(_attach_unfrozen, weakref.ref(accelerator))
        if (ranks := engine.runtime.ranks) is not None:  # WAR: another rank may still read the old weights
            accelerator.register_load_state_pre_hook(lambda *_: ranks.meet("accelerator.load_state()"))
        for earlier_model in earlier_models:
            refuse_calls(earlier_model)
        for parameter, gradient in gradients.items():
            if (state := engine.runtime.state_of(parameter)) is not None and state.entry.spec.shape == gradient.shape:
                state.handle.set_gradient(gradient.to(parameter.device, parameter.dtype))
        left_behind += [one for one in earlier_optimizers if any(map(engine.runtime.trains, parameters_of(one)))]
    elif not evaluation_mode:
        engine.enable_training()
    if not evaluation_mode and accumulation > 1:
        engine.expect_accumulation(accumulation)
    for optimizer in left_behind:
        if _holds_any_of(optimizer, engine):
            accelerator.__dict__.setdefault(_WAITING, {})[id(optimizer)] = optimizer
    return engine


def _moment_bytes(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module) -> int:
    """Host bytes of the model's moments in these optimizers. They are freed as the new store takes them over."""
    own = {id(parameter) for parameter in model.parameters()}
    states = ((optimizer.state, parameters_of(optimizer)) for optimizer in optimizers)
    entries = [state.get(p) or {} for state, parameters in states for p in parameters if id(p) in own]
    values = (value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor))
    return sum(value.nbytes for value in values if value.device.type == "cpu")


def _attach_unfrozen(accelerator: weakref.ref[Any], model: nn.Module) -> None:
    """Replaces the engine of a model in training by one that trains what was unfrozen, and carries its state over. Raises
    ``StateError`` if the Accelerator is gone, ``HostMemoryError`` if what is trained now doesn't fit, ``StepWorkerError`` if
    an earlier step failed."""
    found, before = accelerator(), engine_of(model)
    if found is None or before is None:
        raise StateError("parameters were unfrozen, and the Accelerator that prepared the model is gone; prepare it again")
    before.runtime.watch.settle()  # raises the failure of a step, which the new engine doesn't know of
    drivers = (driver for driver in before.optimizer_drivers if isinstance(driver, FusedStep))
    in_backward = [driver.optimizer for driver in drivers if driver.steps_in_backward]
    engine = _attach(found, model, before.config, evaluation_mode=False)
    _adopt_waiting(found)
    for driver in engine.optimizer_drivers:
        if isinstance(driver, FusedStep) and driver.optimizer in in_backward and not driver.steps_in_backward:
            # As when a training begins: the first backward shows which layers' weights get gradients from outside them, too.
            driver.schedule, driver.next_schedule = "deferred", "backward"
    engine.expect_accumulation(before.device_plan.micro_batches)
    engine.device_plan.expect_steps(*before.device_plan.expected)
    engine.runtime.meter.counters = before.runtime.meter.counters


def prepare_optimizer(
    original: Callable[..., Any], accelerator: Any, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
) -> Any:
    """Makes the optimizer step on the host store of its model, now or when the model is prepared. One that was prepared before
    is adopted again if its engine was closed or another optimizer took over. Raises ``UnsupportedError`` if it holds trained
    parameters of two models that stream."""
    is_prepared = getattr(optimizer, "_is_accelerate_prepared", False)
    own = optimizer.optimizer if is_prepared and isinstance(optimizer, AcceleratedOptimizer) else optimizer
    driver = driver_of(own)
    if not is_prepared or (driver is not None and driver.is_retired):
        accelerator.__dict__.setdefault(_WAITING, {})[id(own)] = own
        _adopt_waiting(accelerator)
    return original(accelerator, optimizer, device_placement=False)


def _adopt_waiting(accelerator: Any) -> None:
    waiting = accelerator.__dict__.get(_WAITING, {})
    for optimizer in list(waiting.values()):
        was_driven = driver_of(optimizer) is not None
        for engine in _engines(accelerator):
            # An optimizer whose model is only evaluated now waits until the model is trained again.
            if _holds_any_of(optimizer, engine) and (engine.training or not was_driven):
                del waiting[id(optimizer)]
                for model in accelerator.__dict__.get(_TOGETHER, []):
                    if engine_of(model) is None and not _is_beside(accelerator, model, engine.config):
                        _refuse_two_models(optimizer, model)
                _adopt(optimizer, engine)
                break


def _holds_any_of(optimizer: torch.optim.Optimizer, engine: Engine) -> bool:
    return any(engine.runtime.state_of(parameter) is not None for parameter in parameters_of(optimizer))


def _refuse_two_models(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises ``UnsupportedError`` if this optimizer of another model holds trained parameters of ``model``."""
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if strangers := sum(id(parameter) in own for parameter in parameters_of(optimizer)):
        raise UnsupportedError(ANOTHER_MODELS.format(strangers))


def _adopt(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    schedule = engine.config.step_schedule
    if engine.runtime.ranks is not None:
        require_steps_after_backward(engine.config)
    if schedule == "auto":
        schedule = "backward" if engine.config.passes_gradients else "deferred"
    ids = {id(parameter) for parameter in parameters_of(optimizer) if engine.runtime.trains(parameter)}
    engine.runtime.bring_states()
    # Before the adoption, which sets the moments that they share.
    for earlier in engine.optimizer_drivers:
        if earlier.parameter_ids & ids:
            earlier.retire(TAKEN_OVER, copies=earlier.optimizer is not optimizer)
    adopt_optimizer(optimizer, engine.runtime, schedule)
    trace_if_asked(optimizer, engine)


def require_steps_after_backward(config: MegatrainConfig) -> None:
    """Raises ``ConfigError`` if the settings ask for steps in backward, which several processes can't take."""
    if config.step_schedule == "backward" or config.passes_gradients:
        raise ConfigError("step_schedule: backward and host_gradients: passing are for a single process; leave both out")


def require_steps_in_backward_possible(
    config: MegatrainConfig, accumulation: int, clips: bool = False, tries_again: bool = False
) -> None:
    """Raises ``ConfigError`` if the settings ask for steps in backward and gradients are clipped. With ``host_gradients:
    passing`` also if gradients are accumulated, or a backward that failed is to be tried again."""
    pieces = "(megatrain_config.micro_batch_size runs a large batch in pieces)"
    for is_asked, what in (
        (accumulation > 1, f"gradient_accumulation_steps is {accumulation}; set it to 1 {pieces}"),
        (clips, "max_grad_norm is above 0; set max_grad_norm to 0"),
        (tries_again, f"auto_find_batch_size tries one again that ran out of memory; leave it off {pieces}"),
    ):
        if config.passes_gradients and is_asked:
            raise ConfigError(
                f"megatrain_config.host_gradients: passing consumes gradients in backward, and {what}, or set host_gradients "
                "to 'kept' (2 bytes a parameter more)"
            )
    if config.step_schedule == "backward" and clips:
        raise ConfigError(
            "megatrain_config.step_schedule: backward steps a layer before the gradients' global norm is known, and "
            "max_grad_norm is above 0; set max_grad_norm to 0, or leave step_schedule out"
        )


def begin_training(engine: Engine, *, steps_in_backward: bool) -> None:
    """Chooses the step schedule if the settings leave the choice, and forgets a training that broke off. ``steps_in_backward``
    says whether layers may be stepped in backward: not if gradients are clipped (their norm is known only after it), a failed
    step is tried again with a smaller batch, or user code runs between backward and step."""
    engine.runtime.drain()
    for driver in engine.optimizer_drivers:
        if not isinstance(driver, FusedStep):
            continue
        if engine.config.step_schedule == "auto" and not engine.config.passes_gradients:
            # The first backward shows which layers' weights get gradients from outside them, too.
            may = steps_in_backward and engine.runtime.ranks is None
            driver.schedule, driver.next_schedule = "deferred", "backward" if may else None
        if stepped := driver.forget_backward():
            logger.warning(
                "megatrain: the training before this one broke off in or after a backward in which %d parameters were stepped "
                "already (step_schedule 'backward', which 'auto' is where max_grad_norm is 0), and its optimizer.step() never "
                "came; this training goes on from there. resume_from_checkpoint goes on from a whole step instead; set "
                "megatrain_config.step_schedule to 'deferred' so that a failed backward leaves all weights unstepped",
                stepped,
            )


def clip_grad_norm(
    original: Callable[..., Any],
    accelerator: Any,
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """Returns the gradients' global norm, known since backward. The fused step applies the clip factor. Gradients of modules
    that don't stream count, too, and are scaled in place."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with unwatched():
        trained = [parameter for parameter in parameters if parameter.grad is not None]
    streamed = streamed_among(trained)
    engines = _engines(accelerator)
    holder = next((engine for engine in engines if all(map(engine.runtime.trains, streamed))), None)
    if holder is not None and float(norm_type) == 2.0 and (streamed or not trained):
        return holder.runtime.clip_grad_norm(trained, float(max_norm)).to(accelerator.device)
    for engine in engines:
        engine.runtime.watch.settle()
    return original(accelerator, parameters, max_norm, norm_type)


def load_state(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Reads the states of models that stream into host memory, the optimizers' through mappings of their files."""
    if not _engines(accelerator):
        return original(accelerator, *args, **kwargs)
    with optimizer_files_mapped():
        return original(accelerator, *args, **{**kwargs, "map_location": kwargs.get("map_location") or "cpu"})


def free_memory(original: Callable[..., Any], accelerator: Any, *objects: Any) -> Any:
    """Applies the last steps of this Accelerator's models, and forgets the models."""
    for engine in _engines(accelerator):
        engine.drain()
    accelerator.__dict__.pop(_WAITING, None)
    return original(accelerator, *objects)


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[ParameterState]:
    """The states of the parameters that an optimizer steps by itself. None if it is adopted, or called by an adopted one."""
    if hasattr(type(optimizer), "_megatrain_original_class"):
        return
    for engine in all_engines():
        for parameter in parameters_of(optimizer):
            state = engine.runtime.state_of(parameter)
            # In the step of an adopted unfused optimizer, parameters are fp32 masters, also for optimizers that it calls.
            if state is not None and parameter.dtype == state.weight.dtype:
                yield state


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises ``UnsupportedError`` if the step would change weights that are only the upper halves of their masters."""
    if halves := sum(state.residual is not None for state in _stepped(optimizer)):
        raise UnsupportedError(
            f"this {type(optimizer).__name__} wasn't given to accelerator.prepare() and holds {halves} parameters of a "
            "prepared model, whose fp32 masters are in megatrain's host store: it would round its updates away. Prepare it "
            "with the model"
        )


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for state in _stepped(optimizer):
        state.handle.mark_written()


# Called at the steps of all optimizers. Weights' versions show what an unprepared one writes, unless it runs torch's fused
# kernels: hence the mark.
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
