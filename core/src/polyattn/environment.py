"""Our own environment variables, read once, and our warnings, which one of them turns into errors."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import TypeVar

PLATFORM = "POLYATTN_PLATFORM"
BACKEND = "POLYATTN_BACKEND"
PLUGINS = "POLYATTN_PLUGINS"
STRICT = "POLYATTN_STRICT"
ORDER = "POLYATTN_ORDER"
VARIABLES = (PLATFORM, BACKEND, PLUGINS, STRICT, ORDER)

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")

_Callback = TypeVar("_Callback", bound=Callable[[], object])


class PolyattnWarning(UserWarning):
    """Something of ours that deserves attention and stops nothing; an error under POLYATTN_STRICT=1.

    >>> import warnings, polyattn as pa
    >>> warnings.simplefilter("once", pa.PolyattnWarning)
    """


@dataclass(frozen=True)
class Environment:
    """What our variables say; a variable that is unset or blank is None (`strict`: False).

    platform    the one platform to load
    backend     the backend choice as written, lower case; routing validates it
    plugins     third-party distributions that may be loaded, names normalised as in PEP 503
    strict      our warnings are errors
    order       the file with a measured order of backends (`polyattn bench --write-order`)
    given       the texts as they stand in the environment, for error messages
    """

    platform: str | None = None
    backend: str | None = None
    plugins: frozenset[str] | None = None
    strict: bool = False
    order: str | None = None
    given: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)


#: The package's logger. Whoever configures logging sees our warnings there too, at INFO what was detected, and at DEBUG
#: each route when it is first taken; nobody else sees anything.
log = logging.getLogger("polyattn")
log.addHandler(logging.NullHandler())

_told: set[Hashable] = set()
_lock = threading.RLock()
_current: Environment | None = None
_callbacks: list[Callable[[], object]] = []


def environment() -> Environment:
    """Our variables, read at the first call and kept until `reload_environment()`."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = read(os.environ)
            return _current
    return _current


def read(variables: Mapping[str, str]) -> Environment:
    """The environment these variables describe (pure).

    >>> read({"POLYATTN_PLATFORM": " CUDA ", "POLYATTN_PLUGINS": "My_Kernels, other"}).platform
    'cuda'
    """
    given = {name: variables[name] for name in VARIABLES if variables.get(name, "").strip()}
    plugins = [normalised(name) for name in given.get(PLUGINS, "").split(",") if name.strip()]
    return Environment(
        platform=_word(given.get(PLATFORM)),
        backend=_word(given.get(BACKEND)),
        plugins=frozenset(plugins) if plugins else None,
        strict=_switch(STRICT, given.get(STRICT)),
        order=given.get(ORDER, "").strip() or None,
        given=MappingProxyType(given),
    )


def reload_environment() -> None:
    """Forget our variables and all that was derived from them: detection, backends, routes. The next use reads anew.

    >>> import polyattn as pa
    >>> pa.reload_environment()
    """
    global _current
    with _lock:
        _current = None
        _told.clear()
        callbacks = tuple(_callbacks)
    for callback in callbacks:
        callback()


def on_reload(callback: _Callback) -> _Callback:
    """Call this at every `reload_environment()`, in the order of registration; usable as a decorator."""
    with _lock:
        _callbacks.append(callback)
    return callback


def warn(message: str, category: type[Warning] = PolyattnWarning, *, key: Hashable = None) -> None:
    """Warn at the caller's line outside polyattn, and in the log; under POLYATTN_STRICT=1 raise it instead.

    A warning with a key is told once in a process, or until `reload_environment()`; raised, it is raised each time.
    """
    if environment().strict:
        raise category(f"{message} ({STRICT}=1 makes this warning an error)")
    if key is not None and key in _told:
        return
    log.warning(message)
    level = 1
    frame: FrameType | None = sys._getframe(0)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "polyattn":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
    if key is not None:
        _told.add(key)  # after the warning, which a filter may make an error, each time


def normalised(distribution: str) -> str:
    """A distribution's name in the one spelling of PEP 503.

    >>> normalised(" Polyattn__Cuda ")
    'polyattn-cuda'
    """
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def _word(text: str | None) -> str | None:
    return text.strip().lower() if text else None


def _switch(name: str, text: str | None) -> bool:
    word = _word(text)
    if word is None or word in _NO:
        return False
    if word in _YES:
        return True
    raise ValueError(f"{name}={text!r} is not a switch; accepted: {', '.join(_YES)} or {', '.join(_NO)}, or unset")


def _after_fork() -> None:
    # A thread of the parent may have held the lock at the fork; it does not exist here.
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
