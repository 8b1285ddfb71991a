"""Writes ``docs/settings.md`` from the fields of the settings and their docstrings.

Run it as ``PYTHONPATH=. python docs/make_settings.py``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path

from megatrain_accelerate import config
from megatrain_accelerate.config import MegatrainConfig, PlacementSettings

DOCS = Path(__file__).parent
PAGE = DOCS / "settings.md"

MORE = {
    "accumulation_dtype": "gradient_accumulation.md",
    "host_gradients": "host_memory.md",
    "host_memory_gib": "host_memory.md",
    "placement": "#placement",
    "expert_parts": "experts.md",
    "token_tile": "long_context.md",
    "join_micro_batches": "gradient_accumulation.md",
    "evaluation_weights": "evaluation_and_generation.md",
    "kept_attention": "long_context.md",
    "offloaded_inputs": "long_context.md",
}
"""Where there is more to read of a setting."""

TEXT = """\
# Settings

None has to be set: the plan finds out what suits the model, the batch and the machine.

Settings are the keys of `megatrain_config` in the yaml, and the arguments of `megatrain_accelerate.enable()`:

```yaml
megatrain_config:
  host_memory_gib: 200
  placement:
    slots: 3
```

Beside the flag `--megatrain` of the launcher or the script, `--megatrain_config` takes a JSON object or the path of a yaml
file:

```console
$ accelerate launch --megatrain --megatrain_config '{{"host_memory_gib": 200, "placement": {{"slots": 3}}}}' train.py
```

An unknown key is an error that names the nearest one. A setting that can't be honoured is an error, unless its text says
otherwise.

<!-- Written by docs/make_settings.py from megatrain_accelerate/config.py; a test checks that it is current. -->

{settings}

## Placement

The plan chooses where everything is. If you know better, fix a part of it, and the plan chooses the rest. On command lines
the keys are written with a dot: `megatrain estimate MODEL --set placement.slots=3`. A number of `device_layers` or
`kept_attention` above the number of layers means all.

{placement}
"""


def docstrings(kind: type) -> dict[str, str]:
    """The string below each field of a class, in one line of Markdown."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(below, ast.Expr), f"{field.target.id} has no docstring"
            assert isinstance(below.value, ast.Constant)
            found[field.target.id] = as_markdown(str(below.value.value))
    return found


def as_markdown(docstring: str) -> str:
    """A docstring as one line of a table's cell, with links to the pages that it names."""
    text = " ".join(docstring.split()).replace("|", "\\|")
    text = re.sub(r"``docs/(\w+\.md)``", lambda page: link(page[1]), text)
    return text.replace("``", "`")


def link(target: str) -> str:
    """A link to a page, with its title, or to a heading of this one."""
    if target.startswith("#"):
        return f"[below]({target})"
    title = (DOCS / target).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    return f"[{title}]({target})"


def table(kind: type, prefix: str = "") -> str:
    """A row for each setting: its key, its default as in a yaml, and what it does."""
    texts = docstrings(kind)
    rows = ["| key | default | what it does |", "| --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        is_section = isinstance(field.default, PlacementSettings)
        default = field.default if isinstance(field.default, str) else json.dumps({} if is_section else field.default)
        more = f" See {link(MORE[field.name])}." if field.name in MORE else ""
        rows.append(f"| `{prefix}{field.name}` | `{default}` | {texts[field.name]}{more} |")
    return "\n".join(rows)


def page() -> str:
    """The whole page."""
    return TEXT.format(settings=table(MegatrainConfig), placement=table(PlacementSettings, "placement."))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} says what {config.__file__} says")
