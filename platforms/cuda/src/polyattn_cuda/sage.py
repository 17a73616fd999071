"""SageAttention: scores from int8, of the caller's own asking (quant="int8"), through its dense kernels.

Its varlen function reads a length back from the device, so documents run one dense call each, which also keeps what one
of them holds out of the others' scales.

1.x reads whole tiles. The keys that the last one lacks count in every row's softmax, with a score of 0 and a value of
0: for 100 keys as if there were 128. See `_sage_1` for what is made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import pad

from polyattn.vendor import (
    Backend,
    Features,
    Machine,
    Request,
    Requires,
    Slot,
    TensorFacts,
    document_loop,
    empty_attention,
    generic_backends,
    installed_versions,
    warn,
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


#: Keys of a tile of 1.x; its causal kernels walk two at a time, and read the scale of one past the end.
_TILE = 64

#: The head dim of its widest kernel.
_WIDEST = 128

#: One missing key in so many costs an output under 1 %, and far less as a rule: int8 itself costs 1 to 2 %.
_NEGLIGIBLE = 128


def _sage_1(
    sageattn: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    need_lse: bool,
) -> Result:
    """Tiles are filled up here: causality hides what fills them, or its share of the softmax is divided out again.

    1.x would subtract the mean of K from the caller's own tensor. Without that mean a row's scores are 0 on average and
    their exponentials add up to no less than their number, so that the share is measured well, and bounded.
    """
    missing, width = -k.shape[1] % (2 * _TILE if causal else _TILE), q.shape[-1]
    if not causal and width == _WIDEST and not _negligible(missing, k.shape[1]):
        _tell_once()
        return _exactly()(
            q, k, v, None, meta=None, causal=False, scale=scale, window=None, softcap=0.0, need_lse=False, options=()
        )
    k = k - k.mean(dim=1, keepdim=True)
    call = partial(sageattn, tensor_layout="NHD", is_causal=causal, sm_scale=scale, smooth_k=False)
    if not missing:
        return call(q, k, v), None
    rows = (0, 0, 0, 0, 0, missing)
    if causal:
        return call(pad(q, rows), pad(k, rows), pad(v, rows))[:, : q.shape[1]], None
    if width == _WIDEST:
        mean = v.mean(dim=1, keepdim=True).expand(-1, missing, -1, -1)
        return call(q, pad(k, rows), torch.cat([v, mean], dim=1)), None
    spare = (0, _WIDEST - width)
    ones = pad(pad(v, (0, 1), value=1.0), (0, _WIDEST - width - 1, *rows[2:]))  # one column more; 0 where rows fill up
    result = call(pad(q, spare), pad(k, (*spare, *rows[2:])), ones)
    return result[..., :width] / result[..., width : width + 1], None


@lru_cache(maxsize=1)
def _tell_once() -> None:
    warn(
        f"cuda:sage runs a piece of a larger call unquantised: {PACKAGE} 1.x counts keys that its last tile of "
        f"{_TILE} lacks, which head_dim {_WIDEST} leaves no room to undo. Lengths that are multiples of {_TILE}, "
        "SageAttention 2, or another quant= avoid it"
    )


def _negligible(missing: int, keys: int) -> bool:
    return missing * _NEGLIGIBLE <= keys


@lru_cache(maxsize=1)
def _exactly() -> Callable[..., Result]:
    """torch's SDPA as the core calls it."""
    sdpa = next(one for one in generic_backends() if one.name == "sdpa")
    module, _, name = next(slot.call for slot in sdpa.slots if "dense" in slot.features.kinds).partition(":")
    function: Callable[..., Result] = getattr(import_module(module), name)
    return function


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
    if version.startswith("1"):
        return (*reasons, *_objections_of_1(request))
    if machine.arch and machine.arch not in _ARCHS_OF_2:
        reasons.append(f"{machine.arch} is none of the architectures of {PACKAGE} {version}, {', '.join(_ARCHS_OF_2)}")
    return tuple(reasons)


def _objections_of_1(request: Request) -> tuple[str, ...]:
    reasons = []
    keys = {"dense": request.k.shape[1], "prefix_kv": request.structure_facts.common_prefix}.get(request.structure_kind)
    if keys and not request.causal and request.head_dim == _WIDEST and not _negligible(-keys % _TILE, keys):
        reasons.append(
            f"{PACKAGE} 1.x counts keys that are not there, up to a multiple of {_TILE}: with head_dim {_WIDEST}, "
            f"{keys} keys are too few for the {-keys % _TILE} that are missing to be negligible; bring the keys to a "
            f"multiple of {_TILE}, install {PACKAGE} 2.x, or ask without quant"
        )
    if max(map(_extent, (request.q, request.k, request.v))) >= 2**31:
        reasons.append(f"{PACKAGE} 1.x counts entries in 32 bits, and these tensors reach past {2**31}")
    return tuple(reasons)


def _extent(tensor: TensorFacts) -> int:
    """Entries from a tensor's first to its last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))


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
