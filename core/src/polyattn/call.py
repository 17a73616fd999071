"""`pa.attention`: one call; what its shapes and arguments decide is decided once and remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from polyattn.arguments import check_flag, checked
from polyattn.choice import Choice, parse_choice
from polyattn.distributed.glued import glue
from polyattn.distributed.parallel import over_ranks
from polyattn.environment import BACKEND, environment, on_reload
from polyattn.plan import Plan, make_plan, owner_of, profiled
from polyattn.quant import Quant, as_quant, skipped
from polyattn.recorders import here, recorders
from polyattn.request import check_types, shares_memory
from polyattn.scope import choice_here, choices_here, logs_here, step_here
from polyattn.structures import Structure
from polyattn.structures.video_gate import gated
from polyattn.traced import attend_traced

if TYPE_CHECKING:
    from polyattn.vendor import Options

#: Plans kept, oldest dropped first: a model has a few shapes, a server a few hundred.
_PLAN_LIMIT = 4096
_plans: dict[Any, Plan] = {}
#: Device -> its type: reading `device.type` costs more than looking it up.
_kinds: dict[torch.device, str] = {}
#: Device type -> "is its stream being captured?", for the platforms that have graphs.
_capturing: dict[str, Callable[[], bool]] = {}

_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_profiling = torch._C._autograd._profiler_enabled
_autocast_enabled = torch.is_autocast_enabled
_autocast_dtype = torch.get_autocast_dtype


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    structure: Structure | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    gate: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    quant: Quant | str | None = None,
    deterministic: bool = False,
    options: tuple[Options, ...] = (),
    parallel: Any = None,
    joint: Any = None,
    replicated: Any = None,
) -> Any:
    """Softmax attention of q over k and v, through the fastest exact route of the tensors' platform.

    Args:
        q: queries [B,Sq,H,D]; packed [T,H,D]. Floating dtype, any strides.
        k, v: [B,Sk,Hk,D] and [B,Sk,Hk,Dv], H a multiple of Hk; with `Paged` the pools [pages,page_size,Hk,D].
        structure: who may attend to whom; None is `Dense()`.
        causal: bottom-right aligned: query i sees keys up to i + Sk - Sq (per document).
        scale: factor on q.k, default D ** -0.5.
        window: (left, right) inclusive counts of keys beside the aligned diagonal, None unbounded; an int w is (w, 0)
            with causal, else (w, w).
        softcap: c > 0 turns scores into c * tanh(scores / c).
        gate: weight of the coarse term, shaped like the output (rows past q's are dropped), in q's dtype; `VideoTiles`
            only. None: no coarse term.
        return_lse: also return the natural-log LSE, float32, [B,H,Sq] or [H,T].
        out: buffer for the result, [..., H, Dv] in q's dtype.
        backend: choice such as "fa3,cudnn" or "-sdpa"; a final "auto" permits automatic choice.
        quant: a `Quant` or a method's name.
        deterministic: the same bits run to run, forward and backward.
        options: typed options of platforms.
        parallel, joint, replicated: see `polyattn.distributed`.

    Returns:
        The output [B,Sq,H,Dv] (or packed), or (output, lse). A query row that sees no key is 0, its LSE -inf.

    Raises:
        TypeError, ValueError: an argument is malformed; the text names it, what was given and what is accepted.
        UnsupportedRequest: no eligible backend can run the request; with every backend's reasons.
        BackendUnavailable: the backend asked for is not installed.

    >>> import torch, polyattn as pa
    >>> q = k = v = torch.randn(1, 16, 2, 64)
    >>> pa.attention(q, k, v, causal=True).shape
    torch.Size([1, 16, 2, 64])
    """
    if _is_compiling():
        return attend_traced(
            q, k, v, structure, causal, scale, window, softcap, gate, return_lse, out, backend, None, quant, None,
            deterministic, options, parallel, joint, replicated,
        )  # fmt: skip
    if recorders and (recorder := here()) is not None:
        stated = {
            "structure": structure, "causal": causal, "scale": scale, "window": window, "softcap": softcap,
            "gate": gate, "return_lse": return_lse, "out": out, "backend": backend, "quant": quant,
            "deterministic": deterministic, "options": options, "parallel": parallel, "joint": joint,
            "replicated": replicated,
        }  # fmt: skip
        return recorder.attention(attention, (q, k, v), stated, stated)
    if over_ranks(parallel):
        from polyattn.distributed.entry import attend_over_ranks
        from polyattn.distributed.local import LocalCall

        return attend_over_ranks(
            LocalCall(scale, softcap, backend, None, quant, None, deterministic, options), q, k, v, structure=structure,
            causal=causal, window=window, gate=gate, return_lse=return_lse, out=out, parallel=parallel, joint=joint,
            replicated=replicated,
        )  # fmt: skip
    if parallel is not None or joint is not None or replicated is not None:
        q, k, v = glue(q, k, v, parallel=parallel, joint=joint, replicated=replicated)
    if gate is not None:
        structure = gated(structure, gate, q, k, v)
    plan = find_plan(
        q, k, v, structure, causal, scale, window, softcap, return_lse, out, backend, None, quant, None, deterministic,
        options,
    )  # fmt: skip
    return plan.run(q, k, v, out, structure)


def find_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    structure: Structure | None,
    causal: bool,
    scale: float | None,
    window: Any,
    softcap: float,
    return_lse: bool,
    out: torch.Tensor | None,
    backend: str | None,
    configured: str | None,
    quant: Quant | str | None,
    layer: int | None,
    deterministic: bool,
    options: Any,
    heads: tuple[int, int, int] | None = None,
    compiling: bool = False,
) -> Plan:
    """The remembered plan of a call, or a new one; counts it in the active route logs.

    `configured` is a `pa.configure` choice, weaker than the context's; `layer` the index that `Quant` may skip; `heads`
    (query heads, head_dim, KV heads) are what a layer expects; `compiling`: a compiled graph makes the call.
    """
    key: Any = None
    try:
        device = q.device
        kind = _kinds.get(device) or _kind_of(device)
        key = (
            q.shape, q.stride(), q.dtype, device, k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device, None if structure is None else structure.route_key,
            causal, scale, window, softcap, return_lse,
            # 1 == True == 1.0, but not all are accepted
            type(causal), type(scale), type(window), type(softcap), type(return_lse), type(deterministic),
            None if out is None else (
                out.shape, out.stride(), out.dtype, out.device, out.requires_grad, shares_memory(out, q, k, v),
                out is q or out is k or out is v,
            ),
            backend, configured, choices_here.get(), None if quant is None else (quant, layer, step_here()),
            deterministic, options, heads, compiling,
            _grad_enabled() and (
                q.requires_grad or k.requires_grad or v.requires_grad
                or (structure is not None and structure.facts.mask_grad)
            ),
            _autocast_dtype(kind) if _autocast_enabled(kind) else None,
            _capturing[kind]() if kind in _capturing else False,
        )  # fmt: skip
        plan = _plans[key]
    except (KeyError, TypeError, AttributeError, RuntimeError):
        # a first call, or arguments that no key can be made of: the plan's own checks say what is wrong with them
        plan = _plan_anew(
            q, k, v, structure, causal, scale, window, softcap, return_lse, out, backend, configured, quant, layer,
            deterministic, options, heads, compiling,
        )  # fmt: skip
        _remember(key, plan)
    for log in logs_here.get():
        log.add(plan.route)
    return profiled(plan) if _profiling() else plan


def _plan_anew(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    structure: Structure | None,
    causal: bool,
    scale: float | None,
    window: Any,
    softcap: float,
    return_lse: bool,
    out: torch.Tensor | None,
    backend: str | None,
    configured: str | None,
    quant: Quant | str | None,
    layer: int | None,
    deterministic: bool,
    options: Any,
    heads: tuple[int, int, int] | None = None,
    compiling: bool = False,
) -> Plan:
    check_types(q, k, v)
    if heads is not None:
        check_heads(q, k, heads)
    arguments = checked(causal, window, softcap, deterministic, options)
    check_flag("return_lse", return_lse)
    method, notes = effective_quant(quant, layer, step_here())
    return make_plan(
        q, k, v, structure, arguments,
        scale=scale, lse=return_lse, out=out, quant=method, notes=notes, compiling=compiling,
        choices=stated_choices(backend, choice_here(), configured),
    )  # fmt: skip


def check_heads(q: torch.Tensor, k: torch.Tensor, heads: tuple[int, int, int]) -> None:
    """Raise ValueError unless the tensors have a layer's (query heads, head_dim, KV heads)."""
    if (*q.shape[-2:], *k.shape[-2:-1]) != heads:
        raise ValueError(
            f"q, k: {heads[0]} heads of {heads[1]} and {heads[2]} KV heads are this layer's, "
            f"got q {list(q.shape)} and k {list(k.shape)}"
        )


def stated_choices(argument: str | None, context: str | None, configured: str | None) -> tuple[Choice, ...]:
    """The choices that were made, strongest first: argument, context, configure, environment."""
    stated = (
        ("argument", argument),
        ("context", context),
        ("configure", configured),
        ("environment", environment().given.get(BACKEND) or None),
    )
    return tuple(parse_choice(text, source) for source, text in stated if text is not None)


def effective_quant(
    given: Quant | str | None, layer: int | None, step: int | None
) -> tuple[Quant | None, tuple[str, ...]]:
    """The quantisation this call runs with, and the note that it was skipped."""
    quant = as_quant(given)
    if quant is None:
        return None, ()
    why = skipped(quant, layer, step)
    return (quant, ()) if why is None else (None, (why,))


def _kind_of(device: torch.device) -> str:
    """The device's type; at its first call, which may be inside a capture, also whom to ask about that."""
    capturing = owner_of(device.type).capturing
    if capturing is not None:
        _capturing[device.type] = capturing
    return _kinds.setdefault(device, device.type)


def _remember(key: Any, plan: Plan) -> None:
    try:
        hash(key)
    except TypeError:
        return
    if key is None:
        return
    while len(_plans) >= _PLAN_LIMIT:
        _plans.pop(next(iter(_plans)), None)
    _plans[key] = plan


@on_reload
def _forget() -> None:
    _plans.clear()
    _kinds.clear()
    _capturing.clear()
