"""The plugin's two training arguments, what they switch on, and which other arguments can't be used with it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from megatrain_accelerate.activation import activate, is_switched_off, read_settings
from megatrain_accelerate.errors import ConfigError, UnsupportedError
from megatrain_accelerate.integrations.wrapping import is_active, require_patches

FLAG_HELP = "Train with megatrain_accelerate: weights and optimizer states live in host memory and stream through one GPU."
CONFIG_HELP = "Settings of megatrain_accelerate: a JSON object, or the path of a yaml file with the keys of megatrain_config."
FIELDS = {
    "megatrain": (bool, dataclasses.field(default=False, compare=False, metadata={"help": FLAG_HELP})),
    # In this order: HfArgumentParser takes the second member of a union as the type of the argument.
    "megatrain_config": (dict | str | None, dataclasses.field(default=None, compare=False, metadata={"help": CONFIG_HELP})),
}
"""Fields for ``TrainingArguments``. Its ``__eq__`` exists already and ignores them, as ``compare=False`` has subclasses do."""

_FP16 = "fp16 needs loss scaling, which the fused step doesn't do, and weights are kept as bf16 halves of fp32 masters"
_REFUSED = {
    "fp16": f"{_FP16}. Use bf16=True",
    "fp16_full_eval": f"{_FP16}. Use bf16_full_eval=True",
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
        "it compiles the model as a whole, and megatrain swaps weights under the model. Leave it out: "
        "megatrain_config.compile_layers compiles the layers (on a GPU by default)",
    ),
    "activation_offloading": "it hooks into what autograd saves, and a streamed layer saves its input only. Set "
    "megatrain_config.placement.offloaded_layers (or offloaded_inputs) instead; the plan chooses it by itself where it pays",
}
"""Training arguments, also of TRL, that can't be honoured, and why."""


def require_precision(precision: str) -> None:
    """Raises ``UnsupportedError`` unless mixed precision is bf16 or off."""
    if precision not in ("no", "bf16"):
        raise UnsupportedError(
            f"mixed_precision: {precision} can't be used with megatrain: its gradients need loss scaling, which the deferred "
            "step doesn't do. Use mixed_precision: bf16 (masters and moments are fp32 in any case)"
        )


def require_undivided(parallelism: Any) -> None:
    """Raises ``UnsupportedError`` if Accelerate's ``parallelism_config`` isn't None and asks for several processes."""
    if parallelism is not None and parallelism.total_size > 1:
        raise UnsupportedError(
            f"parallelism_config asks for {parallelism.total_size} processes that divide the model or the sequence, and "
            "megatrain divides data among GPUs only; remove it, and set num_processes"
        )


def post_init(original: Callable[..., None], arguments: Any, *args: Any, **kwargs: Any) -> None:
    """Runs instead of ``__post_init__``, and calls it. Activates the plugin if the arguments ask for it, and checks the other
    arguments if it is active for these."""
    active = _switch_on(arguments)
    original(arguments, *args, **kwargs)
    if active:
        _ = arguments.n_gpu  # has trainer.n_gpu() set ``_n_gpu``, which code may read itself


def check_again(arguments: Any) -> None:
    """Activates and checks as :func:`post_init` does, when a Trainer is made: its arguments may have been made before
    ``enable()``, changed since, or loaded from a file. Activates nothing after ``disable()``."""
    if is_active(arguments):
        _refuse_unsupported(arguments)
    elif not is_switched_off():
        _switch_on(arguments)


def _switch_on(arguments: Any) -> bool:
    """Activates the plugin if the arguments ask for it, and returns whether it is active for them."""
    given = getattr(arguments, "megatrain_config", None)
    asks = bool(getattr(arguments, "megatrain", False))
    if given is not None and not asks and not is_active(arguments):
        raise ConfigError("megatrain_config is given but megatrain is off; add --megatrain (megatrain=True), or leave it out")
    active = asks or is_active(arguments)
    if active:
        _refuse_unsupported(arguments)
    if asks or given is not None:
        settings = read_settings(given)
        if isinstance(given, str) and given.lstrip().startswith("{"):
            arguments.megatrain_config = dict(settings)  # as transformers does for its own fields
        require_patches()
        activate(arguments=settings)
    return active


def _refuse_unsupported(arguments: Any) -> None:
    for name, reason in _REFUSED.items():
        if value := getattr(arguments, name, None):
            raise UnsupportedError(f"{name}={value!r} can't be used with megatrain: {reason}")
    if getattr(arguments, "use_vllm", False) and (mode := getattr(arguments, "vllm_mode", "server")) != "colocate":
        raise UnsupportedError(
            f"vllm_mode={mode!r} can't be used with megatrain: TRL sends weights from the GPU to the server, and those of "
            "streamed layers are on the host. Use vllm_mode='colocate', or leave use_vllm off: the model generates by itself"
        )
    if getattr(arguments, "bf16_full_eval", False) and not getattr(arguments, "bf16", False):
        raise UnsupportedError(
            "bf16_full_eval=True without bf16=True can't be used with megatrain: it would cast the fp32 weights that are "
            "trained to bf16 for good. Use bf16=True, under which evaluation computes in bf16 and the fp32 masters stay"
        )
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    if optimizer in ("lomo", "adalomo") or optimizer.endswith("_layerwise"):
        raise UnsupportedError(
            f"optim={optimizer!r} can't be used with megatrain: it steps inside the hooks of gradients on the GPU, which a "
            "streamed layer's gradients never pass. Use optim='adamw_torch', which needs no GPU memory for its states here"
            + (f", or {optimizer.removesuffix('_layerwise')!r}" if optimizer.endswith("_layerwise") else "")
        )
    require_undivided(getattr(arguments, "parallelism_config", None))
    for name in ("deepspeed", "fsdp"):
        if getattr(arguments, name, None) or os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() in ("1", "true"):
            raise ConfigError(
                f"{name} and megatrain both decide where weights and optimizer states live; remove one of the two "
                f"({name} comes from the training arguments or from the accelerate config)"
            )


def to_dict(original: Callable[..., dict[str, Any]], arguments: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Runs instead of ``to_dict``: leaves out the plugin's fields that aren't set."""
    return {name: value for name, value in original(arguments, *args, **kwargs).items() if value or name not in FIELDS}
