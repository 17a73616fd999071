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

    torch's own meanings hold: q is [B,H,S,D] (or [H,S,D]), a 2-D mask is [Sq,Sk], a 3-D one broadcasts over heads,
    `is_causal` is top-left. Dropout is refused. Other threads call torch's own function; the last scope restores it.

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
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask, is_causal: SDPA takes one of them")
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(f"enable_gqa: {query.shape[-3]} query heads and {key.shape[-3]} KV heads need enable_gqa=True")
    lead = query.shape[:-3]
    q, k, v = (t.reshape(-1, *t.shape[-3:]).transpose(1, 2) for t in (query, key, value))
    structure, causal = None, False
    if attn_mask is not None:
        structure = Mask(_rank_four(attn_mask, lead, q.shape[2], q.shape[1], k.shape[1]))
    elif is_causal and q.shape[1] == k.shape[1]:
        causal = True
    elif is_causal:  # torch aligns the triangle top-left, polyattn bottom-right
        structure = Mask.pairs(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril())
    out = attention(q, k, v, structure=structure, causal=causal, scale=scale, backend=backend)
    result: torch.Tensor = out.transpose(1, 2).reshape(*lead, *out.shape[2:3], out.shape[1], out.shape[3])
    return result


def _rank_four(mask: torch.Tensor, lead: tuple[int, ...], heads: int, queries: int, keys: int) -> torch.Tensor:
    mask = mask.expand(*mask.shape[:-1], keys) if mask.shape[-1] == 1 else mask
    while mask.dim() < 3 + len(lead):
        mask = mask[None]
    if len(lead) == 1:
        return mask
    batch = 1 if all(size == 1 for size in mask.shape[:-3]) else torch.Size(lead).numel()
    return mask.expand(*(lead if batch > 1 else mask.shape[:-3]), *mask.shape[-3:]).reshape(batch, *mask.shape[-3:])
