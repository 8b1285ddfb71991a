"""A pass of Inductor's scheduler: a kernel of element-wise operations writes its results over those of its inputs that nobody
reads afterwards. Inductor itself does so only with inputs that one operation of the kernel reads (``decide_inplace_update`` in
torch/_inductor/scheduler.py). In the backward of a gated MLP one kernel reads three tensors of the intermediate size, each in
several operations, and makes three more. Without these a recomputed layer's peak is lower by about a third, at equal bits."""

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

    class Overwrite(base):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            for kernel in nodes:
                # A version of torch whose scheduler differs compiles without it, too.
                with contextlib.suppress(AttributeError):
                    if _is_elementwise(kernel):
                        _give_inputs_to_writers(kernel)
            return nodes

        def uuid(self) -> str:
            return "megatrain_accelerate: element-wise kernels overwrite their inputs"

        def __reduce__(self) -> Any:  # part of the key of Inductor's cache
            return str, (self.uuid(),)

    return Overwrite()


def _is_elementwise(kernel: Any) -> bool:
    """Whether these are several operations in one kernel, all of them element-wise."""
    from torch._inductor.scheduler import FusedSchedulerNode

    return type(kernel) is FusedSchedulerNode and not any(
        part.is_reduction() or part.is_template() or part.is_extern() for part in kernel.get_nodes()
    )


def _give_inputs_to_writers(kernel: Any) -> None:
    """Makes one operation the only known user of each input that only this kernel reads, so that its result takes the input's
    place. A kernel reads all that it needs of an element before it writes any of that, if all its operations read the input at
    the same index, which is checked here."""
    parts = {part.get_name(): part for part in kernel.get_nodes()}
    writers = {name for name, part in parts.items() if _leaves(part, parts)}
    for name in sorted({read.name for read in kernel.read_writes.reads} & kernel.scheduler.name_to_buf.keys()):
        buffer = kernel.scheduler.name_to_buf[name]
        indices = {at for part in parts.values() for at in part.read_writes.reads_and_writes() if at.name == name}
        if len(indices) > 1 or any(user.is_weak or user.get_name() not in parts for user in buffer.users):
            continue
        writing = [user for user in buffer.users if user.can_inplace and user.get_name() in writers]
        if len(buffer.users) > 1 and writing:
            buffer.users = writing[:1]
            writers.remove(writing[0].get_name())


def _leaves(part: Any, parts: Mapping[str, Any]) -> bool:
    """Whether a result of the operation leaves the kernel. What only the kernel reads is never written to memory."""
    return any(user.get_name() not in parts for result in part.get_outputs() for user in result.users)
