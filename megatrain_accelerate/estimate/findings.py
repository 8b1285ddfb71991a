"""What is found out about a model on a machine: a step on each batch, the largest batch, the longest context."""

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
"""Sequences of a batch that are tried: a limit is at least so many then."""
MOST_TOKENS = (1 << 22) - 1024
"""Of one sequence that is tried. Without data, positions of more tokens have no values (plan/fake_runs.py), and the
model makes a mask of all pairs of them, which it leaves out otherwise."""
_TOLERANCE = 0.02
"""Share of a limit by which it may be too small."""
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
"""Models of published shapes, from small to large, of which is said what a machine can train where no model is named: the
configuration's ``model_type``, its sizes, and what else is not its default."""


class Limits(NamedTuple):
    """What fits at most, where every layer streams and is recomputed, and inputs leave as far as the host has room: sequences
    of the estimate's length, tokens of a single one, and the step on that."""

    batch: int
    context: int
    longest: Forecast | None


class Estimate:
    """What is found out about one model on one machine; what takes a run without data when it is first asked for. Bytes;
    speeds a second. The configuration is loaded by the model's name, unless ``settings`` are that. A MegatrainError for a
    wrong argument, no configuration, or a model that can't stream or run; the message says what to do."""

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
        """The longest sequence that the configuration names."""
        asked: int | None = options.length
        self.table = table = position_table(model, self.stated_positions)
        """Of positions, which no sequence can be longer than; None if the model has none."""
        if table is not None and asked is not None and asked > table.positions:
            raise ConfigError(
                f"--length {asked} is more than the model's {table.positions:,} positions ({table.name}); lower it"
            )
        self.length = asked or min(USUAL_LENGTH, table.positions if table is not None else USUAL_LENGTH)
        """Tokens of each sequence in the rows."""
        self.batches: list[int] = options.batch or []
        """That were asked for; without any the rows go up to the largest."""
        self._has_limits: bool = not options.no_limits
        self._forecast = functools.cache(self.forecaster.forecast)

    def rows(self) -> Iterator[Forecast]:
        """The steps on each batch. The first doesn't wait for the limits."""
        yield self._forecast(self.batches[0] if self.batches else 1, self.length)
        for batch in (self.batches or _batches(self.limits.batch if self.limits else 1))[1:]:
            yield self._forecast(batch, self.length)

    @functools.cached_property
    def least_gpu_bytes(self) -> int:
        """GPU memory of one sequence where it takes the least."""
        return self.forecaster.least_gpu_bytes(1, self.length)

    @functools.cached_property
    def limits(self) -> Limits | None:
        """None if they weren't asked for."""
        return find_limits(self.forecaster, self.machine.gpu_bytes, self.length, self.table) if self._has_limits else None

    @property
    def fits(self) -> bool:
        """Whether the model trains at all: its states fit the host memory, and one sequence the GPU."""
        return self.missing_host_bytes <= 0 and self.least_gpu_bytes <= self.machine.gpu_bytes

    @property
    def missing_host_bytes(self) -> int:
        return self.forecaster.host_store_bytes - self.forecaster.host_bytes


def find_limits(forecaster: Forecaster, gpu_bytes: int, length: int, table: PositionTable | None) -> Limits:
    """The most sequences of ``length`` tokens, and the most tokens of a single one, with which a step fits ``gpu_bytes``."""
    if forecaster.host_store_bytes > forecaster.host_bytes:
        return Limits(0, 0, None)  # without room for its states the model has no largest batch
    most_tokens = MOST_TOKENS if table is None else min(MOST_TOKENS, table.positions)

    def needs_of_one(tokens: int) -> int:
        try:
            with replaced(_TORCH_LOG, "disabled", tokens > length):  # it prints a traceback of what fails
                return forecaster.least_gpu_bytes(1, tokens)
        except ConfigError:  # the model's own code may take no longer sequences
            if tokens <= length:
                raise
            return sys.maxsize

    batch = largest(lambda count: forecaster.least_gpu_bytes(count, length), gpu_bytes, MOST_BATCH, _TOLERANCE)
    context = longest_context(needs_of_one, gpu_bytes, most_tokens)
    return Limits(batch, context, forecaster.forecast(1, context) if context else None)


def longest_context(needs: Callable[[int], int], budget: int, most: int) -> int:
    """Tokens of the longest sequence that fits: a multiple of 1,024, or of 64, or ``most``."""
    for step in (step for step in (1024, 64, 1) if step <= most):
        steps = largest(lambda count, step=step: needs(count * step), budget, most // step, _TOLERANCE)  # type: ignore[misc]
        if steps == most // step and needs(most) <= budget:
            return most
        if steps:
            return steps * step
    return 0


def largest(needs: Callable[[int], int], budget: int, most: int, tolerance: float = 0.0) -> int:
    """The largest number from 1 to ``most`` whose need is within the budget; 0 if that of 1 isn't. Needs grow with the
    number, nearly in proportion for most models, so that the next to be tried lies on a line through the last two: each is a
    run without data. The result may be too small by the share ``tolerance``."""
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
        # Where needs bend, a line between the two ends moves one of them by little.
        bisects = not bisects and high <= most and 2 * (high - low) > before
        tried = (low + high) // 2 if bisects else min(max(guess, low + 1), high - 1)
    return low


def _batches(most: int) -> Sequence[int]:
    """Powers of two up to the largest batch, and that itself."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1.5 * (1 << exponent) < most]
    step = max(1, -(-len(powers) // _MOST_ROWS))
    return [*powers[::step], most]


def ladder_estimates(options: argparse.Namespace) -> Iterator[Estimate]:
    """An estimate of each model that transformers knows, without its limits, when it is made; raises as :class:`Estimate`."""
    for name, (kind, sizes, others) in _LADDER.items():
        if kind not in CONFIG_MAPPING:
            continue
        asked = copy.copy(options)
        asked.model, asked.batch, asked.no_limits = name, options.batch or [1, 4, 16], True
        if options.gpus * options.machines > 1:  # which fetch experts whole
            asked.set = [("expert_parts", 1), *options.set]
        shape = dict(zip(_SIZES, sizes, strict=bool(sizes)))
        yield Estimate(asked, CONFIG_MAPPING[kind](**shape, max_position_embeddings=131072, **others))
