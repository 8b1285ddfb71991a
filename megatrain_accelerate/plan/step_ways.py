"""Chooses how the layers of a step run. They run on the whole batch if that fits, else on the largest pieces of it that fit,
compiled as ever. Where even one sequence is too long, they run by tiles of tokens, which aren't compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from megatrain_accelerate.config import MegatrainConfig
from megatrain_accelerate.hooks import replaced
from megatrain_accelerate.layers.runtime import StreamingRuntime
from megatrain_accelerate.layers.token_tiles import AUTO_TILE_TOKENS
from megatrain_accelerate.plan.placement_search import PlacementSearch
from megatrain_accelerate.plan.step_profile import StepProfile

LONG_TOKENS = 65536
"""From this sequence length on, tiles are compared with whole sequences if both fit: a layer with tiles keeps little, so that
fewer layers are recomputed. On shorter sequences a whole layer is faster, since it is compiled."""

_SAMPLES_APART = ("torch", "transformers", "peft", "liger_kernel")
"""Packages whose layers are known to compute each sample of a batch for itself."""


@contextlib.contextmanager
def layers_run(runtime: StreamingRuntime, samples: int | None, token_tile: int) -> Iterator[None]:
    """In the body, layers run on pieces of so many samples (None: as settings ask), by tiles of so many tokens (0: none)."""
    with replaced(runtime.batch_cut, "chosen", samples), replaced(runtime, "token_tile", token_tile):
        yield


class WayChoice:
    """Chooses how the layers of one step on so many ``samples`` run, as far as the settings ``micro_batch_size`` and
    ``token_tile`` leave a choice. The runtime is left as it was. ``step_profile`` profiles the step as the runtime is set to
    run it, and ``search`` makes the search for its placement."""

    def __init__(
        self,
        runtime: StreamingRuntime,
        config: MegatrainConfig,
        samples: int,
        step_profile: Callable[[], StepProfile],
        search: Callable[[StepProfile], PlacementSearch],
    ) -> None:
        self._runtime, self.step_profile, self._search = runtime, step_profile, search
        asked = runtime.batch_cut.asked
        self._samples = samples if asked is None else min(samples, asked)
        self._tile = None if config.token_tile == "auto" else int(config.token_tile)
        self._may_cut = may_cut(runtime, config)

    def best(self) -> StepProfile:
        """The profile of the fastest way that fits. If none fits, that of the one that takes the least memory."""
        whole, fits = self._largest_pieces(self._tile or 0)
        is_short = all(profile.length < LONG_TOKENS for profile in whole.profiles.values())
        if self._tile is not None or (fits and is_short):
            return whole

        def costs(step_profile: StepProfile) -> tuple[bool, float]:
            candidate = self._search(step_profile).best()
            return candidate is None, step_profile.largest_layer_bytes if candidate is None else candidate.time.seconds

        return min(whole, self._largest_pieces(AUTO_TILE_TOKENS)[0], key=costs)

    def measured(
        self, step_profile: StepProfile, measure: Callable[[StepProfile], StepProfile]
    ) -> tuple[StepProfile, StepProfile]:
        """Measures a step in the way of ``step_profile``, or, if it doesn't fit, in the next way that takes less memory: fake
        runs don't see workspaces of kernels (attention's backward allocates several times the hidden states). Returns the
        profile as estimated and as measured. Raises a ``torch.OutOfMemoryError`` if a layer fits in no way."""
        found: tuple[StepProfile, StepProfile] | None = None
        error = torch.OutOfMemoryError()
        for leaner in self._ever_leaner(step_profile):
            try:
                with layers_run(self._runtime, leaner.samples, leaner.token_tile):
                    found = leaner, measure(leaner)
                if self._search(found[1]).something_fits:
                    break
            except torch.OutOfMemoryError as raised:
                error = raised.with_traceback(None)  # the traceback's frames hold tensors
        if found is None:
            raise error
        return found

    def _profiled(self, samples: int | None, tile_tokens: int) -> StepProfile:
        with layers_run(self._runtime, samples, tile_tokens):
            return self.step_profile()

    def _largest_pieces(self, tile_tokens: int) -> tuple[StepProfile, bool]:
        """The whole batch or else the largest pieces that fit, and True. If none fit, the smallest pieces and False."""
        for found in self._whole_and_in_pieces(self._profiled(None, tile_tokens)):
            fits = self._search(found).something_fits
            if fits:
                break
        return found, fits

    def _whole_and_in_pieces(self, step_profile: StepProfile) -> Iterator[StepProfile]:
        """Yields the profile, then those of pieces of half the samples, a quarter and so on, while they take less memory."""
        yield step_profile
        samples = step_profile.samples or self._samples
        while self._may_cut and samples > 1:
            samples = -(-samples // 2)
            try:
                pieces = self._profiled(samples, step_profile.token_tile)
            except Exception:  # the batch can't be cut: whole it was profiled without an error
                return
            if pieces.largest_layer_bytes >= step_profile.largest_layer_bytes:
                return
            step_profile = pieces
            yield pieces

    def _ever_leaner(self, step_profile: StepProfile) -> Iterator[StepProfile]:
        """Yields the profile, then those of other ways, each of which takes less memory than all before."""
        least_bytes = 0
        for leaner in self._whole_and_in_pieces(step_profile):
            least_bytes = leaner.largest_layer_bytes
            yield leaner
        if self._tile is None and not step_profile.token_tile:
            # If tiles save no memory (short sequences, no token-wise parts), whole layers are better: they are compiled.
            for leaner in self._whole_and_in_pieces(self._profiled(None, AUTO_TILE_TOKENS)):
                if leaner.largest_layer_bytes < least_bytes:
                    yield leaner


def may_cut(runtime: StreamingRuntime, config: MegatrainConfig) -> bool:
    """Whether layers may run in pieces that no setting asks for: all must be known to compute each sample by itself. Not where
    experts have a capacity, for which all tokens of a batch compete, nor with experts in parts, fetched for each piece."""
    if config.micro_batch_size is not None or runtime.experts:
        return False
    kinds = {type(module): module for layer in runtime.layers for module in layer.module.modules()}
    known = all(kind.__module__.partition(".")[0] in _SAMPLES_APART for kind in kinds)
    return known and not any(hasattr(module, "expert_capacity") for module in kinds.values())
