"""Runs the micro-batches of an optimizer step as one batch, so that a layer is fetched once for all of them. The Trainer
fetches all micro-batches of a step before it runs the first. If the joined batch's loss is the sum of theirs, the last one's
``training_step`` runs all, in pieces of one micro-batch inside each layer (``micro_batch_size``), and the others return a loss
of zero. So the Trainer and its callbacks still see the micro-batches, their number and the sum of the losses."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from megatrain_accelerate.engine import Engine, engine_of
from megatrain_accelerate.errors import UnsupportedError
from megatrain_accelerate.integrations.trainer import choices_of, has_users_callback
from megatrain_accelerate.plan.fake_step import what_sees_a_batch

logger = logging.getLogger(__name__)

_joiners: weakref.WeakKeyDictionary[nn.Module, Joiner] = weakref.WeakKeyDictionary()
"""For each model, the joiner of its training in progress, or of its last one."""

_Batch = dict[str, torch.Tensor]


class CannotJoinError(Exception):
    """Micro-batches can't run as one batch; the message completes "because"."""


def join(micro_batches: Sequence[Any]) -> tuple[_Batch, int]:
    """Concatenates mappings of names to tensors (samples, ...) along dimension 0, and returns also the samples of the largest.
    Raises ``CannotJoinError`` if they differ in more than the number of samples, or hold something else."""
    first = micro_batches[0]
    for batch in micro_batches:
        if not isinstance(batch, Mapping):
            raise CannotJoinError(f"a micro-batch is a {type(batch).__name__} and not a mapping")
        if batch.keys() != first.keys():
            raise CannotJoinError(f"micro-batches hold different things ({sorted(first)} and {sorted(batch)})")
        for name, value in batch.items():
            # position_ids of multimodal models have their three axes as dimension 0.
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or (name == "position_ids" and value.dim() != 2):
                raise CannotJoinError(f"{name} isn't a tensor with one row for each sample")
        if len({len(tensor) for tensor in batch.values()}) != 1:
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
            raise CannotJoinError(f"its tensors don't have one row for each sample ({shapes})")
        for name, tensor in batch.items():
            if tensor.shape[1:] != first[name].shape[1:]:
                shapes = f"{tuple(first[name].shape)} and {tuple(tensor.shape)}"
                raise CannotJoinError(f"{name} differs in shape between micro-batches ({shapes})")
            if tensor.dtype != first[name].dtype or tensor.device != first[name].device:
                raise CannotJoinError(f"{name} differs in dtype or device between micro-batches")
    joined = {name: torch.cat([batch[name] for batch in micro_batches]) for name in first}
    return joined, max(len(next(iter(batch.values()))) for batch in micro_batches)


def _require_exact(trainer: Any, model: nn.Module, num_items: torch.Tensor | int | None) -> None:
    """Raises ``CannotJoinError`` if the joined batch's loss might differ from the sum of the micro-batches' losses."""
    if trainer.compute_loss_func is not None:
        raise CannotJoinError("compute_loss_func may compare the tokens of a micro-batch with each other")
    if num_items is None:
        raise CannotJoinError("the loss isn't divided by the number of labelled tokens of the whole step (num_items_in_batch)")
    for name in ("get_batch_samples", "training_step", "compute_loss", "_prepare_inputs"):
        if name in vars(trainer) or getattr(type(trainer), name) is not getattr(Trainer, name):
            raise CannotJoinError(f"{type(trainer).__name__} has a {name} of its own, which is to see each micro-batch")
    if (reason := what_sees_a_batch(model)) is not None:
        raise CannotJoinError(reason)


def _model_inputs(trainer: Any, batch: Any, num_items: Any) -> dict[str, Any]:
    """The keyword arguments with which ``Trainer.compute_loss`` calls the model on ``batch``."""
    inputs = dict(trainer._prepare_inputs(batch))
    if trainer.label_smoother is not None:
        inputs.pop("labels", None)
    if trainer.model_accepts_loss_kwargs:
        inputs["num_items_in_batch"] = num_items
    return inputs


class Joiner:
    """Joins the micro-batches of one training's steps until there is a reason not to. From then on they run one by one, also
    when the training is resumed: a plan is made for one of the two ways, and dropout draws other numbers in each."""

    def __init__(self, training: Any, is_asked_for: bool) -> None:
        self.training = training
        """The Trainer's state, a new object for each training. Checkpoints save it."""
        self._is_asked_for = is_asked_for
        """Whether to join wherever it is exact (``true``), or only where the plan predicts that it pays (``auto``)."""
        self.joined_elements = 0
        """Elements of the largest batch that was joined so far."""
        before = choices_of(training).get("joining") or {}
        fresh = {"is_asked_for": is_asked_for, "joined_elements": 0, "apart_because": None}
        self._decision: dict[str, Any] = fresh | (before if before.get("is_asked_for") == is_asked_for else {})
        choices_of(training)["joining"] = self._decision
        if (reason := self._decision["apart_because"]) is not None:
            self._refuse(reason)
        self._micro_batches: list[Any] = []
        self._next = 0
        self._joined: tuple[_Batch, int] | None = None

    def step_begins(self, micro_batches: list[Any]) -> None:
        self._micro_batches, self._next, self._joined = micro_batches, 0, None

    def training_step(
        self, original: Callable[..., Any], trainer: Any, engine: Engine, model: nn.Module, inputs: Any, num_items: Any
    ) -> torch.Tensor:
        """``Trainer.training_step`` on the next micro-batch. If they are joined, all but the last run nothing."""
        place, count = self._next, len(self._micro_batches)
        if place >= count or self._micro_batches[place] is not inputs:  # not the Trainer's own loop
            return original(trainer, model, inputs, num_items)
        self._next += 1
        if place == 0:
            self._joined = self._join(trainer, engine, model, num_items)
        if self._next == count:
            self._micro_batches = []
        if self._joined is None:
            return original(trainer, model, inputs, num_items)
        if self._next < count:
            return torch.zeros((), device=trainer.args.device)
        (joined, samples), self._joined = self._joined, None
        with engine.device_plan.joining(samples):
            return original(trainer, model, joined, num_items)

    def _join(self, trainer: Any, engine: Engine, model: nn.Module, num_items: Any) -> tuple[_Batch, int] | None:
        if self._decision["apart_because"] is not None or len(self._micro_batches) < 2:
            return None
        model.train()
        try:
            if engine.runtime.experts:
                raise CannotJoinError("experts stream in parts, which are fetched for each piece of a batch all the same")
            if has_users_callback(trainer, "on_substep_end"):
                raise CannotJoinError("a callback of the script's is called between them (on_substep_end)")
            if not self.joined_elements:
                _require_exact(trainer, model, num_items)
            joined = join(self._micro_batches)
            if not self._is_asked_for and not engine.device_plan.budget.exists:
                raise CannotJoinError("there is no GPU memory to plan with (join_micro_batches: true does without a plan)")
            self._weigh(trainer, engine, model, *joined, num_items)
        except CannotJoinError as reason:
            engine.device_plan.forget()
            self._refuse(str(reason))
            return None
        return joined

    def _refuse(self, reason: str) -> None:
        level = logging.WARNING if self._is_asked_for else logging.INFO
        logger.log(level, "megatrain: the micro-batches of a step run one by one, because %s", reason)
        self._decision["apart_because"] = reason

    def _weigh(self, trainer: Any, engine: Engine, model: nn.Module, joined: _Batch, samples: int, num_items: Any) -> None:
        """Raises ``CannotJoinError`` if a batch larger than all before can't be cut or summed, or doesn't pay by the plan."""
        elements = sum(tensor.numel() for tensor in joined.values())
        if elements <= self.joined_elements:
            return
        plan, inputs = engine.device_plan, _model_inputs(trainer, joined, num_items)
        together = None
        try:
            with plan.joining(samples):
                step_profile = plan.foresee(model, inputs)
                is_sum, smoother = step_profile.sums_loss, trainer.label_smoother
                if smoother is not None:
                    is_known = type(smoother) is LabelSmoother
                    is_sum = is_known and "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
                if is_sum and not self._is_asked_for:
                    together = plan.search_for(step_profile).best()
        except UnsupportedError as error:
            raise CannotJoinError(f"a joined batch can't be cut into its micro-batches ({error})") from error
        except Exception as error:  # a model that reads its data can't do a fake run
            raise CannotJoinError(f"a step can't be predicted for this model ({error})") from error
        if not is_sum:
            raise CannotJoinError("the loss isn't transformers' own sum over tokens divided by num_items_in_batch")
        if not self._is_asked_for:
            if together is None:
                raise CannotJoinError("all of them at once are predicted to take more GPU memory than the plan may use")
            if elements > self._decision["joined_elements"]:
                apart = plan.search_for(plan.foresee(model, _model_inputs(trainer, self._micro_batches[0], num_items))).best()
                if apart is not None and not together.is_worth_it(apart):
                    raise CannotJoinError(
                        f"a step is predicted to take {together.time.seconds:.3f} s with all of them at once, and "
                        f"{apart.time.seconds:.3f} s without"
                    )
        if not self.joined_elements:
            text = "megatrain: the %d micro-batches of a step run as one batch, %d samples at a time in each layer"
            logger.info(text, len(self._micro_batches), samples)
        self.joined_elements = elements
        self._decision["joined_elements"] = max(elements, self._decision["joined_elements"])


def _joiner_of(trainer: Any, engine: Engine | None) -> Joiner | None:
    """The joiner of the training in progress, or None if nothing is to be joined."""
    if engine is None or not engine.config.join_micro_batches or trainer.args.gradient_accumulation_steps < 2:
        return None
    if engine.runtime.ranks is not None:
        return None  # each rank would decide by itself, but all must run as many backwards
    joiner = _joiners.get(trainer.model)
    if joiner is None or joiner.training is not trainer.state:
        if joiner is not None and joiner.joined_elements:
            engine.device_plan.forget()
        joiner = _joiners[trainer.model] = Joiner(trainer.state, is_asked_for=engine.config.join_micro_batches is True)
    return joiner


def get_batch_samples(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Notes the micro-batches of the step that begins."""
    fetched = original(trainer, *args, **kwargs)
    if (joiner := _joiner_of(trainer, engine_of(trainer.model))) is not None:
        joiner.step_begins(fetched[0])
    return fetched


def training_step(
    original: Callable[..., torch.Tensor], trainer: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
) -> torch.Tensor:
    """Runs a micro-batch or, with the last of a step, all of them."""
    engine = engine_of(trainer.model)
    if engine is not None and engine.adopt_unfrozen(trainer.model):
        engine = engine_of(trainer.model)
    joiner = _joiner_of(trainer, engine)
    if joiner is None or engine is None:
        return original(trainer, model, inputs, num_items_in_batch)
    return joiner.training_step(original, trainer, engine, model, inputs, num_items_in_batch)
