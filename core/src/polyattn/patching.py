"""`pa.patch_sdpa`: the `F.scaled_dot_product_attention` calls of a scope run through polyattn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from polyattn.call import attention
from polyattn.errors import UnsupportedRequest
from polyattn.structures import Mask

_sdpa = torch.nn.functional.scaled_dot_product_attention


class _Scopes(threading.local):
    """The backend choices of this thread's open scopes, innermost last."""

    def __init__(self) -> None:
        self.choices: list[str | None] = []


_scopes = _Scopes()
_open = 0
_lock = threading.Lock()


class _ByValue(TorchFunctionMode):
    """Catches calls of the function itself, as code makes them that imported it by value."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_dispatch if func is _sdpa else func)(*args, **(kwargs or {}))


class patch_sdpa:
    """In this scope and thread, `F.scaled_dot_product_attention` runs through `pa.attention`, in stock modules too.

    torch's own meanings hold: q is [B,H,S,D] (or [H,S,D]), batch and heads broadcast, a 2-D mask is [Sq,Sk], a 3-D one
    broadcasts over heads, `is_causal` is top-left. Dropout is refused. What has no heads, no elements or nested rows is
    torch's own to answer, and so are the calls of other threads. The last scope restores torch's function.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 2, 4, 8)
    >>> with pa.patch_sdpa(), pa.record_routes() as log:
    ...     _ = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> len(log.entries)
    1
    """

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self._mode = _ByValue()

    def __enter__(self) -> patch_sdpa:
        global _open
        with _lock:
            _open += 1
            # modules such as nn.MultiheadAttention look the function up when they call it, out of a mode's reach
            torch.nn.functional.scaled_dot_product_attention = _dispatch
        _scopes.choices.append(self.backend)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _open
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _scopes.choices.pop()
        with _lock:
            _open -= 1
            if _open == 0:
                torch.nn.functional.scaled_dot_product_attention = _sdpa


def _dispatch(*args: Any, **kwargs: Any) -> torch.Tensor:
    if not _scopes.choices:
        return _sdpa(*args, **kwargs)
    scopes, _scopes.choices = _scopes.choices, []  # our own backends call the function too
    try:
        return _as_sdpa(scopes[-1], *args, **kwargs)
    finally:
        _scopes.choices = scopes


def _as_sdpa(
    backend: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p:
        raise UnsupportedRequest(
            f"dropout_p: dropout is not supported by polyattn, got {dropout_p}; call outside patch_sdpa"
        )
    if not _is_ours(query, key, value, attn_mask):
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask, is_causal: SDPA takes one of them")
    query, key, value = _broadcast(query, key, value, enable_gqa)
    lead = query.shape[:-3]
    q, k, v = (t.reshape(-1, *t.shape[-3:]).transpose(1, 2) for t in (query, key, value))
    structure, causal = None, False
    if attn_mask is not None:
        structure = Mask(_rank_four(attn_mask, lead, k.shape[1]))
    elif is_causal and q.shape[1] == k.shape[1]:
        causal = True
    elif is_causal:  # torch aligns the triangle top-left, polyattn bottom-right
        structure = Mask.pairs(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril())
    out = attention(q, k, v, structure=structure, causal=causal, scale=scale, backend=backend)
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


def _rank_four(mask: torch.Tensor, lead: tuple[int, ...], keys: int) -> torch.Tensor:
    mask = mask.expand(*mask.shape[:-1], keys) if mask.shape[-1] == 1 else mask
    while mask.dim() < 3 + len(lead):
        mask = mask[None]
    if len(lead) == 1:
        return mask
    batch = 1 if all(size == 1 for size in mask.shape[:-3]) else torch.Size(lead).numel()
    return mask.expand(*(lead if batch > 1 else mask.shape[:-3]), *mask.shape[-3:]).reshape(batch, *mask.shape[-3:])
