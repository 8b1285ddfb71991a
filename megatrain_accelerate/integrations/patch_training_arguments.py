"""The patches of ``transformers.training_args``: the two fields, and what they bring about."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatrain_accelerate.activation import activate_from_arguments, read_settings
from megatrain_accelerate.errors import ConfigError, UnsupportedError
from megatrain_accelerate.integrations import import_hook
from megatrain_accelerate.integrations.wrapping import add_fields, find_class, is_active, wrap_always, wrap_property

_FLAG_HELP = "Train with megatrain_accelerate: weights and optimizer states live in host memory and stream through one GPU."
_CONFIG_HELP = (
    "Settings of megatrain_accelerate: a JSON object, or the path of a yaml or JSON file with the keys of megatrain_config."
)


def patch_fields(module: ModuleType) -> None:
    """Adds ``megatrain`` and ``megatrain_config``."""
    add_fields(
        find_class(module, "TrainingArguments"),
        {
            "megatrain": (bool, dataclasses.field(default=False, compare=False, metadata={"help": _FLAG_HELP})),
            # In this order: HfArgumentParser takes the second member of a union as the type of the argument.
            "megatrain_config": (
                dict | str | None,
                dataclasses.field(default=None, compare=False, metadata={"help": _CONFIG_HELP}),
            ),
        },
    )


def patch_post_init(module: ModuleType) -> None:
    """Activates, and checks the arguments of an active process."""

    def post_init(original: Callable[..., None], arguments: Any, *args: Any, **kwargs: Any) -> None:
        _activate(arguments)
        active = is_active()
        if active:
            _refuse_unsupported(arguments)
        original(arguments, *args, **kwargs)
        if active:
            # Before somebody reads the private attribute.
            _ = arguments.n_gpu

    wrap_always(find_class(module, "TrainingArguments"), "__post_init__", post_init)


def _activate(arguments: Any) -> None:
    given = getattr(arguments, "megatrain_config", None)
    if not getattr(arguments, "megatrain", False):
        if given is None:
            return
        if not is_active():
            raise ConfigError(
                "megatrain_config is given but megatrain is off; add --megatrain (megatrain=True), or remove megatrain_config"
            )
    settings = read_settings(given)
    if isinstance(given, str) and given.lstrip().startswith("{"):
        arguments.megatrain_config = dict(settings)
    import_hook.ensure_ready()
    activate_from_arguments(settings)


def _refuse_unsupported(arguments: Any) -> None:
    for name in ("fp16", "fp16_full_eval"):
        if getattr(arguments, name, False):
            raise UnsupportedError(
                f"{name}=True can't be used with megatrain: fp16 needs loss scaling, which the fused deferred step doesn't "
                f"do, and weights are kept as bf16 halves of fp32 masters. Use {name.replace('fp16', 'bf16')}=True"
            )
    for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        if getattr(arguments, name, None):
            raise UnsupportedError(
                f"{name}={getattr(arguments, name)!r} can't be used with megatrain: it compiles the model as a whole, and "
                "megatrain swaps weights under the model. Leave it out: megatrain_config.compile_layers compiles the layers "
                "(on a GPU by default)"
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
    parallelism = getattr(arguments, "parallelism_config", None)
    if parallelism is not None and parallelism.total_size > 1:
        raise UnsupportedError(
            f"parallelism_config asks for {parallelism.total_size} processes, and megatrain trains on one GPU in one "
            "process so far; remove it"
        )
    for name in ("deepspeed", "fsdp"):
        if getattr(arguments, name, None) or os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() in ("1", "true"):
            raise ConfigError(
                f"{name} and megatrain both decide where weights and optimizer states live; remove one of the two "
                f"({name} comes from the training arguments or from the accelerate config)"
            )


def patch_to_dict(module: ModuleType) -> None:
    """Leaves the two fields out where they aren't used."""

    def to_dict(original: Callable[..., dict[str, Any]], arguments: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        result = original(arguments, *args, **kwargs)
        if not result.get("megatrain") and result.get("megatrain_config") is None:
            result.pop("megatrain", None)
            result.pop("megatrain_config", None)
        return result

    wrap_always(find_class(module, "TrainingArguments"), "to_dict", to_dict)


def patch_n_gpu(module: ModuleType) -> None:
    """At most one GPU a process."""

    def n_gpu(original: Callable[..., int], arguments: Any) -> int:
        if original(arguments) > 1:
            arguments._n_gpu = 1
        return original(arguments)

    wrap_property(find_class(module, "TrainingArguments"), "n_gpu", n_gpu)


def patch_place_model_on_device(module: ModuleType) -> None:
    """The Trainer places no model."""
    wrap_property(find_class(module, "TrainingArguments"), "place_model_on_device", lambda original, arguments: False)
