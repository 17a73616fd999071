"""Hugging Face diffusers: polyattn behind the attention dispatcher, as the backend named "polyattn".

`with use_polyattn(model):` is the scoped way. `install()` alone makes the name known, so that diffusers' own
`model.set_attention_backend("polyattn")` and `attention_backend("polyattn")` take it; those two leave it as the default
of the whole process, or of the scope's, as they do with every name.

diffusers offers no public registration: its names are an Enum, and a function may only be registered for a member. So
`install` adds one member, and this file is the one place that knows how. What a mask means is what diffusers' "native"
makes of it: [B,Sk] is over keys, all else is read as SDPA reads it. Masks on a device are never read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
from diffusers.models import attention_dispatch as dispatcher

import polyattn as pa
from polyattn.integrations.diffusers_scope import Routed, standins
from polyattn.integrations.sdpa_terms import terms

NAME = "polyattn"

_REFUSED = {
    "dropout_p": "polyattn has no dropout; set it to 0.0 or call model.eval()",
    "return_lse": "backends of diffusers disagree about its layout; pa.attention(return_lse=True) states one",
    "_parallel_config": "diffusers' context parallelism replaces the attention; polyattn's own is pa.distributed",
}


class _EveryName(Collection[str]):
    """The names of a function's arguments, were it to take any: what is not among them diffusers drops, silently."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:  # what diffusers' optional checks may expect here without a warning
        return iter(("query", "key", "value", "attn_mask", "is_causal", "scale", "enable_gqa", *_REFUSED))

    def __len__(self) -> int:
        return len(tuple(iter(self)))


def install() -> str:
    """Make the name "polyattn" known to diffusers' dispatcher, and return it. Calling twice is fine.

    >>> from polyattn.integrations.diffusers import install
    >>> install()
    'polyattn'
    """
    names, registry = _dispatcher()
    member = names._value2member_map_.get(NAME)
    if member is not None and registry._backends.get(member) is not attention:
        raise ValueError(f"{NAME!r} is already an attention backend of diffusers {diffusers.__version__}, and not ours")
    if member is None:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME, NAME
        names._member_map_[NAME] = names._value2member_map_[NAME] = member
        names._member_names_.append(NAME)
        registry.register(member)(attention)
        registry._supported_arg_names[member] = _EveryName()
    return NAME


def uninstall() -> None:
    """Take the name away again; a model that still has it then fails. Without an `install` nothing happens."""
    names, registry = _dispatcher()
    member = names._value2member_map_.get(NAME)
    if registry._backends.get(member) is not attention:
        return
    del names._member_map_[NAME], names._value2member_map_[NAME]
    names._member_names_.remove(NAME)
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table.pop(member, None)
    if registry._active_backend is member:
        registry.set_active_backend(names.NATIVE)


@contextmanager
def use_polyattn(*models: torch.nn.Module) -> Iterator[Routed]:
    """In this scope these models, and no others, attend through polyattn; their processors are put back after it.

    Yields which processors run through it, and which cannot. The choice of a backend is the call's own, as anywhere:
    `pa.use_backend` around the model. While the scope lasts, every thread that calls the models is in it.

    >>> import diffusers, torch
    >>> from polyattn.integrations.diffusers import use_polyattn
    >>> sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
    >>> model = diffusers.WanTransformer3DModel(num_layers=1, ffn_dim=32, freq_dim=32, text_dim=16, **sizes)
    >>> with use_polyattn(model) as routed:
    ...     len(routed.dispatched)
    2
    """
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"models: modules are needed, such as pipe.transformer, got {type(model).__name__}")
    names, _ = _dispatcher()
    put, routed = standins(models, names(install()))
    if not put:
        raise ValueError(
            f"models: no attention processor of {', '.join(type(model).__name__ for model in models) or 'none'} asks "
            f"diffusers' dispatcher or calls torch's SDPA (found: {', '.join(routed.left) or 'no processor'}); "
            "pa.patch_sdpa() around the call reaches SDPA calls outside of processors"
        )
    for standin in put:
        standin.put()
    try:
        yield routed
    finally:
        for standin in put:
            standin.put_back()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **others: Any,
) -> torch.Tensor:
    """The registered function: query [B,Sq,H,D], key and value [B,Sk,Hk,D] -> [B,Sq,H,Dv].

    Raises ValueError naming an argument that polyattn does not honour, UnsupportedRequest where no backend can run it.
    """
    for name, given in {"dropout_p": dropout_p, **others}.items():
        if given is None or (isinstance(given, (bool, int, float)) and not given):
            continue
        reason = _REFUSED.get(name, "polyattn does not know this argument, and dropping it could change the result")
        raise ValueError(f"{name}: {reason} (diffusers passed {type(given).__name__})")
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"enable_gqa: {query.shape[2]} heads over {key.shape[2]} KV heads need enable_gqa=True, as in torch"
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    k, v, structure, causal = terms(query, key, value, attn_mask, is_causal)
    out: torch.Tensor = pa.attention(query, k, v, structure=structure, causal=causal, scale=scale)
    return out


def _dispatcher() -> tuple[Any, Any]:
    """The enumeration of names and the registry, if they are what `install` knows how to add to."""
    names = getattr(dispatcher, "AttentionBackendName", None)
    registry = getattr(dispatcher, "_AttentionBackendRegistry", None)
    needed = ("_backends", "_constraints", "_supported_arg_names", "_active_backend", "register", "set_active_backend")
    if names is None or not hasattr(names, "NATIVE") or any(not hasattr(registry, name) for name in needed):
        raise pa.BackendUnavailable(
            f"diffusers with its attention dispatcher as in 0.41 and 0.42 is needed, got {diffusers.__version__}"
        )
    return names, registry
