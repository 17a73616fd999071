"""SageAttention: scores from int8, of the caller's own asking (quant="int8"), through its dense kernels.

Its varlen function reads a length back from the device, so documents run one dense call each, which also keeps what one
of them holds out of the others' scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch

from polyattn.vendor import (
    Backend,
    Features,
    Machine,
    Request,
    Requires,
    Slot,
    document_loop,
    empty_attention,
    installed_versions,
)

Result = tuple[torch.Tensor, torch.Tensor | None]

PACKAGE = "sageattention"


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    scale: float,
    window: None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Dense attention; causal with other keys than queries too, which the kernel itself does not know."""
    blind = max(0, q.shape[1] - k.shape[1]) if causal else 0
    if blind:  # these rows lie before the first key
        nothing, no_lse = empty_attention(q[:, :blind], k, v, need_lse)
        q = q[:, blind:]
    spare = k.shape[1] - q.shape[1] if causal else 0
    if spare:  # a square again, by rows whose answer is dropped; real ones, for their block shares its scale
        q = torch.cat([q[:, :1].expand(-1, spare, -1, -1), q], dim=1)
    q, k, v = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (q, k, v))
    with torch.cuda.device_of(q):  # the kernels launch on the current device, and 2.x leaves it changed
        result, lse = _function()(q, k, v, causal, scale, need_lse)
    if spare:
        result, lse = result[:, spare:], None if lse is None else lse[:, :, spare:]
    if blind:
        result = torch.cat([nothing, result], dim=1)
        lse = None if lse is None or no_lse is None else torch.cat([no_lse, lse], dim=2)
    return result if out is None else out.copy_(result), lse


packed = partial(document_loop, dense)


@lru_cache(maxsize=1)
def _function() -> Callable[..., Result]:
    """The installed release's dense function, called alike: (q, k, v, causal, scale, need_lse) -> out, lse."""
    return partial(_sage_1 if _release() < 2 else _sage_2, import_module(PACKAGE).sageattn)


def _sage_1(
    sageattn: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    need_lse: bool,
) -> Result:
    """1.x would subtract the mean of K from the caller's own tensor."""
    smooth = k - k.mean(dim=1, keepdim=True)
    return sageattn(q, smooth, v, tensor_layout="NHD", is_causal=causal, sm_scale=scale, smooth_k=False), None


def _sage_2(
    sageattn: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    need_lse: bool,
) -> Result:
    result: Any = sageattn(
        q, k, v, tensor_layout="NHD", is_causal=causal, sm_scale=scale, return_lse=need_lse
    )  # fmt: skip
    return (result[0], result[1].float()) if need_lse else (result, None)


def _release() -> int:
    """1 or 2; where none is installed, the registry's."""
    return int(installed_versions([PACKAGE]).get(PACKAGE, "1").partition(".")[0])


#: Architectures that 2.x has kernels for; 1.x compiles its own for any from sm_80 on.
_ARCHS_OF_2 = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121")


def _objections(request: Request, machine: Machine) -> tuple[str, ...]:
    reasons = []
    facts = request.structure_facts
    if request.structure_kind == "packed" and not facts.host:
        reasons.append("document boundaries are on the device only, and it runs document by document")
    if request.structure_kind == "packed" and facts.capacity and request.capturing:
        reasons.append("document by document, it would bake their lengths into the captured graph")
    version = machine.versions.get(PACKAGE, "1")
    if not version.startswith("1") and machine.arch and machine.arch not in _ARCHS_OF_2:
        reasons.append(f"{machine.arch} is none of the architectures of {PACKAGE} {version}, {', '.join(_ARCHS_OF_2)}")
    return tuple(reasons)


def backend() -> Backend:
    """The backend `sage`, as the installed release has it."""
    second = _release() >= 2
    halves = frozenset({"bfloat16", "float16"})
    features = Features(
        causal=True, lse=second, gqa=True, deterministic=True, out=True, capture=True,
        dtypes=halves if second else halves | {"float32"}, head_dims=frozenset({64, 96, 128}),
        quant=frozenset({"int8"}), exact=False,
    )  # fmt: skip
    hint = "pip install sageattention (1.0.6; 2.x is built from source)"
    return Backend(
        "sage",
        tuple(Slot(f"{__name__}:{kind}", replace(features, kinds=frozenset({kind}))) for kind in ("dense", "packed")),
        requires=(Requires(PACKAGE, "1.0.6", hint),),
        check=_objections,
        tolerances={"int8": 0.05},
    )
