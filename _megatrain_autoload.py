"""Entry point that ``import torch`` calls in every process: installs the import hook of megatrain_accelerate.

Nothing here may cost time or raise, whatever is broken in the package: it would break ``import torch`` for everybody.
"""

from __future__ import annotations

import os
import sys
from typing import Any

failure: BaseException | None = None
"""The exception that :func:`install` caught. It is raised when the plugin is activated."""


def install() -> None:
    """Installs the import hook, unless ``MEGATRAIN_DISABLE`` is set. Never raises; see :data:`failure`."""
    global failure
    if os.environ.get("MEGATRAIN_DISABLE", "").lower() in ("1", "true", "yes"):
        return
    try:
        from megatrain_accelerate.integrations import import_hook

        import_hook.install()
        failure = None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failure = error
        if not any(isinstance(finder, _Alarm) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Alarm())


class _Alarm:
    """Takes the place of the hook that couldn't be installed: tells a process that was asked to use the plugin why it can't.

    Without it such a process would train without the plugin, or be told that ``--megatrain`` is an unknown argument.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Finds nothing. Raises ``RuntimeError`` if a process that asks for the plugin imports accelerate or transformers."""
        if fullname.startswith(("accelerate.", "transformers.")) and failure is not None and _is_asked_for():
            raise RuntimeError(
                "megatrain_accelerate was asked for but can't be loaded "
                f"({type(failure).__name__}: {failure}). Reinstall it, or set MEGATRAIN_DISABLE=1 to run without it"
            ) from failure


def _is_asked_for() -> bool:
    arguments = [argument.split("=")[0].replace("-", "_") for argument in getattr(sys, "argv", None) or []]
    if os.environ.get("MEGATRAIN_ACTIVE") == "1" or "__megatrain" in arguments or "__megatrain_config" in arguments:
        return True
    # Stock accelerate has no --config: it would refuse the command with a message that hides the reason.
    return "__config" in arguments and "accelerate" in os.path.basename(arguments[0])
