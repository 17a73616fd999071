"""`pa.patch_sdpa`: the `F.scaled_dot_product_attention` calls of a scope run through polyattn."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from polyattn.call import attention
from polyattn.errors import UnsupportedRequest
from polyattn.integrations.sdpa_terms import terms

#: torch's own; calls of it by value reach a scope's mode under this identity.
_sdpa = torch.nn.functional.scaled_dot_product_attention


#: Why compiled code breaks at a scope that it enters; an older Dynamo takes no reason.
_BREAK = (
    {"msg": "patch_sdpa is entered in compiled code: enter it around the compiled function"}
    if torch.__version__ >= "2.8"
    else {}
)


class _Thread(threading.local):
    """Of this thread: the backend choices of its open scopes, innermost last, and whether polyattn is at work."""

    def __init__(self) -> None:
        self.choices: list[str | None] = []
        self.inside = False


_thread = _Thread()
_open = 0
_lock = threading.Lock()
#: What the module's attribute held before the first scope: torch's function, or what another library put there.
_replaced: Callable[..., torch.Tensor] = _sdpa


class _ByValue(TorchFunctionMode):
    """Catches calls of torch's function itself, as code makes them that imported it by value."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _sdpa and not _is_our_own_call():
            return _routed(self.backend, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class patch_sdpa:
    """In this scope and thread, `F.scaled_dot_product_attention` runs through `pa.attention`, in stock modules too.

    torch's own meanings hold: q is [...,H,S,D], batch and heads broadcast, a 2-D mask is [Sq,Sk], a 3-D one broadcasts
    over heads, `is_causal` is top-left. But for one: a query row that sees no key is 0, where torch may say NaN.
    Dropout is refused. What has no heads, no elements or nested rows is torch's own to answer, and so are the calls of
    other threads. The last scope restores what was there.

    The function is caught by name and where it was imported by value (`from torch.nn.functional import ...`), in eager
    and in compiled code. A scope around a compiled function holds within its graph; one entered inside breaks it.
    A backward is no part of the scope: enter it inside what `torch.utils.checkpoint` is given, not around it, so that
    what is computed again is computed by the same function, in whatever thread.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 2, 4, 8)
    >>> with pa.patch_sdpa(), pa.record_routes() as log:
    ...     _ = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> len(log.entries)
    1
    """

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self._mode = _ByValue(backend)

    def __enter__(self) -> patch_sdpa:
        global _open, _replaced
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(**_BREAK)
        with _lock:
            if _open == 0:
                # Dynamo remembers what may be overridden from when it first asks: it must find torch's own there
                torch.overrides.get_overridable_functions()
                _replaced = torch.nn.functional.scaled_dot_product_attention
            _open += 1
            # modules such as nn.MultiheadAttention look the function up when they call it, out of a mode's reach
            torch.nn.functional.scaled_dot_product_attention = _by_name
        _thread.choices.append(self.backend)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _open
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _thread.choices.pop()
        with _lock:
            _open -= 1
            # what another library has put there meanwhile is its own to take away
            if _open == 0 and torch.nn.functional.scaled_dot_product_attention is _by_name:
                torch.nn.functional.scaled_dot_product_attention = _replaced


def _by_name(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Stands in the module while a scope is open anywhere."""
    if _is_our_own_call():
        return _sdpa(*args, **kwargs)
    if not _thread.choices:
        return _replaced(*args, **kwargs)
    return _routed(_thread.choices[-1], *args, **kwargs)


def _is_our_own_call() -> bool:
    """Whether a backend makes the call: then it is torch's. In a compiled graph the caller's name alone says so."""
    if torch.compiler.is_compiling():
        return False
    caller = str(sys._getframe(2).f_globals.get("__name__", ""))
    return _thread.inside or caller.startswith(("polyattn.", "polyattn_"))


def _routed(
    backend: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p:
        raise UnsupportedRequest(
            f"dropout_p: dropout is not supported by polyattn, got {dropout_p}; call outside patch_sdpa"
        )
    if not _is_ours(query, key, value, attn_mask):
        return _replaced(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    query, key, value = _broadcast(query, key, value, enable_gqa)
    lead = query.shape[:-3]
    q, k, v = (t.reshape(-1, *t.shape[-3:]).transpose(1, 2) for t in (query, key, value))
    mask = attn_mask if attn_mask is None or len(lead) == 1 else _as_batch(attn_mask, lead)
    k, v, structure, causal = terms(q, k, v, mask, is_causal)
    was, _thread.inside = _thread.inside, True
    try:
        out = attention(q, k, v, structure=structure, causal=causal, scale=scale, backend=backend)
    finally:
        _thread.inside = was
    result: torch.Tensor = out.transpose(1, 2).reshape(*lead, *out.shape[2:3], out.shape[1], out.shape[3])
    return result


def _is_ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether the call has heads, rows and keys; what else torch accepts is torch's own to answer."""
    if any(t.is_nested or t.dim() < 3 or t.numel() == 0 for t in (query, key, value)):
        return False
    return mask is None or mask.dim() > 0


def _broadcast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three with the same axes before the heads, and with the same heads where they are not grouped."""
    kept = 3 if enable_gqa else 2
    given = [t.shape for t in (query, key, value)]
    try:
        lead = torch.broadcast_shapes(*(shape[:-kept] for shape in given))
    except RuntimeError:
        hint = "" if enable_gqa else "; fewer KV heads need enable_gqa=True"
        shapes = ", ".join(str(list(shape)) for shape in given)
        raise ValueError(f"query, key, value: batch and heads do not broadcast, got {shapes}{hint}") from None
    q, k, v = (t.expand(*lead, *t.shape[-kept:]) for t in (query, key, value))
    return q, k, v


def _as_batch(mask: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    """A mask for tensors with several axes (or none) before the heads, which are one axis for us."""
    if mask.dim() <= 3:
        return mask
    before = mask.shape[:-3]
    if all(size == 1 for size in before):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*lead, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
