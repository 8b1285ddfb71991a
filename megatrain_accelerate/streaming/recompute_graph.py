"""What a compiled layer runs when it is recomputed: its forward without what only its outputs need.

Backward reads what forward saved. The layer's outputs, and the product and the addition that make them, are for the layer
above, which has had them. So a recompute runs the forward's own kernels less those (:mod:`.generated_code`); what is
saved is the same to the bit, and nothing is compiled twice.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatrain_accelerate.streaming.generated_code import UnknownCodeError, without_outputs

logger = logging.getLogger(__name__)


class RecomputeGraphs:
    """Compiles graphs with Inductor so that a recompute can leave something out; one object per engine."""

    def __init__(self) -> None:
        self._is_recompute = False
        self.left_out: list[tuple[str, ...]] = []
        """For each graph compiled so far the kernels that its recompute doesn't run, by name."""

    @contextlib.contextmanager
    def entered(self, is_recompute: bool) -> Iterator[None]:
        """What runs in the body is read for its place in autograd's graph alone, if it is a recompute."""
        before, self._is_recompute = self._is_recompute, is_recompute
        try:
            yield
        finally:
            self._is_recompute = before

    def compile(self, graph: Any, inputs: Sequence[Any], config_patches: dict[str, Any]) -> Callable[..., Any]:
        """Dynamo's backend, as ``torch.compile`` has it by default.

        Args:
            graph, inputs: dynamo's.
            config_patches: of Inductor's settings.
        """
        from torch._inductor.compile_fx import compile_fx_inner

        def inner(module: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
            is_training_forward = not options.get("is_backward") and not options.get("is_inference")
            # The module is the compiler's from here on.
            outputs, unread = _outputs_of(module) if is_training_forward else (0, set())
            compiled = compile_fx_inner(module, example_inputs, **options)
            if is_training_forward:
                self._shorten_recompute(compiled, outputs, unread)
            return compiled

        backend: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")
        # What AOTAutograd finds in its cache doesn't pass through here; Inductor's own cache still has the kernels.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            made: Callable[..., Any] = backend(graph, inputs, inner_compile=inner, config_patches=config_patches)
        return made

    def _shorten_recompute(self, compiled: Any, outputs: int, unread: set[int]) -> None:
        """Puts the choice between the two runs in the place of the compiled function."""
        try:
            left_out, short = _short_run(compiled, outputs, unread)
        except Exception as error:  # of another version of torch: its code is written, and kept, in other ways
            logger.debug("megatrain: a compiled layer is recomputed whole (%s: %s)", type(error).__name__, error)
            left_out, short = (), None
        self.left_out.append(left_out)
        if short is None or not left_out:
            return
        whole = compiled.current_callable

        def run(inputs: list[Any]) -> Any:
            return (short if self._is_recompute else whole)(inputs)

        compiled.current_callable = run


def _outputs_of(module: torch.fx.GraphModule) -> tuple[int, set[int]]:
    """How many outputs a forward graph has, and the places of those that are the layer's and can have a gradient."""
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0]
    values = [result.meta.get("val") if isinstance(result, torch.fx.Node) else None for result in results]
    unread = {
        place
        for place in output.meta.get("user_visible_output_idxs", ())
        if isinstance(values[place], torch.Tensor) and values[place].is_floating_point()
    }
    return len(results), unread


def _short_run(compiled: Any, outputs: int, unread: set[int]) -> tuple[tuple[str, ...], Callable[..., Any]]:
    """The kernels that a recompute leaves out, and the function that it runs.

    Raises:
        UnknownCodeError: the compiled graph isn't a Python function.
    """
    from torch._inductor import config
    from torch._inductor.utils import align_inputs_from_check_idxs

    runner = compiled.compiled_fn_runner
    if config.triton.cudagraphs or config.cpp_wrapper or runner is None:
        raise UnknownCodeError("it runs in CUDA graphs, in C++, or without a runner")
    code = without_outputs(compiled.source_code, outputs, unread)
    call = types.MethodType(code.function(type(runner).call.__globals__), runner)
    return code.left_out, align_inputs_from_check_idxs(call, compiled.inputs_to_check, compiled.mutated_input_idxs)
