"""What is left out of code in the form in which Inductor writes it, run here with kernels of torch on memory full of NaN."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain_accelerate.streaming.generated_code import ShortCode, UnknownCodeError, without_outputs

KERNELS: dict[str, Callable[..., Any]] = {
    "triton_poi_gate": lambda gate, up, out, count: out.copy_(gate * up),
    "triton_poi_add": lambda total, other, count: total.add_(other),
    "triton_poi_scale": lambda given, out, count: out.copy_(2 * given),
    "triton_poi_add_and_square": lambda total, other, square, count: (total.add_(other), square.copy_(other * other)),
    "their_kernel": lambda X, Y, n: Y.copy_(X + 1),
}
PARAMETERS = {
    "triton_poi_gate": "in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr",
    "triton_poi_add": "in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr",
    "triton_poi_scale": "in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr",
    "triton_poi_add_and_square": "in_out_ptr0, in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr",
    "their_kernel": "X, Y, n",
}
INPUTS = {"x": (4, 3), "gate_weight": (5, 3), "up_weight": (5, 3), "down_weight": (3, 5)}

MLP = """
    gate = empty_strided_cuda((4, 5), (5, 1), torch.float32)
    extern_kernels.mm(x, reinterpret_tensor(gate_weight, (3, 5), (1, 3), 0), out=gate)
    up = empty_strided_cuda((4, 5), (5, 1), torch.float32)
    extern_kernels.mm(x, reinterpret_tensor(up_weight, (3, 5), (1, 3), 0), out=up)
    product = empty_strided_cuda((4, 5), (5, 1), torch.float32)
    stream0 = get_raw_stream(0)
    triton_poi_gate.run(gate, up, product, 20, stream=stream0)
    assert_size_stride(down_weight, (3, 5), (5, 1))
    down = empty_strided_cuda((4, 3), (3, 1), torch.float32)
    extern_kernels.mm(product, reinterpret_tensor(down_weight, (5, 3), (1, 5), 0), out=down)
"""
LAST_PRODUCT = ("extern_kernels.mm", "triton_poi_add")


def source_of(body: str, returned: str) -> str:
    """A module as Inductor writes it: kernels' definitions, and a function that calls them."""
    kernels = "".join(
        f"{name} = async_compile.triton('{name}', '''\ndef {name}({parameters}):\n    pass\n''', device_str='cuda')\n"
        for name, parameters in PARAMETERS.items()
    )
    lines = textwrap.indent(textwrap.dedent(body).strip(), 12 * " ")
    return (
        f"{kernels}\n"
        "class Runner:\n"
        "    def call(self, args):\n"
        f"        {', '.join(INPUTS)} = args\n"
        "        args.clear()\n"
        "        with torch.cuda._DeviceGuard(0):\n"
        "            torch.cuda.set_device(0)\n"
        f"{lines}\n"
        f"        return ({returned}, )\n"
    )


def reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return tensor.as_strided(size, stride, offset)


class _NoDevice:
    """In the place of ``torch`` in a module: its operations, and a device that can be set."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    class cuda:
        @staticmethod
        def set_device(index: int) -> None:
            assert index == 0

        class _DeviceGuard:
            def __init__(self, index: int) -> None:
                assert index == 0

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                pass


def module_namespace() -> dict[str, Any]:
    def run_of(kernel: Callable[..., Any]) -> SimpleNamespace:
        return SimpleNamespace(run=lambda *arguments, stream: kernel(*arguments))

    return {
        "torch": _NoDevice(),
        "empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype).fill_(float("nan")),
        "reinterpret_tensor": reinterpreted,
        "assert_size_stride": lambda tensor, size, stride: None,
        "copy_if_misaligned": lambda tensor: tensor,
        "get_raw_stream": lambda index: index,
        "extern_kernels": SimpleNamespace(mm=lambda a, b, *, out: torch.mm(a, b, out=out)),
        **{name: run_of(kernel) for name, kernel in KERNELS.items()},
    }


def run_whole(source: str, inputs: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    module = ast.parse(source)
    body = [node for node in module.body if isinstance(node, ast.ClassDef)]
    namespace = module_namespace()
    exec(compile(ast.Module(list(body), []), "whole", "exec"), namespace)
    returned: tuple[Any, ...] = namespace["Runner"]().call(list(inputs.values()))
    return returned


def random_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in INPUTS.items()}


def assert_saved_alike(body: str, returned: str, unread: int = 1) -> ShortCode:
    """All that is returned behind the first ``unread`` is the same to the bit, and so are the inputs afterwards."""
    source = source_of(body, returned)
    count = returned.count(",") + 1
    code = without_outputs(source, count, range(unread))
    whole_inputs, short_inputs = random_inputs(), random_inputs()
    torch.manual_seed(3)
    whole = run_whole(source, whole_inputs)
    draws = torch.rand(1)
    torch.manual_seed(3)
    short = code.function(module_namespace())(None, list(short_inputs.values()))
    assert torch.equal(torch.rand(1), draws), "random numbers are drawn alike"
    assert not any(tensor.isnan().any() for tensor in whole)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(short[unread:], whole[unread:], strict=True))
    assert all(torch.equal(tensor, whole_inputs[name]) for name, tensor in short_inputs.items())
    for ours, theirs in zip(short[:unread], whole[:unread], strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    return code


def test_the_last_product_and_the_addition_are_left_out() -> None:
    code = assert_saved_alike(MLP + "    triton_poi_add.run(down, x, 12, stream=stream0)", "down, x, gate, up, product")
    assert code.left_out == LAST_PRODUCT


def test_what_only_the_last_product_reads_goes_along_with_it() -> None:
    code = assert_saved_alike(MLP + "    triton_poi_add.run(down, x, 12, stream=stream0)", "down, x, gate, up")
    assert code.left_out == ("triton_poi_gate", *LAST_PRODUCT)


def test_a_product_whose_result_is_saved_stays() -> None:
    body = (
        MLP
        + """
    output = empty_strided_cuda((4, 3), (3, 1), torch.float32)
    triton_poi_scale.run(down, output, 12, stream=stream0)
    """
    )
    assert assert_saved_alike(body, "output, x, gate, up, down").left_out == ("triton_poi_scale",)


def test_a_kernel_that_writes_something_saved_besides_the_output_stays_with_what_it_reads() -> None:
    body = (
        MLP
        + """
    square = empty_strided_cuda((4, 3), (3, 1), torch.float32)
    triton_poi_add_and_square.run(down, x, square, 12, stream=stream0)
    """
    )
    assert assert_saved_alike(body, "down, x, gate, up, square").left_out == ()


def test_memory_that_is_used_again_before_and_after_changes_nothing() -> None:
    body = (
        MLP
        + """
    output = reinterpret_tensor(down, (2, 6), (6, 1), 0); del down  # reuse
    triton_poi_add.run(output, reinterpret_tensor(x, (2, 6), (6, 1), 0), 12, stream=stream0)
    late = product; del product  # reuse
    triton_poi_scale.run(gate, late, 20, stream=stream0)
    """
    )
    assert assert_saved_alike(body, "output, x, gate, up, late").left_out == LAST_PRODUCT


def test_an_output_in_memory_that_a_saved_result_takes_later_is_computed() -> None:
    """By two names that share memory more is kept than must be, never less."""
    body = (
        MLP
        + """
    last = empty_strided_cuda((4, 3), (3, 1), torch.float32)
    triton_poi_scale.run(down, last, 12, stream=stream0)
    late = reinterpret_tensor(down, (4, 3), (3, 1), 0); del down  # reuse
    triton_poi_scale.run(x, late, 12, stream=stream0)
    """
    )
    assert assert_saved_alike(body, "last, x, gate, up, late").left_out == ("triton_poi_scale",)


def test_parts_of_one_buffer_are_one() -> None:
    body = (
        MLP
        + """
    both = empty_strided_cuda((8, 3), (3, 1), torch.float32)
    upper = reinterpret_tensor(both, (4, 3), (3, 1), 0)  # alias
    lower = reinterpret_tensor(both, (4, 3), (3, 1), 12)  # alias
    triton_poi_scale.run(x, upper, 12, stream=stream0)
    triton_poi_scale.run(down, lower, 12, stream=stream0)
    del upper
    del lower
    """
    )
    assert assert_saved_alike(body, "down, x, gate, up, both").left_out == ()


def test_sizes_that_are_not_known_before_tie_nothing_together() -> None:
    body = f"s0 = x.size()[0]\n{textwrap.dedent(MLP.replace('(4,', '(s0,'))}" + textwrap.dedent("""
    output = reinterpret_tensor(down, (s0, 3), (3, 1), 0); del down  # reuse
    x = copy_if_misaligned(x)
    triton_poi_add_xnumel = 3*s0
    triton_poi_add.run(output, x, triton_poi_add_xnumel, stream=stream0)
    """)
    assert assert_saved_alike(body, "output, x, gate, up, product").left_out == LAST_PRODUCT


def test_random_numbers_are_drawn_all_the_same() -> None:
    body = (
        MLP
        + """
    dropped = torch.ops.aten.native_dropout.default(down, 0.5, True)
    output = dropped[0]
    assert_size_stride(output, (4, 3), (3, 1))
    del dropped
    triton_poi_add.run(output, x, 12, stream=stream0)
    """
    )
    assert assert_saved_alike(body, "output, x, gate, up").left_out == ("triton_poi_add",)


def test_operations_of_torch_that_draw_nothing_are_left_out_with_checks_of_their_results() -> None:
    body = (
        MLP
        + """
    s0 = x.size()[0]
    sorted_ = torch.ops.aten.sort.default(down)
    values = sorted_[0]
    assert_size_stride(values, (s0, 3), (3, 1))
    del sorted_
    output = empty_strided_cuda((s0, 3), (3, 1), torch.float32)
    triton_poi_scale.run(values, output, 12, stream=stream0)
    del values
    """
    )
    code = assert_saved_alike(body, "output, x, gate, up, product")
    assert code.left_out == ("extern_kernels.mm", "torch.ops.aten.sort.default", "triton_poi_scale")


def test_a_kernel_whose_arguments_are_unknown_stays_with_what_it_reads() -> None:
    body = (
        MLP
        + """
    output = empty_strided_cuda((4, 3), (3, 1), torch.float32)
    their_kernel.run(down, output, 12, stream=stream0)
    """
    )
    assert assert_saved_alike(body, "output, x, gate, up").left_out == ()


def test_inputs_that_are_written_to_are_written_to() -> None:
    code = assert_saved_alike(MLP + "    triton_poi_add.run(x, down, 12, stream=stream0)", "down, gate, up")
    assert code.left_out == ()


def test_outputs_in_several_places_are_left_out_together() -> None:
    body = (
        MLP
        + """
    twice = empty_strided_cuda((4, 3), (3, 1), torch.float32)
    triton_poi_scale.run(down, twice, 12, stream=stream0)
    """
    )
    assert assert_saved_alike(body, "down, twice, x, gate, up, product", 2).left_out == (
        "extern_kernels.mm",
        "triton_poi_scale",
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def run(args):\n    return (args, )", "0 functions are named 'call'"),
        ("def call(args):\n    return args[0]", "doesn't end by returning a tuple"),
        ("def call(args):\n    x, = args\n    return (x, x)", "returns 2 values, and the graph has 3"),
        ("def call(args):\n    return (late, )\n    late = 1", "doesn't end by returning a tuple"),
        ("def call(args):\n    x, = args\n    del x\n    x.add_(1)\n    return (x, 1, 2)", "which is gone"),
    ],
)
def test_code_of_another_form_is_refused(source: str, reason: str) -> None:
    with pytest.raises(UnknownCodeError, match=reason):
        without_outputs(source, 3, {0})
