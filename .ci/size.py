"""Prints how large the package is: all lines, and those of code (no comments, docstrings and blank lines)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megatrain_accelerate"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_CPP_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def python_code_lines(source: str) -> int:
    """Lines on which a token of code stands; a text that is a statement of its own is a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def cpp_code_lines(source: str) -> int:
    """Lines that aren't blank without their comments."""
    return sum(bool(line.strip()) for line in _CPP_COMMENTS.sub("", source).splitlines())


def main() -> None:
    """Prints the two sums."""
    lines = code = 0
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            source = path.read_text(encoding="utf-8")
            lines += len(source.splitlines())
            code += python_code_lines(source) if path.suffix == ".py" else cpp_code_lines(source)
    print(f"megatrain_accelerate: {lines:,} lines, {code:,} of them code")


if __name__ == "__main__":
    main()
