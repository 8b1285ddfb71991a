"""A pass of Inductor's scheduler: results of a fused element-wise kernel overwrite inputs that nobody reads afterwards.

Inductor itself lets a result overwrite an input only if no other operation still needs that input
(``decide_inplace_update`` in torch/_inductor/scheduler.py), and it counts operations of the same kernel. In the backward of a
gated MLP one kernel reads three tensors of the intermediate size, each in several operations, and makes three more. Now these
need no memory of their own, so that the peak of a recomputed layer falls by about a third. Results are equal bit for bit.
Inputs of the whole graph, such as what a kept layer saved, are never overwritten.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any


@functools.cache
def overwriting_pass() -> Any:
    """The pass, for Inductor's setting ``_post_fusion_custom_pass``, or None if this torch has no such setting."""
    import torch._inductor.config
    from torch._inductor import custom_graph_pass

    if not hasattr(torch._inductor.config, "_post_fusion_custom_pass"):
        return None
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)
    # With it Inductor's cache tells versions of this file apart.
    key = custom_graph_pass.get_hash_for_files((__file__,))

    class Overwrite(base):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            for kernel in nodes:
                # With another torch, whose scheduler lacks something, the kernel is compiled without the pass.
                with contextlib.suppress(AttributeError, ImportError, KeyError, TypeError):
                    if _is_fused_elementwise(kernel):
                        _let_results_overwrite_inputs(kernel)
            return nodes

        def uuid(self) -> bytes:
            return key

        def __reduce__(self) -> Any:  # Inductor pickles its settings as a key of its cache, which a local class can't be
            return bytes, (key,)

        def __deepcopy__(self, memo: Any) -> Any:  # for copies of Inductor's settings
            return self

    return Overwrite()


def _is_fused_elementwise(kernel: Any) -> bool:
    """Whether the kernel has several operations, all of them element-wise."""
    from torch._inductor.scheduler import FusedSchedulerNode

    return type(kernel) is FusedSchedulerNode and not any(
        part.is_reduction() or part.is_template() or part.is_extern() for part in kernel.get_nodes()
    )


def _let_results_overwrite_inputs(kernel: Any) -> None:
    """For each input that only this kernel reads, forgets all users but one, so that Inductor lets that one's result overwrite
    the input. This is safe where all operations read the input at the same index: a kernel loads all that it needs of an
    element before it stores anything there."""
    parts = {part.get_name(): part for part in kernel.get_nodes()}
    results = {name: found for name, part in parts.items() if (found := _results_outside(part, parts))}
    shared = []
    for name in sorted({read.name for read in kernel.read_writes.reads} & kernel.scheduler.name_to_buf.keys()):
        buffer = kernel.scheduler.name_to_buf[name]
        indices = {access for part in parts.values() for access in part.read_writes.reads_and_writes() if access.name == name}
        if len(indices) > 1 or any(user.is_weak or user.get_name() not in parts for user in buffer.users):
            continue
        if len(buffer.users) > 1:
            shared.append(buffer)
        elif _may_overwrite(buffer.users[0], buffer, results):
            # Inductor sees to this one, and an operation overwrites one input.
            del results[buffer.users[0].get_name()]
    for buffer in shared:
        if user := next((user for user in buffer.users if _may_overwrite(user, buffer, results)), None):
            buffer.users = [user]
            del results[user.get_name()]


def _results_outside(part: Any, parts: Mapping[str, Any]) -> list[Any]:
    """The results of an operation that leave the kernel. What only the kernel reads is never written to memory."""
    return [result for result in part.get_outputs() if any(user.get_name() not in parts for user in result.users)]


def _may_overwrite(user: Any, buffer: Any, results: Mapping[str, list[Any]]) -> bool:
    """Whether a result of this user is of the buffer's size and dtype."""
    from torch._inductor.codegen.wrapper import can_match_buffer_size

    found = results.get(user.get_name(), ())
    return user.can_inplace and any(can_match_buffer_size(buffer.node, result.node) for result in found)
