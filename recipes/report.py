"""Reads a finished run's `trainer_state.json`: prints memory, traffic, speed and loss, draws `loss.png` beside it."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

PREFIX = "megatrain/"
# Section -> log key without its prefix -> (label, unit).
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Host memory": {
        "host_weights_gib": ("weights", "GiB"),
        "host_residuals_gib": ("residuals of the fp32 masters", "GiB"),
        "host_moments_gib": ("AdamW moments", "GiB"),
        "host_gradients_gib": ("gradients", "GiB"),
        "host_gradient_residuals_gib": ("residuals of the gradients' fp32 sums", "GiB"),
        "host_activations_gib": ("activations", "GiB"),
        "host_peak_gib": ("peak of the process", "GiB"),
    },
    "Device memory": {
        "gpu_slots_gib": ("weight slots", "GiB"),
        "gpu_gradient_slots_gib": ("gradient slots", "GiB"),
        "gpu_resident_gib": ("weights outside the layers", "GiB"),
        "gpu_held_layers_gib": ("weights of layers that are held", "GiB"),
        "gpu_layers_gib": ("weights of layers that live there", "GiB"),
        "gpu_states_gib": ("masters and moments that live there", "GiB"),
        "gpu_gradient_sums_gib": ("sums of a batch's pieces", "GiB"),
        "gpu_gradient_residuals_gib": ("residuals of the gradients' fp32 sums", "GiB"),
        "gpu_predicted_gib": ("peak, as the plan expects it", "GiB"),
        "gpu_peak_gib": ("peak", "GiB"),
    },
    "The plan": {
        "kept_layers": ("layers that aren't recomputed", ""),
        "offloaded_layers": ("layers whose activations leave", ""),
        "device_layers": ("layers that live on the GPU", ""),
        "plan_seconds": ("time that it took", "s"),
    },
    "Traffic and waits of a step": {
        "h2d_gb": ("host to GPU", "GB"),
        "d2h_gb": ("GPU to host", "GB"),
        "copy_wait_ms": ("waited for copies", "ms"),
        "optimizer_wait_ms": ("waited for the optimizer", "ms"),
        "gpu_wait_h2d_ms": ("GPU stood still for weights", "ms"),
        "gpu_wait_d2h_ms": ("GPU stood still for a gradient slot", "ms"),
        "gpu_wait_backward_end_ms": ("GPU stood still at backward's end", "ms"),
        "gpu_wait_host_step_ms": ("GPU stood still for the host step", "ms"),
        "h2d_gb_per_second": ("host to GPU, while copying", "GB/s"),
        "d2h_gb_per_second": ("GPU to host, while copying", "GB/s"),
        "host_step_gparams_per_second": ("host step, while computing", "G parameters/s"),
    },
    "What a step is bound by": {
        "bound_share_compute": ("compute and launching", ""),
        "bound_share_h2d": ("weights' copies", ""),
        "bound_share_d2h": ("gradients' copies", ""),
        "bound_share_host_step": ("host step", ""),
    },
    "Speed": {
        "tokens_per_second": ("tokens a second", ""),
        "predicted_step_ms": ("a step, as the plan expects it", "ms"),
        "tflops": ("TFLOPS (6 x parameters x tokens)", ""),
        "skipped_steps": ("steps skipped, gradient not finite", ""),
    },
}
FALL = 0.95
"""`--require-falling-loss`: the last quarter's mean loss must be below this share of the first quarter's."""


def last_values(log: list[dict[str, Any]]) -> dict[str, float]:
    """The newest value of each key that the plugin logged, without the prefix."""
    return {key.removeprefix(PREFIX): value for entry in log for key, value in entry.items() if key.startswith(PREFIX)}


def format_value(value: float, unit: str) -> str:
    """Number and unit in columns; less than 1 GiB in MiB."""
    if unit == "GiB" and value < 1:
        value, unit = value * 1024, "MiB"
    return f"{value:>14,.3f} {unit}".rstrip()


def format_table(values: dict[str, float]) -> str:
    """The plugin's figures as text, by section; keys that this script doesn't know come last, by name."""
    if not values:
        return "No megatrain figures in the log: the plugin was off."
    known = {key for rows in SECTIONS.values() for key in rows}
    sections = {**SECTIONS, "Other": {key: (key, "") for key in sorted(values) if key not in known}}
    lines = []
    for title, rows in sections.items():
        present = {key: row for key, row in rows.items() if key in values}
        if present:
            lines += ["", title]
            lines += [f"  {label:<36}{format_value(values[key], unit)}" for key, (label, unit) in present.items()]
    return "\n".join(lines[1:])


def series(log: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one logged quantity."""
    points = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in points], [value for _, value in points]


def draw_losses(log: list[dict[str, Any]], path: Path) -> None:
    """Training and evaluation loss over the steps, as a picture."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "evaluation", "o--")):
        steps, losses = series(log, key)
        if losses:
            axes.plot(steps, losses, style, label=label)
    axes.set(xlabel="optimizer step", ylabel="cross-entropy (nats a token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def loss_complaint(losses: list[float], eval_losses: list[float]) -> str | None:
    """Why these losses don't count as falling; None if they do."""
    if len(losses) < 2:
        return f"only {len(losses)} training losses were logged"
    if not all(map(math.isfinite, losses + eval_losses)):
        return "a loss is not finite"
    quarter = max(1, len(losses) // 4)
    first, last = sum(losses[:quarter]) / quarter, sum(losses[-quarter:]) / quarter
    if last >= FALL * first:
        return f"the training loss went from {first:.3f} to {last:.3f} (means of the first and the last quarter)"
    if len(eval_losses) >= 2 and eval_losses[-1] >= eval_losses[0]:
        return f"the evaluation loss went from {eval_losses[0]:.3f} to {eval_losses[-1]:.3f}"
    return None


def main() -> None:
    """Prints the tables and the picture's path; exits with 1 where `--require-falling-loss` isn't met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--require-falling-loss", action="store_true", help="fail unless the loss fell")
    args = parser.parse_args()

    state_path = args.output_dir / "trainer_state.json"
    if not state_path.is_file():
        parser.error(f"{state_path} does not exist; each checkpoint has one, and trainer.save_state() writes one here")
    log = json.loads(state_path.read_text())["log_history"]
    _, losses = series(log, "loss")
    _, eval_losses = series(log, "eval_loss")

    print(format_table(last_values(log)))
    for name, values in (("training", losses), ("evaluation", eval_losses)):
        if values:
            print(f"\nLoss, {name}: {values[0]:.3f} at first, {values[-1]:.3f} at last", end="")
    picture = args.output_dir / "loss.png"
    draw_losses(log, picture)
    print(f"\nLoss curve: {picture}")
    complaint = loss_complaint(losses, eval_losses)
    if args.require_falling_loss and complaint is not None:
        raise SystemExit(f"the loss did not fall: {complaint}")


if __name__ == "__main__":
    main()
