"""The estimate of a model on a machine: a step on each batch, the largest batch and the longest context."""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.errors import ConfigError
from megatrain_accelerate.estimate import USUAL_LENGTH
from megatrain_accelerate.estimate.forecast import Forecast, Forecaster
from megatrain_accelerate.estimate.machine_description import describe_machine
from megatrain_accelerate.estimate.meta_engine import PositionTable, load_config, model_on_meta, position_table
from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.integrations.accelerate_backend import require_steps_in_backward_possible

_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")

MOST_BATCH = 1 << 14
"""The largest batch that is tried. If it fits, the limit is reported as "at least" so many sequences."""
MOST_TOKENS = (1 << 22) - 1024
"""The longest sequence that is tried. In a fake run, positions of more tokens have no values (plan/fake_runs.py), and the
model then makes a mask of all pairs of tokens, which it leaves out otherwise."""
_TOLERANCE = 0.02
"""A limit may be too small by this share."""
_MOST_ROWS = 7

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_LADDER: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "Qwen2.5-0.5B": ("qwen2", (151936, 896, 4864, 24, 14, 2), {"tie_word_embeddings": True}),
    "Qwen2.5-1.5B": ("qwen2", (151936, 1536, 8960, 28, 12, 2), {"tie_word_embeddings": True}),
    "Qwen2.5-3B": ("qwen2", (151936, 2048, 11008, 36, 16, 2), {"tie_word_embeddings": True}),
    "Llama-3.1-8B": ("llama", (128256, 4096, 14336, 32, 32, 8), {}),
    "Qwen2.5-14B": ("qwen2", (152064, 5120, 13824, 48, 40, 8), {}),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        (151936, 2048, 6144, 48, 32, 4),
        {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "Qwen2.5-32B": ("qwen2", (152064, 5120, 27648, 64, 40, 8), {}),
    "Llama-3.1-70B": ("llama", (128256, 8192, 28672, 80, 64, 8), {}),
    "gpt-oss-120b": ("gpt_oss", (), {}),
}
"""Models of published shapes, from small to large, which are estimated if no model is named. Each has the configuration's
``model_type``, its sizes, and other entries that differ from the defaults."""


class Limits(NamedTuple):
    """What fits at most if every layer streams and is recomputed, and inputs are offloaded as far as host memory allows.
    ``batch`` counts sequences of the estimate's length, ``context`` the tokens of a single one, whose step is ``longest``."""

    batch: int
    context: int
    longest: Forecast | None


class Estimate:
    """The estimate of one model on one machine. What needs a fake run is computed when it is first asked for. The model's
    configuration is loaded by its name, unless ``settings`` is that configuration. Raises a MegatrainError for a wrong
    argument, a missing configuration, or a model that can't stream or run. The message says what to do."""

    def __init__(self, options: argparse.Namespace, settings: Any = None) -> None:
        config = MegatrainConfig.from_mapping(dict(options.set))
        if config.step_schedule == "serial":
            raise ConfigError(
                "megatrain_config.step_schedule is 'serial', and the plan's cost model, which the estimate is made by, knows "
                "only steps that hide under forward or backward: leave it out, or take deferred or backward"
            )
        require_steps_in_backward_possible(config, options.accumulation)
        if options.no_limits and not options.batch:
            raise ConfigError("--no-limits needs --batch: without limits it isn't known which batches to look at")
        self.model: str = options.model
        self.machine = describe_machine(options, config)
        settings = settings or load_config(options.model, options.trust_remote_code)
        model = model_on_meta(settings, options.trust_remote_code)
        self.forecaster = Forecaster(model, config, self.machine, options.accumulation)
        self.stated_positions: int | None = getattr(settings.get_text_config(), "max_position_embeddings", None)
        """The longest sequence by the configuration (``max_position_embeddings``)."""
        asked: int | None = options.length
        self.table = table = position_table(model, self.stated_positions)
        """The model's table of positions, which no sequence can be longer than. None if the model has none."""
        if table is not None and asked is not None and asked > table.positions:
            raise ConfigError(
                f"--length {asked} is more than the model's {table.positions:,} positions ({table.name}); lower it"
            )
        self.length = asked or min(USUAL_LENGTH, table.positions if table is not None else USUAL_LENGTH)
        self.batches: list[int] = options.batch or []
        """Batch sizes that were asked for. If there are none, the rows go up to the largest batch."""
        self._has_limits: bool = not options.no_limits
        self._forecast = functools.cache(self.forecaster.forecast)

    def rows(self) -> Iterator[Forecast]:
        """Yields the step on each batch. The first one doesn't wait for the limits."""
        yield self._forecast(self.batches[0] if self.batches else 1, self.length)
        for batch in (self.batches or _batches(self.limits.batch if self.limits else 1))[1:]:
            yield self._forecast(batch, self.length)

    @functools.cached_property
    def least_gpu_bytes(self) -> int:
        """The least GPU memory of a step on one sequence."""
        return self.forecaster.least_gpu_bytes(1, self.length)

    @functools.cached_property
    def limits(self) -> Limits | None:
        """None with ``--no-limits``."""
        return find_limits(self.forecaster, self.machine.gpu_bytes, self.length, self.table) if self._has_limits else None

    @property
    def fits(self) -> bool:
        """Whether the model trains at all: its states fit the host memory, and a step on one sequence fits the GPU."""
        return self.missing_host_bytes <= 0 and self.least_gpu_bytes <= self.machine.gpu_bytes

    @property
    def missing_host_bytes(self) -> int:
        return self.forecaster.host_store_bytes - self.forecaster.host_bytes


def find_limits(forecaster: Forecaster, gpu_bytes: int, length: int, table: PositionTable | None) -> Limits:
    """Finds the most sequences of ``length`` tokens, and the most tokens of one sequence, whose step fits ``gpu_bytes``."""
    if forecaster.host_store_bytes > forecaster.host_bytes:
        return Limits(0, 0, None)  # the states don't fit the host, whatever the batch
    most_tokens = MOST_TOKENS if table is None else min(MOST_TOKENS, table.positions)

    def needs_of_one(tokens: int) -> int:
        try:
            with replaced(_TORCH_LOG, "disabled", tokens > length):  # torch logs a traceback if a fake run fails
                return forecaster.least_gpu_bytes(1, tokens)
        except ConfigError:  # the model's own code may refuse longer sequences
            if tokens <= length:
                raise
            return sys.maxsize

    batch = largest(lambda count: forecaster.least_gpu_bytes(count, length), gpu_bytes, MOST_BATCH, _TOLERANCE)
    context = longest_context(needs_of_one, gpu_bytes, most_tokens)
    return Limits(batch, context, forecaster.forecast(1, context) if context else None)


def longest_context(needs: Callable[[int], int], budget: int, most: int) -> int:
    """Returns the tokens of the longest sequence that fits: ``most``, or a multiple of 1,024, else of 64, else of 1; or 0."""
    for step in (step for step in (1024, 64, 1) if step <= most):
        steps = largest(lambda count, step=step: needs(count * step), budget, most // step, _TOLERANCE)  # type: ignore[misc]
        if steps == most // step and needs(most) <= budget:
            return most
        if steps:
            return steps * step
    return 0


def largest(needs: Callable[[int], int], budget: int, most: int, tolerance: float = 0.0) -> int:
    """Returns the largest number from 1 to ``most`` whose need is within the budget, or 0 if that of 1 isn't. Each need is
    found by a fake run, so few are tried: needs grow nearly in proportion to the number for most models, and the next number
    lies on a line through the last two results. The result may be too small by the share ``tolerance``."""
    low, high, tried, bisects = 0, most + 1, 1, False
    below = above = (0, 0)
    while high - low > (1 if high > most else max(1, int(tolerance * low))):
        before, found = high - low, (tried, needs(tried))
        if found[1] <= budget:
            other, below, low = (above if high <= most else below), found, tried
        else:
            other, above, high = found, found, tried
        slope = (other[1] - below[1]) / (other[0] - below[0])
        guess = low + (int((budget - below[1]) / slope) if slope > 0 else most) + (high > most)
        # Where needs aren't linear, the line between the two ends may move one of them by little.
        bisects = not bisects and high <= most and 2 * (high - low) > before
        tried = (low + high) // 2 if bisects else min(max(guess, low + 1), high - 1)
    return low


def _batches(most: int) -> Sequence[int]:
    """Returns powers of two up to the largest batch, at most ``_MOST_ROWS`` of them, and the largest batch itself."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1.5 * (1 << exponent) < most]
    step = max(1, -(-len(powers) // _MOST_ROWS))
    return [*powers[::step], most]


def ladder_estimates(options: argparse.Namespace) -> Iterator[Estimate]:
    """Yields an estimate without limits of each known model that transformers has. Raises as :class:`Estimate` does."""
    for name, (kind, sizes, others) in _LADDER.items():
        if kind not in CONFIG_MAPPING:
            continue
        asked = copy.copy(options)
        asked.model, asked.batch, asked.no_limits = name, options.batch or [1, 4, 16], True
        if options.gpus * options.machines > 1:  # several GPUs fetch experts whole
            asked.set = [("expert_parts", 1), *options.set]
        shape = dict(zip(_SIZES, sizes, strict=bool(sizes)))
        yield Estimate(asked, CONFIG_MAPPING[kind](**shape, max_position_embeddings=131072, **others))
