"""A model without weights, from its configuration alone."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from megatrain_accelerate.errors import ConfigError, UnsupportedError


def load_config(name: str, trust_remote_code: bool = False) -> Any:
    """The configuration of a model; nothing else is read or fetched, but for the code that comes with it if that is trusted.

    Args:
        name: an id of the Hub, a local folder, or a ``config.json``.
        trust_remote_code: see ``transformers.AutoConfig``.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # each configuration checks its entries in its own way
        where = "can't be read" if os.path.exists(name) else "is neither a local folder nor a file, nor found on the Hub"
        raise ConfigError(f"the configuration of {name!r} {where}: {error}") from error


def model_on_meta(config: Any, trust_remote_code: bool = False) -> nn.Module:
    """The model of a configuration in bf16 on the meta device: the class that it names, else a causal language model.

    Raises:
        UnsupportedError: transformers knows no such model, or its code can't make one of the configuration.
    """
    import transformers

    # Without data and with a cache in sight, newer ones leave out the mask of all tokens by all, as they do with data.
    for part in (config, getattr(config, "text_config", None)):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = True
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the published weights; what trains is bf16
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    kinds = [kind for kind in named if kind is not None]
    with torch.device("meta"):
        try:
            model = kinds[0](config) if kinds else _causal(config, trust_remote_code)
        except Exception as error:  # each model's code fails in its own way
            raise UnsupportedError(
                f"no model can be made of a {type(config).__name__} ({type(error).__name__}: {error}); mend the configuration "
                "where the message names an entry of it, install what the message asks for, or name another model"
            ) from error
    return model.to(torch.bfloat16)


def _causal(config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
