"""The order of backends that the user measured (POLYATTN_ORDER), which goes before the platform's own."""

from __future__ import annotations

from pathlib import Path

from polyattn.bench.order_file import Orders, read_order
from polyattn.door.platform import Machine
from polyattn.door.request import Request
from polyattn.environment import ORDER, environment, on_reload

_read: dict[str, Orders] = {}  # at most the one file that the environment names


def measured_names(request: Request, machine: Machine) -> tuple[str, ...]:
    """Backend names, fastest first, as measured; none where nothing was. ValueError names the variable and the file."""
    path = environment().order
    if path is None:
        return ()
    if path not in _read:
        try:
            _read[path] = read_order(Path(path))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{ORDER}={path!r}: {error}; `polyattn bench --write-order FILE` writes one") from error
    return _read[path].names(request, machine)


@on_reload
def _forget() -> None:
    _read.clear()
