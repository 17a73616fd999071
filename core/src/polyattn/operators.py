"""Custom operators: defined once in a process, whatever reloads, second imports or other packages do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_KEPT = "_polyattn_libraries"


def define_once(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Any:
    """Define operator `name` ("library::op") with `schema` ("(Tensor q) -> Tensor") and return it.

    Where it is defined already with an equal schema, that one is returned. An unequal schema is a RuntimeError naming
    the operator and both.
    """
    library_name, _, op = name.partition("::")
    namespace = getattr(torch.ops, library_name)
    if hasattr(namespace, op):
        _check_schema(name, schema, getattr(namespace, op).default._schema)
        return getattr(namespace, op)
    library = torch.library.Library(library_name, "FRAGMENT")
    library.define(op + schema)
    library.impl(op, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=library)
    # an operator dies with its library object: torch's own namespace outlives every module of ours
    vars(namespace).setdefault(_KEPT, []).append(library)
    return getattr(namespace, op)


def _check_schema(name: str, schema: str, defined: Any) -> None:
    asked = torch._C.parse_schema(name + schema)
    if str(asked) != str(defined):
        raise RuntimeError(
            f"operator {name} is defined already with another schema: {defined} is there, {asked} was asked for"
        )
