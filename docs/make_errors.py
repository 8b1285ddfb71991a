"""Writes ``docs/errors.md`` from the errors that the package raises.

Run it as ``python docs/make_errors.py``.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "megatrain_accelerate"
PAGE = DOCS / "errors.md"

TEXT = """\
# Errors by their text

Every error that the package raises on purpose, by its class and then by its text; what differs from case to case is "...".
Each says what to do. [Troubleshooting](troubleshooting.md) says more of the frequent ones. All are subclasses of
`MegatrainError`, and of the class of Python's own that a script would catch ([Python functions](api.md#errors)).

<!-- Written by docs/make_errors.py from the package; a test checks that it is current. -->

{sections}

## If you see one of these, please report it

They guard the package's own calls, and no script or setting should lead to them.

{internal}

## Notes in the log

Nothing is wrong: the micro-batches of a step aren't joined, and the log says why
([Gradient accumulation](gradient_accumulation.md)).

{notes}
"""

INTERNAL = (
    "AdamArguments.",
    "this machine can't run ... kernels",
    "the host kernels are closed",
    "first_element is",
    "8-bit moments of",
    "... must be ..., got ...",
    "... must be in host memory",
    "... must be contiguous",
    "... has ... elements and",
    "the host optimizer's thread was closed",
)
"""How messages begin that no script or setting should lead to."""
ELSEWHERE = {"optim/host_step.py:begin_step": ("TAKEN_OVER", "ENGINE_CLOSED")}
"""The constants that a function's error says, where its code doesn't show them."""
NOTE = "CannotJoinError"
"""What its message says is logged, and raised no further."""


def error_classes() -> dict[str, str]:
    """The first line of each class's docstring, by its name."""
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: " ".join((ast.get_docstring(node) or "").split()).replace("``", "`") for node in classes}


def literal(node: ast.AST | None) -> set[str]:
    """The texts that an expression is one of; empty if it isn't written out."""
    match node:
        case ast.Constant(value=str(text)):
            return {re.sub(r"\{\w*\}", "...", text)}
        case ast.JoinedStr(values=values):
            return {"".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in values)}
        case ast.IfExp(body=body, orelse=orelse):
            return literal(body) | literal(orelse)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return {f"{begin}{end}" for begin in literal(left) or {"..."} for end in literal(right) or {"..."}}
    return set()


def assigned(scope: ast.AST) -> dict[str, set[str]]:
    """What is assigned in a scope, by name."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] |= literal(node.value)
    return found


def raised() -> Iterator[tuple[str, str, set[str]]]:
    """For each call of an error's class: where it is, the class, and what it says."""
    wanted = {*error_classes(), NOTE}
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    constants: dict[str, set[str]] = {}
    for tree in trees.values():
        constants |= {name: found for name, found in assigned(tree).items() if name.isupper()}
    for path, tree in trees.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        returned = {
            function.name: {text for at in ast.walk(function) if isinstance(at, ast.Return) for text in literal(at.value)}
            for function in functions
        }
        seen = set()
        for function in reversed(functions):  # those within others first
            known = constants | returned | assigned(function)
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in wanted
                    and node not in seen
                ):
                    seen.add(node)
                    place = f"{path.relative_to(PACKAGE).as_posix()}:{function.name}"
                    said = {text for argument in node.args for text in literal(argument) or known.get(_name(argument), ())}
                    said |= {text for name in ELSEWHERE.get(place, ()) for text in constants[name]}
                    yield place, node.func.id, said


def _name(node: ast.expr) -> str:
    """The variable, the text that is formatted, or the function that is called."""
    match node:
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name) | ast.Attribute(attr="format", value=ast.Name(id=name))):
            return name
    return ""


def shown(text: str) -> str:
    """A message as a cell of a table."""
    text = re.sub(r"(\.\.\.)+", "...", " ".join(text.split()))
    return re.sub(r"([|*<])", r"\\\1", text)


def page() -> str:
    """The whole page."""
    by_class: dict[str, set[str]] = defaultdict(set)
    internal: set[str] = set()
    for _, name, found in raised():
        for text in map(shown, found):
            if text.strip(". "):
                (internal if text.startswith(INTERNAL) else by_class[name]).add(text)
    notes = by_class.pop(NOTE)
    sections = [
        f"## {name}\n\n{what}\n\n{listed(by_class[name])}" for name, what in error_classes().items() if name in by_class
    ]
    return TEXT.format(sections="\n\n".join(sections), internal=listed(internal), notes=listed(notes))


def listed(messages: set[str]) -> str:
    """Messages as a list, those that begin alike beside each other."""
    return "\n".join(f"- {text}" for text in sorted(messages, key=lambda text: text.lstrip("-.= `").lower()))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} has what {PACKAGE} raises")
