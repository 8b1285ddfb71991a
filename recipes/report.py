"""Reads a finished run's `trainer_state.json`: prints memory, traffic, speed and loss, draws `loss.png` beside it.

With `--losses` it compares a run with one of the stock Trainer, step by step, and draws `losses.png`.
"""

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
ON_DEVICE = (
    "gpu_slots_gib",
    "gpu_gradient_slots_gib",
    "gpu_resident_gib",
    "gpu_held_layers_gib",
    "gpu_layers_gib",
    "gpu_states_gib",
    "gpu_gradient_sums_gib",
    "gpu_gradient_residuals_gib",
)
"""Weights, gradients and states that lie on the device; where the CPU plays it, they would."""
PLAIN_BYTES = 16
"""Of a parameter in plain training: weight, gradient and AdamW's two moments, fp32."""
EQUAL = 1e-3
"""`--losses`: they may differ by so much, relatively; less than bf16's accuracy. In fp32 it is rounding, 1e-6."""
DARK, WARM = "#16406b", "#c4761b"
FALL = 0.95
"""`--require-falling-loss`: the last quarter's mean loss must be below this share of the first quarter's."""


def last_values(log: list[dict[str, Any]]) -> dict[str, float]:
    """The newest value of each key that the plugin logged, without the prefix."""
    return {key.removeprefix(PREFIX): value for entry in log for key, value in entry.items() if key.startswith(PREFIX)}


def in_words(gib: float) -> str:
    """A memory; less than 1 GiB in MiB."""
    return f"{gib * 1024:,.1f} MiB" if gib < 1 else f"{gib:,.1f} GiB"


def format_value(value: float, unit: str) -> str:
    """Number and unit in columns; less than 1 GiB in MiB."""
    if unit == "GiB" and value < 1:
        value, unit = value * 1024, "MiB"
    return f"{value:>14,.3f} {unit}".rstrip()


def format_table(values: dict[str, float]) -> str:
    """The plugin's figures as text, by section, without those that are 0; keys that aren't known come last, by name."""
    if not values:
        return "No megatrain figures in the log: the plugin was off."
    known = {key for rows in SECTIONS.values() for key in rows}
    sections = {**SECTIONS, "Other": {key: (key, "") for key in sorted(values) if key not in known}}
    lines = []
    for title, rows in sections.items():
        shown = {label: format_value(values[key], unit) for key, (label, unit) in rows.items() if key in values}
        present = {label: text for label, text in shown.items() if float(text.split()[0].replace(",", ""))}
        if present:
            lines += ["", title]
            lines += [f"  {label:<36}{text}" for label, text in present.items()]
    return "\n".join(lines[1:])


def series(log: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one logged quantity."""
    points = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in points], [value for _, value in points]


def memory_text(values: dict[str, float], parameters: int) -> str:
    """What device memory the training took, and what plain training would take."""
    if peak := values.get("gpu_peak_gib"):
        took = f"GPU memory of this training: {in_words(peak)} at the peak, activations included."
    else:
        share = sum(values.get(key, 0.0) for key in ON_DEVICE)
        took = (
            f"Device memory of this training: {in_words(share)} for weights and gradients, activations not counted. The CPU "
            "played the GPU; on one, so much would lie there."
        )
    return (
        f"{took}\nPlain training: {in_words(PLAIN_BYTES * parameters / 2**30)} for fp32 weights, gradients and AdamW's "
        f"moments ({PLAIN_BYTES} bytes for each of {parameters / 1e6:,.1f} million parameters), activations not counted."
    )


def common_steps(ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """Both runs' losses, by the steps that both logged."""
    of_ours, of_stock = (dict(zip(*series(log, "loss"), strict=True)) for log in (ours, stock))
    return {step: (loss, of_stock[step]) for step, loss in of_ours.items() if step in of_stock}


def comparison_text(losses: dict[int, tuple[float, float]]) -> str:
    """How far apart two runs are. Exits with 1 where that is more than rounding."""
    for step, (ours, stock) in losses.items():
        if not abs(ours - stock) <= EQUAL * stock:
            raise SystemExit(f"the losses are not the stock Trainer's: at step {step} they are {ours:.5g} and {stock:.5g}")
    distance = max(abs(ours - stock) for ours, stock in losses.values())
    return f"largest difference of {len(losses)} losses: {distance:.1g}{'' if distance else ', every bit is the same'}"


def label_end(axes: Any, steps: list[int], values: list[float], text: str, color: str, above: bool) -> None:
    """Writes a line's name beside its end."""
    place = (6, 8 if above else -8)
    axes.annotate(text, (steps[-1], values[-1]), xytext=place, textcoords="offset points", color=color, va="center")


def draw_losses(log: list[dict[str, Any]], path: Path) -> None:
    """Training and evaluation loss over the steps, as a picture."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for key, label, style, color in (("loss", "training", "-", DARK), ("eval_loss", "evaluation", "o--", WARM)):
        steps, losses = series(log, key)
        if losses:
            axes.plot(steps, losses, style, color=color)
            label_end(axes, steps, losses, label, color, above=key == "eval_loss")
    last = max([1, *(entry["step"] for entry in log)])
    axes.set(xlabel="optimizer step", ylabel="cross-entropy (nats a token)", title="Loss", xlim=(0, 1.2 * last))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_comparison(losses: dict[int, tuple[float, float]], title: str, note: str, path: Path) -> None:
    """Two runs' losses over the steps, one drawn on the other."""
    steps = sorted(losses)
    ours, stock = ([losses[step][run] for step in steps] for run in (0, 1))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, stock, color=WARM, linewidth=5, alpha=0.6)
    axes.plot(steps, ours, color=DARK, linewidth=1)
    label_end(axes, steps, stock, "stock Trainer", WARM, above=True)
    label_end(axes, steps, ours, "with megatrain", DARK, above=False)
    axes.set(xlabel="optimizer step", ylabel="cross-entropy (nats a token)", title=title, xlim=(0, 1.2 * steps[-1]))
    axes.text(0.97, 0.93, note, transform=axes.transAxes, ha="right", va="top")
    axes.grid(alpha=0.3)
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


def read_log(folder: Path, parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """What the Trainer logged in a run."""
    state = folder / "trainer_state.json"
    if not state.is_file():
        parser.error(f"{state} does not exist; each checkpoint has one, and trainer.save_state() writes one here")
    log: list[dict[str, Any]] = json.loads(state.read_text())["log_history"]
    return log


def main() -> None:
    """Prints the tables and the picture's path; exits with 1 where the loss didn't fall, or isn't the stock run's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--require-falling-loss", action="store_true", help="fail unless the loss fell")
    parser.add_argument(
        "--losses",
        type=Path,
        nargs=2,
        metavar=("RUN", "STOCK"),
        help="a run and the same without the plugin: compare their losses",
    )
    parser.add_argument("--title", default="Loss", help="of the picture that --losses makes")
    args = parser.parse_args()

    log = read_log(args.output_dir, parser)
    _, losses = series(log, "loss")
    _, eval_losses = series(log, "eval_loss")

    values = last_values(log)
    print(format_table(values))
    for name, of_name in (("training", losses), ("evaluation", eval_losses)):
        if of_name:
            print(f"\nLoss, {name}: {of_name[0]:.3f} at first, {of_name[-1]:.3f} at last", end="")
    picture = args.output_dir / "loss.png"
    draw_losses(log, picture)
    print(f"\nLoss curve: {picture}")
    results = args.output_dir / "train_results.json"
    if values and results.is_file() and "parameters" in (metrics := json.loads(results.read_text())):
        print(f"\n{memory_text(values, metrics['parameters'])}")
    if args.losses is not None:
        both = common_steps(*(read_log(folder, parser) for folder in args.losses))
        if not both:
            parser.error(f"{args.losses[0]} and {args.losses[1]} have no step in common that both logged")
        note = comparison_text(both)
        draw_comparison(both, args.title, note, args.output_dir / "losses.png")
        print(f"Beside the stock Trainer, run with the same seed: {note}")
    complaint = loss_complaint(losses, eval_losses)
    if args.require_falling_loss and complaint is not None:
        raise SystemExit(f"the loss did not fall: {complaint}")


if __name__ == "__main__":
    main()
