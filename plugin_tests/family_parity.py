"""Training of one family with and without the plugin, and the comparison of all that came of it.

The reference knows nothing of the plugin: bf16 weights and gradients, fp32 masters in tensors of their own,
``torch.optim.AdamW`` on them and ``torch.nn.utils.clip_grad_norm_``. The other side is a stock Accelerate loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from engine_runs import masters_of
from family_registry import Family
from plain_torch import ieee_sqrt, round_to_bf16
from torch import nn
from trainer_runs import plugin

from megatrain_accelerate.engine import engine_of

STEPS = 5
MAX_NORM = 0.5
"""Below the norms of all families here, so that clipping is at work."""

STREAMED: dict[str, Any] = {"device_layers": 0, "kept_layers": 0, "offloaded_layers": 0}
"""Everything streams and is recomputed, though models as small as these would fit whole."""


@dataclasses.dataclass
class Outcome:
    """What five steps left: a value or a tensor for each name, None for a parameter that got no gradient."""

    losses: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Loss and, where the model has one, auxiliary loss of each forward; the norm of each step."""

    gradients: dict[str, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    """Of each step, before clipping, in the parameter's compute dtype."""

    masters: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """fp32, by the parameter's name; of frozen ones the weight that computes."""

    def note_losses(self, place: str, output: Any) -> None:
        """Notes the losses of one forward."""
        for key in ("loss", "aux_loss"):
            value = getattr(output, key, None)
            if isinstance(value, torch.Tensor):
                self.losses[f"{key} {place}"] = value.detach().cpu().float()


def optimizer_for(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW with a rate at which five steps are seen in bf16."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=False)


def _keeps_fp32(model: nn.Module, name: str) -> bool:
    parts: set[str] = set()
    for module in model.modules():
        parts.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    return any(part in name.split(".") for part in parts)


def _step(optimizer: torch.optim.Optimizer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", ieee_sqrt)
        optimizer.step()


def train_plainly(family: Family, dtype: torch.dtype, accumulation: int = 1, device: str = "cpu") -> Outcome:
    """Five steps in plain PyTorch; under autocast for bf16, as a stock loop with mixed precision runs a model. Masters and
    AdamW are on the CPU. No key-value cache is made: keys that it copied lie otherwise in memory, and attention may round
    otherwise for them."""
    model = family.build()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    masters = {name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for name, p in model.named_parameters()}
    rounded = {name for name in masters if dtype == torch.bfloat16 and not _keeps_fp32(model, name)}
    for name, parameter in model.named_parameters():
        if name in rounded:
            # A trained weight is rounded as the split master's upper half; a frozen one, which has no master, as a cast does.
            parameter.data = round_to_bf16(parameter.data) if name in trained else parameter.data.to(torch.bfloat16)
        else:
            parameter.data = parameter.data.clone()
    model.to(device)
    optimizer = optimizer_for([masters[name] for name in trained])
    outcome = Outcome()
    torch.manual_seed(3)
    for step in range(STEPS):
        for micro in range(accumulation):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                output = model(**batch_of(family, step * accumulation + micro, device))
            outcome.note_losses(f"{step}.{micro}", output)
            (output.loss / accumulation).backward()
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    total, fresh = masters[name].grad, parameter.grad.cpu().float()
                    masters[name].grad = fresh if total is None else total + fresh
                    parameter.grad = None
        for name in trained:
            gradient = masters[name].grad
            seen = gradient if gradient is None else gradient.clone()
            outcome.gradients[f"{name} {step}"] = round_to_bf16(seen) if seen is not None and name in rounded else seen
        norm = nn.utils.clip_grad_norm_([masters[name] for name in trained], MAX_NORM, foreach=False)
        outcome.losses[f"norm {step}"] = norm.clone()
        _step(optimizer)
        optimizer.zero_grad()
        for name, parameter in trained.items():
            master = masters[name].detach()
            parameter.data.copy_(round_to_bf16(master) if name in rounded else master)
    for name, parameter in model.named_parameters():
        # A frozen weight has no master: what computes is all there is.
        outcome.masters[name] = (masters[name] if name in trained else parameter).detach().cpu().float()
    return outcome


def batch_of(family: Family, seed: int, device: str) -> dict[str, torch.Tensor]:
    """The family's batch, on the device."""
    return {name: tensor.to(device) for name, tensor in family.batch(seed).items()}


def train_streamed(family: Family, dtype: torch.dtype, accumulation: int = 1, device: str = "cpu", **settings: Any) -> Outcome:
    """The same five steps in an Accelerate loop with the plugin; ``settings`` are the plugin's."""
    precision = "bf16" if dtype == torch.bfloat16 else "no"
    with plugin(**{**STREAMED, **family.settings, **settings}):
        accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, gradient_accumulation_steps=accumulation)
        model = family.build()
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        model, optimizer = accelerator.prepare(model, optimizer_for(list(trained.values())))
        engine = engine_of(accelerator.unwrap_model(model))
        assert engine is not None
        outcome = Outcome()
        torch.manual_seed(3)
        for step in range(STEPS):
            for micro in range(accumulation):
                with accelerator.accumulate(model):
                    output = model(**batch_of(family, step * accumulation + micro, device))
                    outcome.note_losses(f"{step}.{micro}", output)
                    accelerator.backward(output.loss)
                    del output
                    if not accelerator.sync_gradients:
                        continue
                    for name, parameter in trained.items():
                        gradient = parameter.grad
                        outcome.gradients[f"{name} {step}"] = (
                            None if gradient is None else gradient.detach().to("cpu", copy=True)
                        )
                    norm = accelerator.clip_grad_norm_(trained.values(), MAX_NORM)
                    outcome.losses[f"norm {step}"] = torch.as_tensor(norm).to("cpu", copy=True)
                    optimizer.step()
                    optimizer.zero_grad()
        engine.drain()
        masters = masters_of(engine, accelerator.unwrap_model(model))
        outcome.masters = {name: master.cpu() for name, master in masters.items()}
        engine.close()
    return outcome


def differences(ours: Outcome, theirs: Outcome) -> Iterator[tuple[str, str, float]]:
    """For each value that differs its kind, its name and by how much, relative to its tensor's largest element (1 at least);
    infinite where one side has no gradient, or something isn't a number.
    """
    for field in dataclasses.fields(Outcome):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        assert mine.keys() == other.keys(), f"{field.name}: {sorted(mine.keys() ^ other.keys())}"
        for name, expected in other.items():
            found = mine[name]
            if found is None or expected is None:
                if found is not expected:
                    yield field.name, name, float("inf")
                continue
            assert found.dtype == expected.dtype, f"{name}: {found.dtype} instead of {expected.dtype}"
            if not torch.equal(found, expected):
                scale = max(1.0, float(expected.abs().max()))
                difference = float((found.float() - expected.float()).abs().max()) / scale
                yield field.name, name, difference if difference == difference else float("inf")


def assert_parity(ours: Outcome, theirs: Outcome, tolerance: float) -> None:
    """Everything equals, bit for bit for a tolerance of 0; see :class:`family_registry.Family`."""
    found = list(differences(ours, theirs))
    beyond = sorted((entry for entry in found if entry[2] > tolerance or tolerance == 0.0), key=lambda entry: -entry[2])
    assert not beyond, f"{len(beyond)} values differ, the worst of them: {beyond[:8]}"
