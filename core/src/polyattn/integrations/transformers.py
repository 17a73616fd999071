"""Hugging Face transformers: polyattn behind `attn_implementation="polyattn"`, through the two public registries.

`install()` registers an attention function (`AttentionInterface`) and a mask function (`AttentionMaskInterface`);
without the second, models would hand no mask at all. What a mask means on the way from one to the other:

None           every key may be seen, subject to `is_causal`; unless `position_ids` restart (several documents in a row)
[B,Sk]         padding (True = kept); causality is the module's
[B,1|H,Sq,Sk]  the whole meaning, causality and windows included, as SDPA takes it; [B,1,1,Sk] is padding alone. One
               that says no more than causality and the window do leaves documents to `position_ids`, like None

A mask, and the positions of a forward, are read on the host once (as transformers' own mask functions do), never while
tracing, and the structure made from them serves all layers. What polyattn does not do is refused by name. In a compiled
model documents run packed where `cu_seq_lens_q` and `max_length_q` are passed and no mask is made (`use_cache=True`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

import polyattn as pa
from polyattn.integrations.derived import derived
from polyattn.integrations.packed_rows import (
    Window,
    documents_of_boundaries,
    documents_of_mask,
    documents_of_positions,
    mask_within_boundaries,
    mask_within_positions,
)
from polyattn.structures import KeyPadding, Mask, Packed, Structure
from polyattn.structures.key_padding import Queries

#: Arguments that pass through attention layers and do not say who attends to whom.
_NO_MEANING = frozenset(
    {
        "cache_position", "layer_idx", "num_items_in_batch", "output_hidden_states", "output_router_logits",
        "position_embeddings", "return_dict", "seq_idx", "use_cache",
    }
)  # fmt: skip
#: Arguments that `translate` takes up.
_TAKEN = frozenset(
    {
        "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "is_causal", "max_length_k", "max_length_q", "position_ids",
        "sliding_window", "softcap",
    }
)  # fmt: skip
_REFUSED = {
    "s_aux": "attention sinks are not supported",
    "sinks": "attention sinks are not supported",
    "head_mask": "masks over heads are not supported",
    "position_bias": "a learned position bias is not supported",
    "output_attentions": "attention weights are never materialised; use attn_implementation='eager' to look at them",
    "block_table": "the continuous batching cache is not supported",
}


@dataclass(frozen=True)
class Call:
    """What `pa.attention` is asked; with a Packed structure, batch rows are laid end to end first."""

    structure: Structure | None
    causal: bool
    window: Window
    softcap: float
    scale: float | None
    deterministic: bool


def install(name: str = "polyattn") -> str:
    """Register polyattn under `name` in both of transformers' registries, and return the name. Calling twice is fine.

    >>> from polyattn.integrations.transformers import install
    >>> install()
    'polyattn'
    """
    if not isinstance(name, str) or not name or "flash" in name or "|" in name or "/" in name:
        raise ValueError(
            f"name: {name!r} cannot be used: transformers reads a meaning into names with 'flash', '|' or '/'"
        )
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise pa.BackendUnavailable(f"transformers>=5.4 is needed, found {transformers.__version__}")
    for registry, entry in (
        (transformers.AttentionInterface, attention),
        (transformers.AttentionMaskInterface, attention_mask),
    ):
        present = registry().get(name)
        if name == "eager" or (present is not None and present is not entry):
            raise ValueError(f"name: {name!r} is already an attention implementation of transformers; choose another")
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, attention_mask)
    return name


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: query [B,H,Sq,D], key and value [B,Hk,Sk,D] -> ([B,Sq,H,Dv], None).

    Raises ValueError naming an argument that polyattn does not honour, UnsupportedRequest where no backend can run it.
    """
    call = translate(module, query, key, attention_mask, scaling, dropout, kwargs)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    batch, rows = q.shape[:2]
    if isinstance(call.structure, Packed):
        q, k, v = (rows_of.reshape(1, -1, *rows_of.shape[2:]) for rows_of in (q, k, v))
    out: torch.Tensor = pa.attention(
        q, k, v, structure=call.structure, causal=call.causal, window=call.window, softcap=call.softcap,
        scale=call.scale, deterministic=call.deterministic,
    )  # fmt: skip
    return out.reshape(batch, rows, *out.shape[2:]), None


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """The registered mask function: None or the kept keys where that says all, transformers' whole mask elsewhere."""
    plain = mask_function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    # a window or a chunk that nothing lies outside of
    within = local_size is not None and kv_offset == 0 and kv_length < local_size
    bidirectional = allow_is_bidirectional_skip and not allow_is_causal_skip
    # with a static cache keys follow the last query, so that its diagonal is not the bottom-right one
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    reducible = bidirectional or (allow_is_causal_skip and aligned)
    if not reducible or not (plain or within):
        return masking_utils.sdpa_mask(
            q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **others,
        )  # fmt: skip
    if attention_mask is None:
        return None
    keep = attention_mask[:, kv_offset : kv_offset + kv_length]
    keep = torch.nn.functional.pad(keep, (0, kv_length - keep.shape[1]))
    mask = keep[:, None, None] if bidirectional else keep
    if is_tracing(mask):
        return mask
    padding = _key_padding(mask, "all" if bidirectional else _rule(q_length, kv_length))
    return None if padding.facts.common_prefix == kv_length else mask


def translate(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: Mapping[str, Any],
) -> Call:
    """What a call of the attention function means, as arguments of `pa.attention`."""
    _refuse(dropout, kwargs)
    if kwargs.get("cu_seq_lens_q") is None and kwargs.get("cu_seq_lens_k") is not None:
        raise ValueError("cu_seq_lens_k: it needs cu_seq_lens_q beside it")
    rows, keys = query.shape[2], key.shape[2]
    is_causal, boundaries, positions = (kwargs.get(name) for name in ("is_causal", "cu_seq_lens_q", "position_ids"))
    causal = rows > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = _window(kwargs.get("sliding_window"), causal, keys)
    structure: Structure | None
    if attention_mask is None and boundaries is None:
        structure = documents_of_positions(positions, query, key, causal)
    elif attention_mask is None or (boundaries is not None and not _traced(attention_mask)):
        structure = documents_of_boundaries(query, attention_mask, causal, window, kwargs)
    elif boundaries is not None:
        structure, causal, window = mask_within_boundaries(attention_mask, boundaries, query), False, None
    elif attention_mask.dim() == 2:
        structure = _key_padding(attention_mask, _rule(rows, keys) if causal else "all")
    elif _traced(attention_mask):
        mask = mask_within_positions(attention_mask, positions, query, key, causal, window)
        structure, causal, window = _whole_mask(mask, key), False, None
    else:
        structure = documents_of_mask(attention_mask, positions, query, key, causal, window)
        if structure is None:
            structure, causal, window = _whole_mask(attention_mask, key), False, None
    return Call(
        structure=structure, causal=causal, window=window, softcap=float(kwargs.get("softcap") or 0.0), scale=scaling,
        deterministic=bool(kwargs.get("deterministic")),
    )  # fmt: skip


def _refuse(dropout: float, kwargs: Mapping[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout: polyattn has none, got {dropout}; set attention_dropout=0.0 or call model.eval()")
    for name, value in kwargs.items():
        if name in _NO_MEANING or name in _TAKEN or value is None or value is False:
            continue
        reason = _REFUSED.get(name, "polyattn does not know this argument, and dropping it could change the result")
        raise ValueError(f"{name}: {reason} (transformers passed {type(value).__name__} to the attention function)")


def _window(sliding_window: int | None, causal: bool, keys: int) -> Window:
    """transformers' `sliding_window` counts the query's own key, on either side of it."""
    if sliding_window is None or keys <= sliding_window:
        return None
    return (sliding_window - 1, 0 if causal else sliding_window - 1)


def _rule(rows: int, keys: int) -> Queries:
    return "same" if rows == keys else "all"


def _key_padding(mask: torch.Tensor, queries: Queries) -> KeyPadding:
    def build() -> KeyPadding:
        keep = mask if mask.dim() == 2 else mask[:, 0, 0]
        return KeyPadding.from_mask(keep if is_tracing(keep) else keep.cpu(), queries=queries)

    return derived(queries, (mask,), build)


def _traced(mask: torch.Tensor) -> bool:
    """Whether this is a whole mask that cannot be looked at."""
    return mask.dim() == 4 and is_tracing(mask)


def _whole_mask(mask: torch.Tensor, key: torch.Tensor) -> Structure:
    if mask.dim() != 4:
        raise ValueError(f"attention_mask: [B, Sk] or [B, 1 or H, Sq, Sk] is accepted, got shape {list(mask.shape)}")
    if mask.dtype == torch.bool and mask.shape[1:3] == (1, 1) and mask.shape[0] == key.shape[0]:
        return _key_padding(mask, "all")
    if mask.requires_grad:
        return Mask(mask)
    return derived("mask", (mask,), lambda: Mask(mask.detach()))  # its own tensor, so that the mask itself can go
