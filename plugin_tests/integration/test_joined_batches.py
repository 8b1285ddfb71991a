"""A step's micro-batches as one batch under the stock Trainer, against the stock Trainer's accumulation.

To 1e-6 in fp32, the tolerance of trainer_runs: sums over samples in another order differ by some 1e-7 after six steps.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import masters_of
from pairs import pairwise
from peft import LoraConfig, get_peft_model
from torch import nn
from trainer_runs import (
    TOLERANCE,
    Padding,
    Record,
    TrainerRun,
    assert_same_run,
    examples,
    make_arguments,
    plugin,
    ragged_examples,
    run_trainer,
    tiny_llama,
)
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from versions import OLD_CHECKPOINTING_NAMES, require_arguments

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.integrations.joined_batches import CannotJoinError, join
from megatrain_accelerate.plan import device_plan
from megatrain_accelerate.plan.machine import Machine

pytestmark = pytest.mark.usefixtures("profiled_once")

TOGETHER: Record = {"join_micro_batches": True}
APART: Record = {"join_micro_batches": False}


EVALUATED: Record = {"eval_strategy": "steps", "eval_steps": 2, "options": lambda model: {"eval_dataset": examples(4, seed=9)}}


class Watch(TrainerCallback):
    """What a user's callback sees, and what each step moved. Its own ``on_substep_end`` would keep micro-batches apart."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.fetches: list[int] = []
        self.d2h_bytes: list[int] = []
        self.samples: list[int] = []
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if module.training:
                self.samples.append(len(kwargs["input_ids"]))

        model.register_forward_pre_hook(count, with_kwargs=True)

    def _note(self, name: str, state: Any) -> None:
        self.events.append((name, state.global_step, state.num_input_tokens_seen))

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._note("begin", state)
        engine = engine_of(model)
        self._before = copy.copy(engine.runtime.meter.counters) if engine is not None else None

    def note_substeps(self, trainer: Trainer) -> None:
        """Notes when the Trainer calls its callbacks between two micro-batches."""
        handler: Any = trainer.callback_handler
        call_back = handler.on_substep_end

        def noted(args: Any, state: Any, control: Any) -> Any:
            self._note("substep", state)
            return call_back(args, state, control)

        handler.on_substep_end = noted

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._note("optimizer", state)
        if self._before is not None:
            counters = engine_of(model).runtime.meter.counters
            self.fetches.append(counters.weight_fetches - self._before.weight_fetches)
            self.d2h_bytes.append(counters.d2h_bytes - self._before.d2h_bytes)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("end", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("epoch", state)


def run(folder: Path, settings: Record | None = None, make: Any = tiny_llama, **arguments: Any) -> tuple[TrainerRun, Watch]:
    """A run with a watch; ``settings`` None for the stock Trainer without the plugin."""
    watch = Watch()
    options = arguments.pop("options", None)

    def with_watch(model: nn.Module) -> Record:
        return {"callbacks": [watch], **(options(model) if options is not None else {})}

    script = arguments.pop("script", Trainer.train)

    def watched(trainer: Trainer) -> None:
        watch.note_substeps(trainer)
        script(trainer)

    arguments = {**arguments, "options": with_watch, "script": watched}
    done = run_trainer(make, folder, streamed=settings is not None, settings=settings, **arguments)
    return done, watch


def assert_joined_like_stock(folder: Path, settings: Record | None = None, **arguments: Any) -> tuple[Watch, Watch]:
    """The joined run is that of the stock Trainer, in weights, log and callbacks."""
    stock, seen = run(folder / "stock", **arguments)
    joined, watch = run(folder / "joined", {**TOGETHER, **(settings or {})}, **arguments)
    assert_same_run(joined, stock)
    assert joined.trainer.state.total_flos == stock.trainer.state.total_flos
    assert watch.events == seen.events
    assert len(watch.samples) < len(seen.samples), "nothing was joined"
    assert sum(watch.samples) == sum(seen.samples)
    return watch, seen


# ---------------------------------------------------------------- equal to stock


@pytest.mark.parametrize(
    ("settings", "accumulation", "max_grad_norm"),
    pairwise([{}, {"kept_layers": 3}, {"micro_batch_size": 1}, {"device_layers": 1}], [2, 3], [1.0, 0.0]),
    ids=str,
)
def test_joined_micro_batches_train_as_stock_accumulation(
    tmp_path: Path, accumulation: int, max_grad_norm: float, settings: Record
) -> None:
    watch, _ = assert_joined_like_stock(
        tmp_path, settings, gradient_accumulation_steps=accumulation, max_grad_norm=max_grad_norm
    )
    assert set(watch.samples) == {2 * accumulation}


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "label_smoothing_factor": 0.2,
            "include_num_input_tokens_seen": "all",
            "logging_steps": 2,
            "logging_first_step": True,
        },
        {"average_tokens_across_devices": False},
        {"activation_checkpointing": True},
        {"gradient_checkpointing": True},
        {"optim": "sgd", "learning_rate": 0.1},
    ],
    ids=lambda arguments: "-".join(arguments),
)
@pytest.mark.filterwarnings(OLD_CHECKPOINTING_NAMES)
def test_training_arguments(tmp_path: Path, arguments: Record) -> None:
    require_arguments(arguments)
    assert_joined_like_stock(tmp_path, gradient_accumulation_steps=3, **arguments)


def test_epochs_whose_last_step_and_last_micro_batch_are_smaller(tmp_path: Path) -> None:
    # 15 samples: 8 micro-batches, the last of one sample; steps of 3, 3 and 2 micro-batches.
    watch, _ = assert_joined_like_stock(
        tmp_path, dataset=examples(15), gradient_accumulation_steps=3, num_train_epochs=2, max_steps=-1
    )
    assert watch.samples == [6, 6, 3] * 2


def test_an_epoch_that_ends_with_a_single_micro_batch(tmp_path: Path) -> None:
    watch, _ = assert_joined_like_stock(
        tmp_path, dataset=examples(14), gradient_accumulation_steps=3, num_train_epochs=2, max_steps=-1
    )
    assert watch.samples == [6, 6, 2] * 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_micro_batches_of_one_length(tmp_path: Path, side: str) -> None:
    class ToTwenty(Padding):
        def __call__(self, records: Sequence[Record]) -> Record:
            filler = {"input_ids": torch.ones(20, dtype=torch.long), "labels": torch.full((20,), -100)}
            return {name: tensor[:-1] for name, tensor in super().__call__([*records, filler]).items()}

    assert_joined_like_stock(
        tmp_path,
        dataset=ragged_examples(14),
        options=lambda model: {"data_collator": ToTwenty(side)},
        gradient_accumulation_steps=3,
    )


def test_adapters(tmp_path: Path) -> None:
    adapters = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    assert_joined_like_stock(tmp_path, make=lambda: get_peft_model(tiny_llama(), adapters), gradient_accumulation_steps=3)


def test_evaluation_between_steps(tmp_path: Path) -> None:
    stock, _ = run(tmp_path / "stock", gradient_accumulation_steps=3, **EVALUATED)
    joined, watch = run(tmp_path / "joined", TOGETHER, gradient_accumulation_steps=3, **EVALUATED)
    assert_same_run(joined, stock)
    assert len(joined.logged("eval_loss")) == 3
    assert watch.samples == [6] * 6


# ---------------------------------------------------------------- traffic


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 5])
def test_layers_are_fetched_and_gradients_leave_as_often_whatever_the_number_of_micro_batches(
    tmp_path: Path, accumulation: int
) -> None:
    make = lambda: tiny_llama(num_hidden_layers=5)  # noqa: E731
    arguments = {"gradient_accumulation_steps": accumulation, "max_steps": 3, "dataset": examples(30), "make": make}
    _, together = run(tmp_path / "together", TOGETHER, **arguments)
    _, apart = run(tmp_path / "apart", APART, **arguments)
    _, one = run(tmp_path / "one", APART, **{**arguments, "gradient_accumulation_steps": 1})
    assert together.fetches == one.fetches
    assert max(together.fetches[1:]) <= 2 * 5
    assert together.d2h_bytes == one.d2h_bytes
    if accumulation > 1:
        assert min(apart.fetches) > max(together.fetches)
        assert min(apart.d2h_bytes) > max(together.d2h_bytes)


def test_false_runs_micro_batch_by_micro_batch(tmp_path: Path) -> None:
    arguments: Record = {"gradient_accumulation_steps": 3}
    stock, seen = run(tmp_path / "stock", **arguments)
    apart, watch = run(tmp_path / "apart", APART, **arguments)
    assert_same_run(apart, stock)
    assert watch.samples == seen.samples


# ---------------------------------------------------------------- where joining isn't exact


def assert_apart(folder: Path, caplog: pytest.LogCaptureFixture, reason: str, **arguments: Any) -> None:
    """Nothing is joined, one line says why, and the run is the stock one."""
    tolerance = arguments.pop("tolerance", TOLERANCE)
    arguments = {"gradient_accumulation_steps": 3, "settings": TOGETHER, **arguments}
    settings = arguments.pop("settings")
    stock, seen = run(folder / "stock", **arguments)
    with caplog.at_level(logging.INFO, logger="megatrain_accelerate"):
        apart, watch = run(folder / "apart", settings, **arguments)
    assert_same_run(apart, stock, tolerance)
    assert watch.samples == seen.samples
    (line,) = [record for record in caplog.records if "one by one" in record.getMessage()]
    assert reason in line.getMessage()
    # What was asked for and isn't done is seen at the level that programs log at by default.
    assert line.levelno == (logging.WARNING if settings.get("join_micro_batches") is True else logging.INFO)


def test_micro_batches_of_several_lengths_run_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_apart(
        tmp_path,
        caplog,
        "differs in shape between micro-batches",
        dataset=ragged_examples(14),
        options=lambda model: {"data_collator": Padding("right")},
    )


def test_a_run_that_was_joined_goes_on_apart_when_lengths_differ(tmp_path: Path) -> None:
    dataset = [*examples(6, length=16), *examples(2, length=16), *examples(4, length=12), *examples(6, length=16)]
    arguments: Record = {
        "dataset": dataset,
        "gradient_accumulation_steps": 3,
        "train_sampling_strategy": "sequential",
        "num_train_epochs": 2,
        "max_steps": -1,
    }
    stock, _ = run(tmp_path / "stock", **arguments)
    joined, watch = run(tmp_path / "joined", TOGETHER, **arguments)
    assert_same_run(joined, stock)
    assert watch.samples == [6] + [2] * 15


def tiny_mixtral(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
    }
    return MixtralForCausalLM(MixtralConfig(**{**settings, **changes}))


def test_experts_that_are_balanced_over_a_micro_batch_run_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = lambda: tiny_mixtral(output_router_logits=True, router_aux_loss_coef=0.5)  # noqa: E731
    assert_apart(tmp_path, caplog, "output_router_logits", make=make)


def test_experts_in_parts_run_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Hidden states' gradients of a token's experts are added in another order, and AdamW divides what differs by small roots.
    settings = {**TOGETHER, "expert_parts": 3}
    assert_apart(tmp_path, caplog, "experts stream in parts", make=tiny_mixtral, settings=settings, tolerance=1e-5)


def test_experts_without_a_balancing_loss_are_joined(tmp_path: Path) -> None:
    assert_joined_like_stock(tmp_path, make=tiny_mixtral, gradient_accumulation_steps=3)


def tiny_masked_lm() -> nn.Module:
    """Averages its loss over the tokens of a micro-batch, though its forward takes any keyword argument."""
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def test_a_loss_that_is_averaged_over_a_micro_batch_runs_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # SGD: the key biases' true gradient is zero, see tiny_llama().
    assert_apart(tmp_path, caplog, "isn't transformers' own sum", make=tiny_masked_lm, optim="sgd", learning_rate=0.1)


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def with_a_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return summed(outputs, labels, num_items_in_batch) + 1e-2 * outputs.logits.square().mean()


def hardest_first(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Weighs each token by its loss beside the largest of the batch: half of it for twice ``num_items_in_batch`` too."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
    weights = (losses.detach() / losses.detach().max()) ** 4
    return (weights * losses).sum() / num_items_in_batch


# The first could be joined, but nothing short of a proof tells it from the others.
@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        *((loss, TOGETHER) for loss in (summed, with_a_mean, hardest_first)),
        (hardest_first, {"gpu_memory_gib": 1.0}),
        *(pytest.param(loss, {"gpu_memory_gib": 1.0}, marks=pytest.mark.long) for loss in (summed, with_a_mean)),
    ],
)
def test_a_loss_function_of_the_user_sees_each_micro_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: Any, settings: Record
) -> None:
    options = lambda model: {"compute_loss_func": loss}  # noqa: E731
    assert_apart(tmp_path, caplog, "compute_loss_func may compare the tokens", options=options, settings=settings)


class OfItsOwn(LlamaForCausalLM):
    """A forward of a script's own, which could do anything beside what this one does."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def with_own_forward() -> nn.Module:
    model = tiny_llama()
    model.__class__ = OfItsOwn
    return model


def with_own_loss_function() -> nn.Module:
    model = tiny_llama()

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        confident = logits.detach().softmax(-1).amax(-1).roll(-1, 1)
        labels = labels.masked_fill(confident > confident.mean(), -100)
        return ForCausalLMLoss(logits, labels, vocab_size, **kwargs)

    model.loss_function = loss
    return model


@pytest.mark.parametrize("make", [with_own_forward, with_own_loss_function])
def test_a_model_whose_loss_is_not_of_transformers_alone_runs_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    assert_apart(tmp_path, caplog, "isn't transformers' own sum", make=make)


def test_a_loss_that_is_averaged_by_the_trainer_runs_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def script(trainer: Trainer) -> None:
        trainer.model_accepts_loss_kwargs = False
        trainer.train()

    assert_apart(tmp_path, caplog, "num_items_in_batch", script=script)


def test_a_trainer_with_a_loss_of_its_own_runs_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Doubled(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    assert_apart(tmp_path, caplog, "Doubled has a compute_loss of its own", trainer_class=Doubled)


class Damped(TrainerCallback):
    """Halves what the micro-batches so far have added to the head's gradient."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.lm_head.weight.grad.mul_(0.5)


@pytest.mark.parametrize("settings", [TOGETHER, {"gpu_memory_gib": 1.0}], ids=["true", "auto"])
def test_micro_batches_with_a_callback_between_them_run_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: Record
) -> None:
    def script(trainer: Trainer) -> None:
        trainer.add_callback(Damped())
        trainer.train()

    assert_apart(tmp_path, caplog, "a callback of the script's is called between them", script=script, settings=settings)


def test_a_model_with_statistics_of_the_batch_runs_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> nn.Module:
        model = tiny_llama()
        model.statistics = nn.BatchNorm1d(3)  # not used: its presence is enough
        return model

    def without_unused(model: nn.Module) -> Record:
        model.statistics.requires_grad_(False)
        return {}

    assert_apart(tmp_path, caplog, "statistics computes statistics", make=make, options=without_unused)


def tiny_bloom() -> nn.Module:
    """Hands its layers position biases of (samples * heads, 1, tokens)."""
    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0))


def test_a_batch_that_layers_cannot_cut_for_certain_runs_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # SGD: the key biases' true gradient is zero, see tiny_llama().
    arguments: Record = {"make": tiny_bloom, "optim": "sgd", "learning_rate": 0.1}
    assert_apart(tmp_path, caplog, "can't be cut into its micro-batches", **arguments)


def test_first_micro_batches_without_labels_are_joined_as_others(tmp_path: Path) -> None:
    unlabelled = [{**record, "labels": torch.full((16,), -100)} for record in examples(2)]
    stock, seen = run(
        tmp_path / "stock",
        dataset=[*unlabelled, *examples(10)],
        gradient_accumulation_steps=3,
        train_sampling_strategy="sequential",
        max_steps=4,
    )
    joined, watch = run(
        tmp_path / "joined",
        TOGETHER,
        dataset=[*unlabelled, *examples(10)],
        gradient_accumulation_steps=3,
        train_sampling_strategy="sequential",
        max_steps=4,
    )
    assert_same_run(joined, stock)
    assert watch.samples == [6, 6, 6, 6]
    assert watch.events == seen.events


# ---------------------------------------------------------------- what is joined


def rows(count: int, **changes: Any) -> Record:
    return {"input_ids": torch.zeros(count, 4, dtype=torch.long), "labels": torch.zeros(count, 4), **changes}


def test_samples_are_joined_in_order() -> None:
    first, second = examples(2), examples(1, seed=6)
    stacked = [{key: torch.stack([r[key] for r in records]) for key in records[0]} for records in (first, second)]
    joined, samples = join(stacked)
    assert samples == 2
    assert torch.equal(joined["input_ids"], torch.stack([r["input_ids"] for r in [*first, *second]]))


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        ([rows(2), rows(2, extra=torch.zeros(2))], "different things"),
        ([rows(2), rows(2, labels=torch.zeros(2, 5))], "labels differs in shape"),
        ([rows(2), rows(2, labels=torch.zeros(2, 4).long())], "labels differs in dtype"),
        ([rows(1, cu_seq_lens_q=torch.tensor([0, 2, 4]))] * 2, "one row for each sample"),
        ([rows(1, max_length_q=4)] * 2, "max_length_q isn't a tensor"),
        ([rows(3, position_ids=torch.zeros(3, 3, 4))] * 2, "position_ids isn't a tensor with one row"),
        ([(1, 2), (3, 4)], "tuple"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_joined_for_certain_is_named(batches: list[Any], reason: str) -> None:
    with pytest.raises(CannotJoinError, match=reason):
        join(batches)


# ---------------------------------------------------------------- the plan's choice


def decided(folder: Path, monkeypatch: pytest.MonkeyPatch, *, link: float, budget_gib: float, **changes: Any) -> Watch:
    """A run under ``auto`` on a machine whose link is ``link`` times as fast as it computes."""
    speed = Machine(device_flops=1e12, device_bytes=1e12, h2d_bytes=link, d2h_bytes=link, host_step_parameters=link)
    monkeypatch.setattr(device_plan, "measured_machine", lambda *args: speed)
    settings = {"gpu_memory_gib": budget_gib, "device_layers": 0, **changes}
    return run(folder, settings, gradient_accumulation_steps=3)[1]


def test_auto_joins_where_the_link_bounds_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(tmp_path, monkeypatch, link=1e6, budget_gib=1.0).samples == [6] * 6


def test_auto_leaves_micro_batches_apart_where_nothing_is_gained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = decided(tmp_path, monkeypatch, link=1e18, budget_gib=1.0)
    assert watch.samples == [2] * 18


def test_auto_leaves_micro_batches_apart_that_do_not_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(tmp_path, monkeypatch, link=1e6, budget_gib=1e-4).samples == [2] * 18


def test_auto_leaves_micro_batches_apart_without_a_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_apart(tmp_path, caplog, "no GPU memory to plan with", settings={})


Profiled = list[tuple[int, int | None]]


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Profiled:
    """(samples, micro_batch_size) of each step that the plan looks at."""
    seen: Profiled = []
    original = device_plan.profile_step

    def step_profile(model: nn.Module, runtime: Any, inputs: Any, device: torch.device) -> Any:
        seen.append((len(inputs["input_ids"]), runtime.batch_cut.asked))
        return original(model, runtime, inputs, device)

    monkeypatch.setattr(device_plan, "profile_step", step_profile)
    return seen


@pytest.mark.parametrize("link", [1e6, 1e18], ids=["together", "apart"])
def test_a_step_is_profiled_once_in_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiled: Profiled, link: float
) -> None:
    decided(tmp_path, monkeypatch, link=link, budget_gib=1.0)
    assert profiled == [(6, 2), (2, None)]


def test_a_run_that_is_not_joined_any_more_is_planned_anew(tmp_path: Path, profiled: Profiled) -> None:
    arguments: Record = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 3, "max_steps": 2}
    dataset = [*examples(6, length=16), *examples(2, length=16), *examples(4, length=12)]
    run(tmp_path, {**TOGETHER, "gpu_memory_gib": 1.0, "device_layers": 0}, dataset=dataset, **arguments)
    assert profiled == [(6, 2), (2, None)]


def test_the_next_training_decides_anew(tmp_path: Path) -> None:
    def twice(trainer: Trainer) -> None:
        trainer.train_dataset = ragged_examples(12)
        trainer.data_collator, collator = Padding("right"), trainer.data_collator
        trainer.train()
        trainer.train_dataset, trainer.data_collator = examples(), collator
        trainer.train()

    _, watch = run(tmp_path, TOGETHER, gradient_accumulation_steps=3, max_steps=2, script=twice)
    assert watch.samples[:6] == [2] * 6
    assert set(watch.samples[6:]) == {6}


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 2, 3])
def test_resume_in_and_between_epochs_is_bit_equal(tmp_path: Path, step: int) -> None:
    def train(folder: Path, resume: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
        with plugin(**TOGETHER):
            model = tiny_llama(attention_dropout=0.3)
            arguments = make_arguments(
                folder,
                bf16=True,
                gradient_accumulation_steps=2,
                save_strategy="no" if resume else "steps",
                save_steps=1,
                max_steps=5,
            )
            trainer = Trainer(model, arguments, train_dataset=examples(10))  # steps of 2, 2 and 1 micro-batches an epoch
            trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}") if resume else None)
            engine = engine_of(model)
            assert engine is not None
            assert engine.runtime.piece_sums.buffer is not None, "nothing was joined"
            engine.drain()
            return masters_of(engine, model), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    masters, losses = train(tmp_path / "whole", resume=False)
    resumed, resumed_losses = train(tmp_path / "resumed", resume=True)
    assert resumed_losses == losses
    for name, master in masters.items():
        assert torch.equal(resumed[name], master), name


def resumed_beside_whole(folder: Path, settings: Record | None, **arguments: Any) -> tuple[TrainerRun, TrainerRun]:
    """A run with a checkpoint after step 3, and one that is resumed from there."""
    arguments = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, **arguments}
    whole, _ = run(folder, settings, **arguments)
    resume = lambda trainer: trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))  # noqa: E731
    resumed, _ = run(folder, settings, script=resume, **arguments)
    return whole, resumed


def test_a_training_that_gave_joining_up_is_resumed_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Dropout draws other numbers for a joined batch. The second step's micro-batches are of two lengths.
    dataset = [*examples(6, length=16), *examples(2, length=12), *examples(16, length=16)]
    with caplog.at_level(logging.WARNING, logger="megatrain_accelerate"):
        whole, resumed = resumed_beside_whole(
            tmp_path,
            TOGETHER,
            make=lambda: tiny_llama(attention_dropout=0.3),
            dataset=dataset,
            gradient_accumulation_steps=2,
            train_sampling_strategy="sequential",
        )
    lines = [record for record in caplog.records if "one by one" in record.getMessage()]
    assert len(lines) == 2, "once in each run"
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_a_training_that_joined_is_resumed_so_whatever_the_machine_measures_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen_by(link: float, **arguments: Any) -> list[int]:
        speed = Machine(device_flops=1e12, device_bytes=1e12, h2d_bytes=link, d2h_bytes=link, host_step_parameters=link)
        monkeypatch.setattr(device_plan, "measured_machine", lambda *args: speed)
        settings = {"gpu_memory_gib": 1.0, "device_layers": 0}
        arguments = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 3, **arguments}
        return run(tmp_path, settings, **arguments)[1].samples

    def resume(trainer: Trainer) -> None:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    assert seen_by(1e6) == [6] * 6
    assert seen_by(1e18, script=resume) == [6] * 3
    assert seen_by(1e18) == [2] * 18


def test_a_checkpoint_from_without_the_plugin_is_resumed(tmp_path: Path) -> None:
    arguments: Record = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 3}
    whole, _ = run(tmp_path, None, **arguments)
    resume = lambda trainer: trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # noqa: E731
    resumed, watch = run(tmp_path, TOGETHER, script=resume, **arguments)
    assert watch.samples == [6] * 3
    assert all(torch.allclose(resumed.weights[n], w, rtol=0.0, atol=TOLERANCE) for n, w in whole.weights.items())


def test_a_checkpoint_with_the_decision_is_resumed_without_the_plugin(tmp_path: Path) -> None:
    arguments: Record = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 3}
    whole, _ = run(tmp_path, TOGETHER, **arguments)
    resume = lambda trainer: trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # noqa: E731
    resumed, _ = run(tmp_path, None, script=resume, **arguments)
    assert all(torch.allclose(resumed.weights[n], w, rtol=0.0, atol=TOLERANCE) for n, w in whole.weights.items())
