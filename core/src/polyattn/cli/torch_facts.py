"""Which torch this is, or why `import torch` fails and what to do about it."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

from polyattn.discovery.loading import cause
from polyattn.discovery.scan import BROKEN

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
#: Entry points that torch loads at the end of its own import: a broken one makes `import torch` raise.
_EXTENSIONS = "torch.backends"


def torch_facts() -> dict[str, Any]:
    """{"version", "build"} of torch, or {"error", "hint"}; and the extensions that torch loads by itself."""
    facts: dict[str, Any] = {"extensions": extensions()}
    off = os.environ.get(_AUTOLOAD) == "0"  # asked before: torch-npu sets it while it is imported, and leaves it
    try:
        import torch

        if not hasattr(torch, "Tensor"):
            raise ImportError(f"what is found as torch, {list(torch.__path__)}, is not PyTorch")
        facts_of_build = ((name, value) for name, value in vars(torch.version).items() if not name.startswith("_"))
        build = {
            name: value for name, value in sorted(facts_of_build) if value is None or isinstance(value, (str, bool))
        }
        return {**facts, "version": torch.__version__, "build": build}
    except BROKEN as error:
        return {**facts, "error": _with_root(error), "hint": _hint(error, facts["extensions"], off)}


def extensions() -> list[str]:
    """The installed torch extensions, "distribution version (module:function)"."""
    try:
        found = metadata.entry_points(group=_EXTENSIONS)
        return sorted(f"{entry.dist.name} {entry.dist.version} ({entry.value})" for entry in found if entry.dist)
    except BROKEN as error:
        return [f"(cannot be read: {cause(error)})"]


def _with_root(error: BaseException) -> str:
    """The error in one line, and what first went wrong: torch wraps what an extension raises."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return cause(error) if root is error else f"{cause(error)} (caused by {cause(root)})"


def _hint(error: BaseException, loaded: list[str], off: bool) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return 'Install it: pip install "torch>=2.6"'
    if off:
        return f"{_AUTOLOAD}=0 is set, so that this is torch's own fault: install torch again"
    whose = f" (here: {', '.join(loaded)})" if loaded else ""
    return f"Set {_AUTOLOAD}=0: it keeps torch from loading vendors' extensions at its import{whose}; then try again"
