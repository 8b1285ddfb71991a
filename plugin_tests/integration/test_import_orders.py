"""How the plugin gets into a process: whatever is imported first, whatever is broken, and at no cost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from fresh_process import run_python

import megatrain_accelerate

PACKAGE = Path(megatrain_accelerate.__file__).parent
AUTOLOAD = Path(__import__("_megatrain_autoload").__file__ or "")

# Imports nothing but strings, since an import is what gives the hook an opportunity.
PROBE = """
import sys
from megatrain_accelerate.integrations.patches import PATCHES

def below(owner):
    for cls in owner.__subclasses__() if isinstance(owner, type) else ():
        yield cls
        yield from below(cls)

# In PEFT before 0.18 each kind of adapter has some of the methods of its own.
def stored(owner, name):
    owners = [cls for cls in getattr(owner, "__mro__", (owner,)) if name in vars(cls)][:1]
    owners = owners or [cls for cls in below(owner) if name in vars(cls)]
    found = [vars(cls)[name] for cls in owners]
    return [getattr(one, "fget", None) or getattr(one, "__func__", None) or one for one in found]

def check(statement):
    unpatched = []
    for patch in PATCHES:
        owner = sys.modules.get(patch.module)
        if owner is None:
            continue
        *path, name = patch.target.partition(":")[2].split(".")
        for part in path:
            owner = getattr(owner, part)
        targets = stored(owner, name)
        if not targets or not all(hasattr(one, "_megatrain_patch") for one in targets):
            unpatched.append(patch.target)
    assert not unpatched, f"after {statement!r}: {unpatched}"

def run(*statements):
    for statement in statements:
        exec(statement, {})
        check(statement)
    missing = {patch.module for patch in PATCHES} - set(sys.modules)
    missing = {name for name in missing if not name.startswith(("accelerate.commands", "peft.", "trl."))}
    assert not missing, missing
"""

ACCELERATE = "from accelerate import Accelerator"
ARGUMENTS = "from transformers import TrainingArguments"
PARSER = "from transformers import HfArgumentParser"
TRAINER = "from transformers import Trainer"
MODEL = "from transformers import AutoModelForCausalLM, PreTrainedModel"
SFT_CONFIG = "from trl import SFTConfig"
SFT_TRAINER = "from trl import SFTTrainer"
PEFT = "from peft import LoraConfig, get_peft_model"

ORDERS = {
    "torch": ("import torch", ACCELERATE, ARGUMENTS, TRAINER, PEFT, SFT_TRAINER),
    "accelerate": (ACCELERATE, TRAINER, MODEL),
    "launcher": ("import accelerate.commands.launch", TRAINER),
    "arguments": (ARGUMENTS, PARSER, TRAINER, ACCELERATE),
    "parser, then arguments": (PARSER, ARGUMENTS, TRAINER),
    "trainer": (TRAINER, PEFT, ACCELERATE),
    "model": (MODEL, PEFT, SFT_CONFIG, SFT_TRAINER),
    "trl config": (SFT_CONFIG, TRAINER),
    "trl trainer": (SFT_TRAINER, ACCELERATE),
    "peft": (PEFT, SFT_TRAINER, TRAINER),
    "everything in one line": ("import peft, trl, transformers, accelerate, torch", TRAINER),
}


SIMILAR = tuple(order for order in ORDERS if order not in ("torch", "model"))
"""Orders that differ little from another one."""


@pytest.mark.parametrize(
    "order",
    [pytest.param(order, marks=pytest.mark.long) if order in SIMILAR else order for order in ORDERS if order != "torch"],
)
def test_every_target_is_patched_right_after_its_import(order: str) -> None:
    run_python(f"{PROBE}\nrun(*{ORDERS[order]!r})")


FORKED = """
import gc, os, sys, traceback
gc.freeze()  # a collection in a child would copy all that it shares with this process

for name, code in CASES.items():
    child = os.fork()
    if child == 0:
        try:
            exec(code, {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
"""Runs each of ``CASES`` in a fork of one process, which has imported what they begin with."""


def run_forked(imports: str, cases: dict[str, str], **env: str) -> str:
    """What the cases printed; each must end well."""
    return run_python(f"{imports}\nCASES = {cases!r}\n{FORKED}", **env)


INACTIVE = """
import os
del os.environ["MEGATRAIN_ACTIVE"]
"""

NOTHING_BEHIND = """
import sys
from transformers import Trainer, TrainingArguments
assert not [name for name in sys.modules if name.startswith("megatrain")]
assert not hasattr(TrainingArguments, "megatrain")
assert not [finder for finder in sys.meta_path if "megatrain" in repr(type(finder))]
"""

LATE_ENABLE = """
import dataclasses
from transformers import HfArgumentParser, Trainer, TrainingArguments
from trl import SFTConfig

@dataclasses.dataclass
class Mine(TrainingArguments):
    own: int = 3

assert not hasattr(TrainingArguments, "megatrain")
import megatrain_accelerate
megatrain_accelerate.enable(host_threads=3)
check("enable()")
megatrain_accelerate.disable()
from megatrain_accelerate.activation import active_config
for cls in (Mine, SFTConfig, TrainingArguments):
    flags = ["--output_dir", "x", "--use_cpu", "--bf16", "False", "--megatrain", "--megatrain_config", '{"host_threads": 5}']
    (arguments,) = HfArgumentParser(cls).parse_args_into_dataclasses(flags)
    assert arguments.megatrain and active_config().host_threads == 5
    assert dataclasses.replace(arguments).megatrain_config == {"host_threads": 5}
    megatrain_accelerate.disable()
    assert not cls(output_dir="x", use_cpu=True, bf16=False).megatrain and active_config() is None
assert Mine(output_dir="x", own=4).own == 4
"""

MISSING = """
import os, sys
from megatrain_accelerate.errors import PatchError
import accelerate
del accelerate.Accelerator.clip_grad_norm_
accelerate.Accelerator.free_memory = lambda self, things: None
from megatrain_accelerate.integrations import import_hook
"""

REPORTED = """
import_hook.install()
import accelerate.commands.launch
accelerate.Accelerator(cpu=True)
import megatrain_accelerate
from megatrain_accelerate.activation import active_config
try:
    megatrain_accelerate.enable()
except PatchError as error:
    print(error, *error.__notes__ if hasattr(error, "__notes__") else "")
assert active_config() is None
"""

STOPPED = """
try:
    import_hook.install()
except PatchError:
    print("stopped")
"""


def test_a_process_that_begins_without_the_plugin() -> None:
    """Nothing of it is there; late enable() patches what is imported; a class that lacks what is patched is reported where the
    plugin is asked for, and stops a process that the launcher activated."""
    cases = {
        "nothing is left behind": NOTHING_BEHIND,
        "late enable()": INACTIVE + PROBE + LATE_ENABLE,
        "an unknown shape is reported when active": INACTIVE + MISSING + REPORTED,
        "an unknown shape stops an activated process": MISSING + STOPPED,
    }
    imports = "import torch, accelerate.commands.launch\nfrom transformers import Trainer"
    output = run_forked(imports, cases, TORCH_DEVICE_BACKEND_AUTOLOAD="0", MEGATRAIN_ACTIVE="1")
    assert "accelerate.accelerator:Accelerator.clip_grad_norm_" in output
    assert "no attribute clip_grad_norm_" in output
    assert "tested with: accelerate" in output
    assert f"Installed: accelerate {__import__('accelerate').__version__}" in output
    assert output.endswith("stopped\n")


def test_the_off_switch_leaves_nothing_behind() -> None:
    run_python(NOTHING_BEHIND, MEGATRAIN_ACTIVE="1", MEGATRAIN_DISABLE="1")


def test_enable_reports_the_off_switch() -> None:
    output = run_python("import megatrain_accelerate as m; m.enable()", check=False, MEGATRAIN_DISABLE="1")
    assert "ConfigError" in output
    assert "MEGATRAIN_DISABLE" in output


def test_import_torch_loads_six_modules_of_ours_and_nothing_else() -> None:
    """Calls are counted, since a time would depend on the machine."""
    output = run_python(
        """
        import sys
        import torch
        before, calls = set(sys.modules), 0

        def count(frame, event, argument):
            global calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        import _megatrain_autoload
        _megatrain_autoload.install()
        sys.setprofile(None)
        assert _megatrain_autoload.failure is None
        print(calls, *sorted(set(sys.modules) - before))
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    calls, *modules = output.split()
    package = "megatrain_accelerate"
    hooks = f"{package}.integrations"
    assert modules == [
        "_megatrain_autoload", package, f"{package}.activation", hooks, f"{hooks}.import_hook", f"{hooks}.patches"
    ]  # fmt: skip
    assert int(calls) < 2500


def _copy_of_the_package(folder: Path) -> Path:
    copy = folder / "megatrain_accelerate"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "csrc", "__pycache__"))
    shutil.copy(AUTOLOAD, folder)
    metadata = folder / "megatrain_accelerate-999.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: megatrain-accelerate\nVersion: 999\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nmegatrain_accelerate = _megatrain_autoload:install\n")
    return copy


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("__init__.py", "raise SystemExit('broken on purpose')"),
        pytest.param("__init__.py", "this is broken on purpose", marks=pytest.mark.long),
        pytest.param("integrations/import_hook.py", "raise ValueError('broken on purpose')", marks=pytest.mark.long),
        ("integrations/patches.py", "import broken_on_purpose"),
    ],
)
def test_a_broken_package_breaks_only_processes_that_ask_for_it(tmp_path: Path, file: str, statement: str) -> None:
    broken = _copy_of_the_package(tmp_path) / file
    text = broken.read_text()
    broken.write_text(
        text.replace("from __future__ import annotations\n", f"from __future__ import annotations\n{statement}\n", 1)
    )
    output = run_python(
        """
        import os, sys
        import torch, accelerate
        import _megatrain_autoload
        print(_megatrain_autoload.__file__, type(_megatrain_autoload.failure).__name__)

        def fails(ask):
            try:
                exec(ask, {})
            except BaseException as error:
                while error is not None:
                    if error is _megatrain_autoload.failure or "broken" in f"{error} {getattr(error, 'text', '')}":
                        return True
                    error = error.__cause__
            return False

        assert fails("import megatrain_accelerate; megatrain_accelerate.enable()")
        sys.argv.append("--megatrain")
        assert fails("import transformers.training_args")
        sys.argv.pop()
        os.environ["MEGATRAIN_ACTIVE"] = "1"
        assert fails("import transformers.training_args")
        del os.environ["MEGATRAIN_ACTIVE"]
        sys.argv[:] = ["/usr/bin/accelerate", "launch", "--config", "megatrain.yaml"]
        assert fails("import accelerate.commands.launch")
        sys.argv[:] = ["train.py", "--config", "trl.yaml"]
        import transformers.training_args
        """,
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    assert str(tmp_path) in output
    assert "NoneType" not in output


ANOTHER_SHAPE = """
import os, sys
from megatrain_accelerate.errors import PatchError
from megatrain_accelerate.integrations import import_hook
needs = {"accelerate_backend:free_memory(self, objects)": "accelerate_backend:free_memory(unknown)"}
import_hook.PATCHES = [
    patch._replace(replacement=needs.get(patch.replacement, patch.replacement)) for patch in import_hook.PATCHES
]
"""

STOPPED_AT_IMPORT = """
os.environ["MEGATRAIN_ACTIVE"] = "1"
try:
    import accelerate
except PatchError as error:
    print(error)
else:
    raise AssertionError("imported all the same")
"""

RELOADED = """
import importlib, sys
import accelerate.accelerator
from megatrain_accelerate.integrations import import_hook
first = accelerate.accelerator.Accelerator.prepare_model
import_hook.install()
assert accelerate.accelerator.Accelerator.prepare_model is first
assert not hasattr(first.__wrapped__, "__wrapped__")
assert len([finder for finder in sys.meta_path if type(finder).__name__ == "PatchFinder"]) == 1
module = importlib.reload(accelerate.accelerator)
second = module.Accelerator.prepare_model
assert second is not first and not hasattr(second.__wrapped__, "__wrapped__")
assert type(module.__loader__).__name__ == "SourceFileLoader"
"""


def test_a_process_that_torch_has_loaded_the_plugin_into() -> None:
    """Targets are patched after their import, once, and anew after a reload; a class of another shape stops the import where
    the launcher activated the process, and no other one."""
    order = ORDERS["torch"]
    cases = {
        "torch first": f"{PROBE}\nrun(*{order!r})",
        "installed once, and reloaded": RELOADED,
        "another shape stops an activated process at its import": ANOTHER_SHAPE + STOPPED_AT_IMPORT,
        "another shape stops no other process": ANOTHER_SHAPE + "import accelerate",
    }
    assert "accelerate.accelerator:Accelerator.free_memory" in run_forked(order[0], cases)


def test_the_environment_of_these_tests_has_the_plugin_installed() -> None:
    from importlib.metadata import entry_points

    names = [entry.value for entry in entry_points(group="torch.backends")]
    assert "_megatrain_autoload:install" in names, "run `pip install -e .` first"
    assert os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"
