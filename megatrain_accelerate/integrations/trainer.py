"""The Trainer while the plugin is active: loading, the smoothed loss, and the callback that follows a training."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten
from transformers import TrainerCallback, TrainerState

from megatrain_accelerate.checkpoint.checkpoints import require_saving_possible
from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.hooks import ModelHook
from megatrain_accelerate.integrations.accelerate_backend import begin_training, require_steps_in_backward_possible
from megatrain_accelerate.integrations.shared_parts import engines_with, new_holder
from megatrain_accelerate.integrations.telemetry import Telemetry, describe_bound, is_training_log
from megatrain_accelerate.loss.lazy_logits import LazyLogits
from megatrain_accelerate.plan.adoption import is_without_weights
from megatrain_accelerate.progress import say

logger = logging.getLogger(__name__)

_CALLBACKS_THAT_DO_NOT_LOOK = ("transformers", "megatrain_accelerate")
"""Packages whose callbacks look at neither weights nor gradients before a step."""
_TRAINERS_THAT_DO_NOT_LOOK = ("transformers", "trl", "sentence_transformers", "setfit")
"""Packages whose Trainers look at neither weights nor gradients between a micro-batch's backward and the step."""


def n_gpu(original: Callable[..., int], arguments: Any) -> int:
    if original(arguments) > 1:
        arguments._n_gpu = 1
    return original(arguments)


def move_model_to_device(original: Callable[..., Any], trainer: Any, model: nn.Module, device: torch.device) -> None:
    """Does nothing: weights stay on the host until the model is prepared, when the engine places them."""


def from_pretrained(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ignores ``device_map``, so that models are loaded to the host."""
    if (device_map := kwargs.pop("device_map", None)) is not None:
        what = "the weights are loaded to host memory and megatrain decides what goes to the GPU"
        logger.warning("megatrain: device_map=%r is ignored; %s", device_map, what)
    return original(*args, **kwargs)


def follow_trainer(trainer: Any) -> None:
    """Gives a new Trainer our callback. If its model is called before training, as TRL does for the reference's
    log-probabilities, it is prepared first: a stock Trainer has moved it to the GPU by now, but here all weights are still on
    the host."""
    reference, model = weakref.ref(trainer), getattr(trainer, "model", None)
    trainer.callback_handler.callbacks.insert(1, MegatrainCallback(reference))  # after DefaultFlowCallback, before trackers
    if not isinstance(model, nn.Module) or engine_of(model) is not None:
        return

    def prepare_first(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trainer = reference()
        # Inside another prepared model its layers already stream as parts of that one.
        if trainer is not None and not engines_with(model):
            device = trainer.accelerator.device
            places = {leaf.device.type for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)}
            if places != {device.type}:
                return  # an ordinary call on the host, where the weights are
            trainer.accelerator.prepare_model(model, evaluation_mode=not torch.is_grad_enabled())
        handle.remove()

    # After the model's own hooks, but before one that refuses calls until it is prepared.
    hook, prepend = ModelHook(prepare_first, with_arguments=True), new_holder(model) is not None
    handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)


def load_from_checkpoint(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Loads a checkpoint. A model that was built without weights is prepared first, so that it has some to load into."""
    model = getattr(trainer, "model", None)
    if isinstance(model, nn.Module) and engine_of(model) is None and is_without_weights(model):
        trainer.accelerator.prepare_model(model)
    original(trainer, *args, **kwargs)


def label_smoothed_loss(
    original: Callable[..., torch.Tensor],
    smoother: Any,
    model_output: Any,
    labels: torch.Tensor,
    shift_labels: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers' ``LabelSmoother.__call__``, by ``cross_entropy`` if the logits are lazy. Both compute ``(1 - epsilon) *
    nll + epsilon * (mean over the vocabulary)``, summed over labelled tokens and divided by their number or by
    ``num_items_in_batch``. Logits: (batch, tokens, vocabulary); labels: (batch, tokens)."""
    logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
    if not isinstance(logits, LazyLogits) or labels.dim() != logits.dim() - 1 or kwargs.keys() - {"num_items_in_batch"}:
        return original(smoother, model_output, labels, shift_labels=shift_labels, **kwargs)
    if shift_labels:
        logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:]
    labels = labels.reshape(-1)
    is_ignored = labels.eq(smoother.ignore_index)
    loss = functional.cross_entropy(
        logits.view(-1, logits.shape[-1]).float(),
        # The original takes other negative labels as 0, too.
        labels.clamp(min=0).masked_fill(is_ignored, smoother.ignore_index),
        ignore_index=smoother.ignore_index,
        reduction="sum",
        label_smoothing=smoother.epsilon,
    )
    if (count := kwargs.get("num_items_in_batch")) is None:
        count = (~is_ignored).sum()
    return loss / (count.to(loss.device) if torch.is_tensor(count) else count)


def choices_of(state: TrainerState) -> dict[str, Any]:
    """The choices that were made for a training, by name. Checkpoints save them as JSON."""
    # The layout of transformers' ExportableState. No callback may have this name: the Trainer would restore it from the entry.
    return state.stateful_callbacks.setdefault("megatrain_accelerate", {"args": {}, "attributes": {}})["attributes"]


def _is_a_users(owner: Any, name: str, packages: tuple[str, ...]) -> bool:
    """Whether the method of this name comes from outside ``packages``."""
    found = next((cls for cls in type(owner).__mro__ if name in vars(cls)), None)
    return name in vars(owner) or (found is not None and found.__module__.partition(".")[0] not in packages)


def has_users_callback(trainer: Any, event: str) -> bool:
    """Whether a callback of the user's handles an event, for example ``on_substep_end``."""
    return any(_is_a_users(callback, event, _CALLBACKS_THAT_DO_NOT_LOOK) for callback in trainer.callback_handler.callbacks)


class MegatrainCallback(TrainerCallback):
    """Follows a training: chooses the step schedule, adds the engine's numbers to the logs, drains at the end."""

    def __init__(self, trainer: Callable[[], Any]) -> None:
        self._telemetry: Telemetry | None = None
        self._last_word: str | None = None
        self._trainer = trainer
        """Returns the Trainer whose training is followed, or None if it is gone."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (engine := engine_of(kwargs["model"])) is not None:
            if self._telemetry is not None:  # an exception ended the last training
                self._telemetry.close()
            clips = bool(args.max_grad_norm and args.max_grad_norm > 0)
            tries_again = bool(args.auto_find_batch_size)
            require_steps_in_backward_possible(engine.config, args.gradient_accumulation_steps, clips, tries_again)
            if tries_again and engine.runtime.ranks is not None:
                raise ConfigError(
                    "auto_find_batch_size tries a batch again on the process that ran out of memory, and the others would "
                    "wait for it; leave it off (megatrain_config.micro_batch_size runs a large batch in pieces)"
                )
            engine.expect_accumulation(args.gradient_accumulation_steps)
            engine.device_plan.expect_steps(state.max_steps, *map(choices_of(state).get, ("compiles", "plan")))
            require_saving_possible(args, kwargs["model"], kwargs.get("optimizer"), engine)
            trainer = self._trainer()
            # Whether user code, which may read gradients or weights, runs just before the step.
            looks = trainer is None or _is_a_users(trainer, "training_step", _TRAINERS_THAT_DO_NOT_LOOK)
            looks = looks or has_users_callback(trainer, "on_pre_optimizer_step")
            begin_training(engine, steps_in_backward=not (clips or tries_again or looks))
            self._telemetry = Telemetry(engine, kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._telemetry is not None:
            self._telemetry.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (engine := engine_of(kwargs["model"])) is not None:
            choices_of(state).update(compiles=engine.device_plan.expected[1], plan=engine.device_plan.record)
        if self._telemetry is not None:
            self._telemetry.step_ends()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._telemetry is not None:
            self._telemetry.pause()

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Adds the engine's figures to a training log, for trackers and history. Prints what bounds a step if that is new."""
        # What a script logs within a step isn't the Trainer's entry for whole steps.
        if self._telemetry is None or logs is None or self._telemetry.is_within_step or not is_training_log(logs):
            return
        if (engine := engine_of(kwargs["model"])) is not None:
            self._telemetry.engine = engine
        entries = self._telemetry.entries()
        logs.update(entries)
        if state.log_history:
            state.log_history[-1].update(entries)
        if state.is_local_process_zero and self._telemetry.bound_by not in (None, self._last_word):
            # Printed and not logged: a word makes MLflow and ClearML warn at each log, and callbacks that format numbers fail.
            self._last_word = self._telemetry.bound_by
            say(f"megatrain: step {state.global_step} {describe_bound(self._telemetry.shares)}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Applies the last step before anybody reads the weights."""
        if (engine := engine_of(kwargs["model"])) is not None:
            engine.runtime.bring_states()
        if self._telemetry is not None:
            self._telemetry.close()
            self._telemetry = None
