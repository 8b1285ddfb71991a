"""An optimizer may hold parameters that don't stream, a head's or a loss's: they train as in plain PyTorch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from loop_runs import Observed, adamw, both, loss_of, slow, train, warmup
from plain_torch import token_batches
from torch import nn
from trainer_runs import TrainerRun, examples, plugin, run_both, run_trainer, tiny_llama
from transformers import Trainer

from megatrain_accelerate.engine import engine_of
from megatrain_accelerate.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("profiled_once")

Head = Callable[[], nn.Module]


def linear() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(32, 5)


def perceptron() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 5))


def joint_loss(model: nn.Module, head: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model(input_ids=ids, labels=ids, output_hidden_states=True)
    return out.loss + head(out.hidden_states[-1]).square().mean()


def all_of(*modules: nn.Module) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]


def one_group(model: nn.Module, head: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(all_of(model, head), lr=1e-3, weight_decay=0.1)


def mixed_groups(model: nn.Module, head: nn.Module) -> torch.optim.Optimizer:
    biases = [parameter for parameter in all_of(model, head) if parameter.dim() == 1]
    others = [parameter for parameter in all_of(model, head) if parameter.dim() > 1]
    return torch.optim.Adam([{"params": others, "weight_decay": 0.1}, {"params": biases, "lr": 4e-3}], lr=1e-3)


def momentum(model: nn.Module, head: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(all_of(model, head), lr=0.05, momentum=0.9)


def state_of_head(optimizer: Any, head: nn.Module) -> Observed:
    entries = [optimizer.state[parameter] for parameter in head.parameters()]
    return [value.clone() for entry in entries for _, value in sorted(entry.items()) if isinstance(value, torch.Tensor)]


def head_of(head: nn.Module) -> Observed:
    return [parameter.detach().clone() for parameter in head.parameters()]


# ---------------------------------------------------------------------------------------- bare loops


@pytest.mark.parametrize("order", ["loose", "model first", "head first", "optimizer first"])
@pytest.mark.parametrize(("make", "head"), [(one_group, perceptron), (mixed_groups, linear), (momentum, linear)])
def test_a_head_beside_the_model_trains_as_in_plain_pytorch(
    make: Callable[[nn.Module, nn.Module], torch.optim.Optimizer], head: Head, order: str
) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, beside = tiny_llama(), head()
        optimizer: Any = make(model, beside)
        if order == "loose":
            model, optimizer = accelerator.prepare(model, optimizer)
        elif order == "model first":
            model, beside, optimizer = accelerator.prepare(model, beside, optimizer)
        elif order == "head first":
            beside, model, optimizer = accelerator.prepare(beside, model, optimizer)
        else:
            optimizer, model, beside = accelerator.prepare(optimizer, model, beside)
        scheduler = accelerator.prepare(warmup(optimizer.optimizer))
        observed: Observed = []
        for ids in token_batches(6):
            with accelerator.accumulate(model, beside):
                loss = joint_loss(model, beside, ids)
                accelerator.backward(loss)
                observed.append(loss.item())
                if accelerator.sync_gradients:
                    observed.append(float(accelerator.clip_grad_norm_(all_of(model, beside), 0.5)))
                    observed += [parameter.grad.clone() for parameter in beside.parameters()]
                slow(model)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return model, [*observed, *head_of(beside), *state_of_head(optimizer, beside)]

    stock = both(script, gradient_accumulation_steps=2)
    assert any(isinstance(norm, float) and norm > 0.5 for norm in stock), "something was clipped"


@pytest.mark.parametrize("schedule", ["backward", "serial"])
def test_a_head_is_stepped_under_every_schedule(schedule: str) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, head = tiny_llama(), linear()
        model, head, optimizer = accelerator.prepare(model, head, one_group(model, head))
        observed: Observed = []
        for ids in token_batches(4):
            loss = joint_loss(model, head, ids)
            accelerator.backward(loss)
            observed.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return model, observed + head_of(head)

    both(script, settings={"step_schedule": schedule})


def test_only_a_head_is_trained_on_a_frozen_model() -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, head = tiny_llama().requires_grad_(False), linear()
        model, head, optimizer = accelerator.prepare(model, head, torch.optim.AdamW(head.parameters(), lr=1e-2))
        observed: Observed = []
        for ids in token_batches(3):
            loss = joint_loss(model, head, ids)
            accelerator.backward(loss)
            observed += [loss.item(), float(accelerator.clip_grad_norm_(head.parameters(), 0.1))]
            optimizer.step()
            optimizer.zero_grad()
        return model, observed + head_of(head)

    both(script)


@pytest.mark.parametrize("make", [one_group, momentum])
def test_a_head_that_joins_the_optimizer_later_trains(
    make: Callable[[nn.Module, nn.Module], torch.optim.Optimizer],
) -> None:
    def script(accelerator: Accelerator) -> tuple[nn.Module, Observed]:
        model, head = tiny_llama(), linear()
        model, optimizer = accelerator.prepare(model, make(model, nn.Identity()))
        observed = train(accelerator, model, optimizer, token_batches(2))
        optimizer.add_param_group({"params": list(head.parameters()), "lr": 0.02})
        for ids in token_batches(2, seed=9):
            accelerator.backward(joint_loss(model, head, ids))
            optimizer.step()
            optimizer.zero_grad()
        twin = pickle.loads(pickle.dumps(copy.deepcopy(optimizer.optimizer)))
        observed += [value.detach().clone() for value in twin.param_groups[1]["params"]]
        return model, observed + head_of(head) + state_of_head(optimizer, head)

    both(script)


@pytest.mark.parametrize("make", [one_group, momentum])
@pytest.mark.parametrize("where", ["model", "head"])
def test_a_step_with_a_gradient_that_is_not_finite_changes_neither_model_nor_head(
    make: Callable[[nn.Module, nn.Module], torch.optim.Optimizer], where: str
) -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        model, head = tiny_llama(), linear()
        model, head, optimizer = accelerator.prepare(model, head, make(model, head))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}, head_of(head)
        accelerator.backward(joint_loss(model, head, token_batches(1)[0]))
        broken = model.model.layers[0].mlp.up_proj.weight if where == "model" else head.weight
        broken.grad[0, 0] = torch.inf
        accelerator.clip_grad_norm_(all_of(model, head), 1.0)
        optimizer.step()
        after = model.state_dict(), head_of(head)
        assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(after[1], before[1], strict=True))


@pytest.mark.parametrize("make", [one_group, momentum])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_resumes_to_the_bit_from_accelerates_saved_state(
    make: Callable[[nn.Module, nn.Module], torch.optim.Optimizer], precision: str, tmp_path: Path
) -> None:
    def run(steps: range, load: bool) -> list[torch.Tensor]:
        with plugin():
            accelerator = Accelerator(cpu=True, mixed_precision=precision)
            model, head = tiny_llama(), linear()
            model, head, optimizer = accelerator.prepare(model, head, make(model, head))
            if load:
                accelerator.load_state(str(tmp_path))
            for step in steps:
                accelerator.backward(joint_loss(model, head, token_batches(4)[step]))
                accelerator.clip_grad_norm_(all_of(model, head), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    accelerator.save_state(str(tmp_path))
            weights = [tensor.clone() for tensor in model.state_dict().values()]
            return [*weights, *head_of(head), *state_of_head(optimizer, head)]

    whole, resumed = run(range(4), load=False), run(range(2, 4), load=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(resumed, whole, strict=True))


# ---------------------------------------------------------------------------------------- the Trainer


class LossWithWeights(nn.Module):
    """A classifier on the model's last hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.classifier = nn.Linear(32, 3)

    def forward(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = model(input_ids=inputs["input_ids"], output_hidden_states=True).hidden_states[-1]
        return nn.functional.cross_entropy(self.classifier(hidden.mean(dim=1)), inputs["labels"][:, 0] % 3)


class TrainerWithLoss(Trainer):
    """Adds the weights of its loss to the optimizer, and to its checkpoints."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own_loss = LossWithWeights()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            super().create_optimizer(*args, **kwargs)
            self.optimizer.add_param_group({"params": list(self.own_loss.parameters()), "lr": 5e-3})
            # The Trainer empties the model's gradients only.
            self.optimizer.register_step_post_hook(lambda *_: self.own_loss.zero_grad())
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> torch.Tensor:
        return self.own_loss(model, inputs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        torch.save(self.own_loss.state_dict(), folder / "loss.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.own_loss.load_state_dict(torch.load(Path(resume_from_checkpoint) / "loss.pt"))


def moments_of_loss(run: TrainerRun) -> Observed:
    return state_of_head(run.trainer.optimizer.optimizer, run.trainer.own_loss)


@pytest.mark.parametrize("changes", [{}, {"max_grad_norm": 0.0}, {"gradient_accumulation_steps": 2}, {"optim": "sgd"}])
def test_a_loss_with_trained_weights_trains_under_the_trainer(changes: dict[str, Any], tmp_path: Path) -> None:
    stock, streamed = run_both(tiny_llama, tmp_path, trainer_class=TrainerWithLoss, max_steps=4, **changes)
    weights = [head_of(run.trainer.own_loss) for run in (streamed, stock)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(moments_of_loss(streamed), moments_of_loss(stock), rtol=1e-4, atol=1e-6)
    assert not torch.equal(weights[0][0], LossWithWeights().classifier.weight)


def test_a_loss_with_trained_weights_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(resumes: bool) -> TrainerRun:
        return run_trainer(
            tiny_llama,
            tmp_path,
            streamed=True,
            trainer_class=TrainerWithLoss,
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            script=lambda trainer: trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumes else None),
            dataset=examples(),
        )

    whole, resumed = run(False), run(True)
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
    ours, theirs = ([*head_of(r.trainer.own_loss), *moments_of_loss(r)] for r in (resumed, whole))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------------------------------- what is still refused


@pytest.mark.parametrize("order", ["models first", "optimizer between", "one after the other", "added"])
def test_one_optimizer_over_two_streamed_models_is_refused(order: str) -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        first, second = tiny_llama(), tiny_llama(num_hidden_layers=2)
        optimizer = torch.optim.AdamW(all_of(first, second) if order != "added" else all_of(first), lr=1e-3)

        def use() -> None:
            if order == "models first":
                accelerator.prepare(first, second, optimizer)
            elif order == "optimizer between":
                accelerator.prepare(first, optimizer, second)
            elif order == "one after the other":
                accelerator.prepare(first, optimizer)
                accelerator.prepare(second)
            else:
                _, _, prepared = accelerator.prepare(first, second, optimizer)
                prepared.add_param_group({"params": all_of(second)})

        with pytest.raises(UnsupportedError, match=r"parameters of another streamed model.*an optimizer of its own"):
            use()
        assert len(optimizer.param_groups) == 1


def test_a_model_without_layers_streams_nothing_when_it_is_alone() -> None:
    with plugin():
        accelerator = Accelerator(cpu=True)
        with pytest.raises(UnsupportedError, match="Linear has no repeated layers"):
            accelerator.prepare(linear(), nn.Embedding(3, 4))
        model = accelerator.prepare(tiny_llama())
        head = accelerator.prepare(linear())
        assert engine_of(model) is not None
        assert engine_of(head) is None
        with pytest.raises(UnsupportedError, match="no repeated layers"):
            accelerator.prepare(model.lm_head)
        accelerator.backward(loss_of(model, token_batches(1)[0]))
        adamw(head)
