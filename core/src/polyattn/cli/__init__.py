"""The command line, `polyattn`: reads arguments, runs one command, turns a user's error into one line.

Exit codes: 0 the question was answered and the answer is good; 1 a check failed or nothing can run here; 2 the
arguments are wrong or a package is missing; 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from polyattn.cli.failure import UsageError
from polyattn.cli.parser import make_parser
from polyattn.environment import PolyattnWarning
from polyattn.errors import BackendUnavailable, UnsupportedRequest

#: What an output says that takes no more.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and never raises for a user's error."""
    _open_closed_streams()
    try:
        args = make_parser().parse_args(argv)
    except SystemExit as end:  # argparse has already said why
        return end.code if isinstance(end.code, int) else 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", PolyattnWarning)
            warnings.showwarning = _show_warning
            code: int = args.run(args)
        sys.stdout.flush()
    except UnsupportedRequest as error:
        return _fail(args.command, error, 1)
    except PolyattnWarning as error:  # raised, so POLYATTN_STRICT asks for it to be an error
        return _fail(args.command, error, 1)
    except (UsageError, BackendUnavailable) as error:
        return _fail(args.command, error, 2)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "polyattn"):
            raise  # ours, hence a bug
        return _fail(args.command, f"package {error.name} is not installed", 2)
    except BrokenPipeError:
        _drop_output()  # the reader (head, less) has gone
        return 1
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _drop_output()
        return _fail(args.command, f"the output cannot be written: {error.strerror}", 1)
    except KeyboardInterrupt:
        return 130
    return code


def _open_closed_streams() -> None:
    """A service may start us with its output closed: there is then no stream to write to, nor to ask."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())


def _drop_output() -> None:
    """What is still buffered must not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(command: str, error: object, code: int) -> int:
    print(f"polyattn {command}: {'; '.join(str(error).splitlines())}", file=sys.stderr)
    return code


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Ours in one line: where in polyattn it was raised tells a user of the command line nothing."""
    ours = issubclass(category, PolyattnWarning)
    text = f"warning: {message}\n" if ours else warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)
