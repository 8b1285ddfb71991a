"""Inductor's code of a graph, less the kernels that only some of its outputs need.

Inductor (torch/_inductor/codegen/wrapper.py) writes a Python function that calls kernels one after the other: buffers are
allocated, kernels write to them, names are deleted, a tuple is returned. That text is cut here, as a compiler removes dead
code, and not the graph before it is compiled: what stays are the very same kernels on the same operands, so that what they
compute is the same to the bit.

Which buffers a call reads and which it writes is known of a few kinds of calls. Any other call stays, with all that it
mentions. Buffers that share memory count as one.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import re
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

_FUNCTION = "call"
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""Of ``extern_kernels``: they write to ``out`` and nowhere else."""
_READ_IN_TRITON = re.compile(r"in_ptr\d+|ks\d+|[xyzr]\d*_?numel")
_WRITTEN_IN_TRITON = re.compile(r"(in_)?out_ptr\d+")


class UnknownCodeError(Exception):
    """The code isn't of the form that can be cut."""


@dataclasses.dataclass(frozen=True)
class ShortCode:
    """The function without some kernels. What isn't computed is returned all the same: memory of its shape, never written."""

    left_out: tuple[str, ...]
    """Names of the kernels."""
    _tree: ast.FunctionDef

    def function(self, module: dict[str, Any]) -> types.FunctionType:
        """The function, with the kernels of the module whose names these are."""
        made: dict[str, Any] = {}
        body = ast.fix_missing_locations(ast.Module([self._tree], []))
        exec(compile(body, "<megatrain: a layer's recompute>", "exec"), module, made)
        function: types.FunctionType = made[_FUNCTION]
        return function


def without_outputs(source: str, outputs: int, unread: Collection[int]) -> ShortCode:
    """Leaves out what is computed for outputs that nobody reads.

    Args:
        source: of the module that Inductor wrote.
        outputs: how many the function returns.
        unread: places of those among them that nobody reads. All others, and the function's inputs, are as they would be.

    Raises:
        UnknownCodeError: with the reason.
    """
    module = ast.parse(source)
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == _FUNCTION]
    if len(functions) != 1:
        raise UnknownCodeError(f"{len(functions)} functions are named {_FUNCTION!r}")
    reader = _Reader(functions[0], _Kernels(module))
    steps = reader.steps
    if not steps or not isinstance(steps[-1].node, ast.Return) or not isinstance(steps[-1].node.value, ast.Tuple):
        raise UnknownCodeError("it doesn't end by returning a tuple")
    returned = steps[-1].node.value.elts
    if len(returned) != outputs:
        raise UnknownCodeError(f"it returns {len(returned)} values, and the graph has {outputs}")
    read = (reader.locals_in(value) for place, value in enumerate(returned) if place not in unread)
    wanted = reader.parameters.union(*read)
    kept = _needed(steps, reader.memory, wanted)
    left_out = tuple(step.kernel for step in steps if step.kernel and id(step.node) not in kept)
    return ShortCode(left_out, _Rewriter(kept, _still_defined(steps, kept, reader.parameters)).visit(functions[0]))


class _Sort(enum.Enum):
    PLACE = enum.auto()
    """Names memory, new or another's, and computes nothing."""
    KERNEL = enum.auto()
    """Reads and writes what is known, and does nothing else."""
    CHECK = enum.auto()
    DELETE = enum.auto()
    OTHER = enum.auto()


@dataclasses.dataclass(frozen=True)
class _Step:
    """A statement."""

    node: ast.stmt
    sort: _Sort
    mentions: frozenset[str]
    """Local names that it uses."""
    defines: frozenset[str] = frozenset()
    """Local names that it gives a value."""
    writes: frozenset[str] = frozenset()
    """Names whose memory it writes to. It reads all others that it mentions."""
    kernel: str = ""


class _Memory:
    """Which names share memory: sets that are joined."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def of(self, name: str) -> str:
        while (parent := self._parent.get(name, name)) != name:
            name = parent
        return name

    def all_of(self, names: Iterable[str]) -> set[str]:
        return {self.of(name) for name in names}

    def join(self, names: Iterable[str]) -> None:
        first, *others = [self.of(name) for name in names] or [""]
        self._parent.update(dict.fromkeys((other for other in others if other != first), first))


class _Kernels:
    """What the module's own kernels write to, by the places of their arguments."""

    def __init__(self, module: ast.Module) -> None:
        self._calls = {
            statement.targets[0].id: statement.value
            for statement in module.body
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(statement.value, ast.Call)
        }

    def written_places(self, name: str) -> tuple[bool, ...] | None:
        """For each parameter whether it is written to; None for a kernel of another form."""
        call = self._calls.get(name)
        maker = ast.unparse(call.func) if call is not None else ""
        if call is None or len(call.args) < 2:
            return None
        if maker == "async_compile.cpp_pybinding" and isinstance(call.args[0], ast.List):
            parameters = [ast.literal_eval(kind) for kind in call.args[0].elts]
            return tuple("*" in kind and not kind.startswith("const ") for kind in parameters)
        if maker == "async_compile.triton" and isinstance(call.args[1], ast.Constant):
            head = re.search(rf"^def {re.escape(name)}\((.*?)\):", str(call.args[1].value), re.DOTALL | re.MULTILINE)
            if head is None:
                return None
            parameters = [p.strip() for p in head[1].split(",") if "constexpr" not in p]
            written = tuple(_WRITTEN_IN_TRITON.fullmatch(parameter) is not None for parameter in parameters)
            known = (flag or _READ_IN_TRITON.fullmatch(p) for flag, p in zip(written, parameters, strict=True))
            return written if all(known) else None
        return None


class _Reader:
    """Takes the function apart into steps."""

    def __init__(self, function: ast.FunctionDef, kernels: _Kernels) -> None:
        self._kernels = kernels
        self.memory = _Memory()
        self.parameters = frozenset(argument.arg for argument in function.args.args)
        stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        self._locals = self.parameters | {node.id for node in stored}
        self.steps = [self._read(statement) for statement in _flat(function.body)]

    def locals_in(self, *nodes: ast.AST) -> frozenset[str]:
        found = (child.id for node in nodes for child in ast.walk(node) if isinstance(child, ast.Name))
        return frozenset(name for name in found if name in self._locals)

    def _read(self, node: ast.stmt) -> _Step:
        if isinstance(node, ast.Delete):
            return _Step(node, _Sort.DELETE, self.locals_in(node))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return self._call(node, node.value)
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            return self._assignment(node, node.targets[0], node.value)
        mentions = self.locals_in(node)
        if not isinstance(node, ast.Return):
            self.memory.join(mentions)
        return _Step(node, _Sort.OTHER, mentions, mentions & self._stored_in(node))

    def _stored_in(self, node: ast.AST) -> frozenset[str]:
        names = (child for child in ast.walk(node) if isinstance(child, ast.Name))
        return frozenset(name.id for name in names if isinstance(name.ctx, ast.Store))

    def _assignment(self, node: ast.stmt, target: ast.expr, value: ast.expr) -> _Step:
        defines, mentions = self._stored_in(target), self.locals_in(value)
        step = functools.partial(_Step, node, mentions=mentions, defines=defines)
        if isinstance(value, ast.Call):
            callee = ast.unparse(value.func)
            if re.fullmatch(r"empty_strided_\w+", callee) and isinstance(target, ast.Name):
                return step(_Sort.PLACE)
            schema = _operation(callee)
            if schema is not None:
                draws = torch.Tag.nondeterministic_seeded in schema.tags
                return step(_Sort.OTHER) if draws else step(_Sort.KERNEL, kernel=callee)
            if callee == "reinterpret_tensor" and isinstance(target, ast.Name):
                self.memory.join(defines | self.locals_in(value.args[0]))
                return step(_Sort.PLACE)
            self.memory.join(defines | mentions)
            return step(_Sort.OTHER)
        self.memory.join(defines | mentions)
        return step(_Sort.PLACE if isinstance(target, ast.Name) and _is_a_part(value) else _Sort.OTHER)

    def _call(self, node: ast.stmt, call: ast.Call) -> _Step:
        callee, mentions = ast.unparse(call.func), self.locals_in(call)
        if callee in ("assert_size_stride", "assert_alignment"):
            return _Step(node, _Sort.CHECK, mentions)
        library, _, name = callee.partition(".")
        if library == "extern_kernels" and name in _PRODUCTS:
            writes = self.locals_in(*(keyword.value for keyword in call.keywords if keyword.arg == "out"))
            if writes:
                return _Step(node, _Sort.KERNEL, mentions, writes=writes, kernel=callee)
        elif name in ("", "run"):
            places = self._kernels.written_places(library)
            if places is not None and len(places) == len(call.args):
                written = (argument for argument, flag in zip(call.args, places, strict=True) if flag)
                return _Step(node, _Sort.KERNEL, mentions, writes=self.locals_in(*written), kernel=library)
        return _Step(node, _Sort.OTHER, mentions)


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in order; those under a ``with`` follow one another like all others."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _flat(statement.body)
        else:
            yield statement


def _is_a_part(value: ast.expr) -> bool:
    """A name, or an element of one."""
    while isinstance(value, ast.Subscript):
        value = value.value
    return isinstance(value, ast.Name)


def _operation(callee: str) -> Any:
    """The operation of torch, if its results are new and it writes to nothing; else None."""
    if not callee.startswith("torch.ops."):
        return None
    operation: Any = torch
    for name in callee.split(".")[1:]:
        operation = getattr(operation, name, None)
    if not isinstance(operation, torch._ops.OpOverload):
        return None
    schema = operation._schema
    is_pure = not schema.is_mutable and all(result.alias_info is None for result in schema.returns)
    return operation if is_pure else None


def _needed(steps: Sequence[_Step], memory: _Memory, wanted: Collection[str]) -> set[int]:
    """Statements, by id, that must stay for the wanted names' values; for all other names that are returned, their memory.

    Deletions and checks are left to :func:`_still_defined`.
    """
    kept: set[int] = set()
    names: set[str] = set()
    values: set[str] = memory.all_of(wanted)
    for step in reversed(steps):
        if step.sort in (_Sort.DELETE, _Sort.CHECK):
            continue
        if isinstance(step.node, ast.Return):
            stays = True
        elif step.sort is _Sort.PLACE:
            stays = bool(step.defines & names)
        elif step.sort is _Sort.KERNEL:
            stays = bool(step.defines & names) or bool(memory.all_of(step.defines | step.writes) & values)
        else:
            stays = True
        if stays:
            kept.add(id(step.node))
            names |= step.mentions
            if step.sort is not _Sort.PLACE and not isinstance(step.node, ast.Return):
                values |= memory.all_of(step.mentions)
    return kept


def _still_defined(steps: Sequence[_Step], kept: set[int], parameters: Collection[str]) -> dict[int, set[str]]:
    """For each deletion the names in it that have a value there; for each check those in it, if all of them have one.

    Raises:
        UnknownCodeError: a statement that stays uses a name that has none.
    """
    defined = set(parameters)
    left: dict[int, set[str]] = {}
    for step in steps:
        if step.sort is _Sort.DELETE:
            left[id(step.node)] = set(step.mentions & defined)
            defined -= step.mentions
        elif step.sort is _Sort.CHECK:
            left[id(step.node)] = set(step.mentions) if step.mentions <= defined else set()
        elif id(step.node) in kept:
            if not step.mentions <= defined | step.defines:
                gone = sorted(step.mentions - defined)
                raise UnknownCodeError(f"{ast.unparse(step.node)!r} would use {gone}, which is gone")
            defined |= step.defines
    return left


class _Rewriter(ast.NodeTransformer):
    """Makes the function of the statements that stay."""

    def __init__(self, kept: set[int], defined: dict[int, set[str]]) -> None:
        self._kept, self._defined = kept, defined

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = self._shorten(node.body)
        return node

    def _shorten(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        shorter: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, ast.With):
                statement.body = self._shorten(statement.body) or [ast.Pass()]
                shorter.append(statement)
            elif isinstance(statement, ast.Delete):
                defined = self._defined[id(statement)]
                statement.targets = [t for t in statement.targets if isinstance(t, ast.Name) and t.id in defined]
                shorter += [statement] if statement.targets else []
            elif id(statement) in self._kept or self._defined.get(id(statement)):
                shorter.append(statement)
        return shorter
