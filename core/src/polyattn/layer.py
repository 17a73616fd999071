"""`pa.Attention`: an attention layer that keeps its head counts, arguments and last route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from polyattn.arguments import checked, checked_scale
from polyattn.call import check_heads, find_plan, stated_choices
from polyattn.choice import AUTOMATIC, check_names, chosen_first, parse_choice
from polyattn.discovery import all_backend_names, backends_of, current_platform
from polyattn.distributed.glued import glue
from polyattn.distributed.parallel import check_parallel, over_ranks
from polyattn.door.backend import Backend
from polyattn.door.capability import Capability
from polyattn.door.platform import Platform
from polyattn.errors import UnsupportedRequest
from polyattn.machine import machine_of
from polyattn.plain_calls import Heads
from polyattn.plan import owner_of
from polyattn.quant import as_quant, layer_index, skipped
from polyattn.recorders import here, recorders
from polyattn.routing import backends_left
from polyattn.scope import choice_here
from polyattn.structures import KeyPadding, Structure
from polyattn.structures.host_data import dtype_name
from polyattn.structures.video_gate import gated
from polyattn.traced import attend_traced
from polyattn.usable import supports

if TYPE_CHECKING:
    from polyattn.quant import Quant
    from polyattn.routing import Route
    from polyattn.vendor import Options

_LAYER = object()


class Attention(torch.nn.Module):
    """Attention over [B,S,H,D] (or packed [T,H,D]) tensors; holds no parameters, so it adds nothing to a state_dict.

    Args:
        num_heads, head_dim: of the queries.
        num_kv_heads: of the keys and values, default num_heads.
        scale, causal, window, softcap, backend, quant, deterministic, options: as in `pa.attention`.
        role: "self", or "cross" where queries and keys are different tokens: `KeyPadding` then keeps every query row.
        parallel: a `polyattn.distributed.SequenceParallel`.
        prefix: the layer's name in its model; its first integer is the layer index that `Quant` may skip.

    >>> import torch, polyattn as pa
    >>> layer = pa.Attention(num_heads=2, head_dim=8, causal=True)
    >>> q = torch.randn(1, 4, 2, 8)
    >>> layer(q, q, q).shape
    torch.Size([1, 4, 2, 8])
    """

    last_route: Route | None
    backend: str | None
    configured: str | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        scale: float | None = None,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        role: Literal["self", "cross"] = "self",
        backend: str | None = None,
        quant: Quant | str | None = None,
        deterministic: bool = False,
        options: tuple[Options, ...] = (),
        parallel: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (("num_heads", num_heads), ("head_dim", head_dim), ("num_kv_heads", kv_heads)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: a positive integer is needed, got {size!r}")
        if num_heads % kv_heads:
            raise ValueError(f"num_kv_heads: {kv_heads} does not divide num_heads {num_heads}")
        if role not in ("self", "cross"):
            raise ValueError(f"role: 'self' or 'cross' is accepted, got {role!r}")
        arguments = checked(causal, window, softcap, deterministic, options)
        checked_scale(scale, head_dim)
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, kv_heads
        self.scale, self.causal, self.window, self.softcap = scale, causal, arguments.window, arguments.softcap
        self.role, self.deterministic, self.options = role, deterministic, arguments.options
        if not isinstance(prefix, str):
            raise TypeError(f"prefix: the layer's name is needed, got {type(prefix).__name__}")
        self.backend, self.configured = backend, None
        self.quant, self.parallel, self.prefix = as_quant(quant), parallel, prefix
        self.layer_index = layer_index(prefix)
        self._heads = (num_heads, head_dim, kv_heads)
        self.last_route = None
        if backend is not None:
            _check_backend(backend)
        check_parallel(parallel)
        opted_out = self.quant is not None and self.layer_index in self.quant.skip_layers
        if self.quant is not None:
            skipped(self.quant, self.layer_index, None)
        method = None if self.quant is None or opted_out else self.quant.method
        _check_eligible(backend, {"quant": method, "softcap": self.softcap, "deterministic": deterministic})

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        structure: Structure | None = None,
        *,
        gate: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        parallel: Any = _LAYER,
        joint: Any = None,
        replicated: Any = None,
    ) -> Any:
        """As `pa.attention` with the layer's arguments; `parallel` overrides the layer's own."""
        compiling = torch.compiler.is_compiling()
        if not compiling and recorders and (recorder := here()) is not None:
            stated = {
                "structure": structure, "gate": gate, "out": out, "return_lse": return_lse,
                "parallel": self.parallel if parallel is _LAYER else parallel, "joint": joint, "replicated": replicated,
            }  # fmt: skip
            return recorder.attention(self.forward, (q, k, v), stated, {**vars(self), **stated})
        if structure is not None and self.role == "cross" and structure.kind == "key_padding":
            structure = _keeping_queries(structure)
        if parallel is _LAYER:
            parallel = self.parallel
        if compiling:
            check_heads(q, k, self._heads)
            return attend_traced(
                q, k, v, structure, self.causal, self.scale, self.window, self.softcap, gate, return_lse, out,
                self.backend, self.configured, self.quant, self.layer_index, self.deterministic, self.options,
                parallel, joint, replicated,
            )  # fmt: skip
        if over_ranks(parallel):
            return self._over_ranks(q, k, v, structure, gate, out, return_lse, parallel, joint, replicated)
        if parallel is not None or joint is not None or replicated is not None:
            q, k, v = glue(q, k, v, parallel=parallel, joint=joint, replicated=replicated)
        if gate is not None:
            structure = gated(structure, gate, q, k, v)
        plan = find_plan(
            q, k, v, structure, self.causal, self.scale, self.window, self.softcap, return_lse, out, self.backend,
            self.configured, self.quant, self.layer_index, self.deterministic, self.options, self._heads,
        )  # fmt: skip
        self.__dict__["last_route"] = plan.route  # past nn.Module's slower __setattr__
        return plan.run(q, k, v, out, structure)

    def _over_ranks(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        structure: Structure | None,
        gate: torch.Tensor | None,
        out: torch.Tensor | None,
        return_lse: bool,
        parallel: Any,
        joint: Any,
        replicated: Any,
    ) -> Any:
        from polyattn.distributed.entry import attend_over_ranks
        from polyattn.distributed.local import LocalCall

        call = LocalCall(
            self.scale, self.softcap, self.backend, self.configured, self.quant, self.layer_index, self.deterministic,
            self.options, self._heads,
        )  # fmt: skip
        answer = attend_over_ranks(
            call, q, k, v, structure=structure, causal=self.causal, window=self.window, gate=gate,
            return_lse=return_lse, out=out, parallel=parallel, joint=joint, replicated=replicated,
        )  # fmt: skip
        self.__dict__["last_route"] = call.route
        return answer

    def supports(
        self, cap: Capability, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> bool:
        """Whether one slot, among the backends this layer may use on `device`, has all of `cap` for its heads there.

        Asked before a mask is built; `device` defaults to the current platform's first. As `current_platform.supports`.
        """
        if not isinstance(cap, Capability):
            raise TypeError(f"cap: a polyattn.Capability is needed, got {type(cap).__name__} {cap!r}")
        platform = current_platform.platform if device is None else owner_of(torch.device(device).type)
        index = (None if device is None else torch.device(device).index) or 0
        eligible = backends_left(
            stated_choices(self.backend, choice_here(), self.configured),
            platform,
            backends_of(platform),
            all_backend_names,
        )
        heads = Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        name = None if dtype is None else dtype_name(dtype)
        return supports(cap, eligible, machine_of(platform, f"{platform.device_type}:{index}"), heads, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last_route": None}  # a route belongs to the process that found it

    def extra_repr(self) -> str:
        heads = f"{self.num_heads}x{self.head_dim}, num_kv_heads={self.num_kv_heads}"
        return f"{heads}, role={self.role!r}, causal={self.causal}"


def configure(model: torch.nn.Module, choices: dict[str, str | None]) -> list[str]:
    """Choose backends for a model's `pa.Attention` layers, by role or by module name; returns the names it changed.

    Keys are "self", "cross", or module names with "*" wildcards, which are more specific and win over roles; among
    wildcards the longest wins. None takes a choice back. Weaker than an argument or a `use_backend` scope.

    >>> import torch, polyattn as pa
    >>> model = torch.nn.ModuleList([pa.Attention(2, 8), pa.Attention(2, 8, role="cross")])
    >>> pa.configure(model, {"cross": "sdpa,auto"})
    ['1']
    """
    from fnmatch import fnmatchcase

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
    for text in choices.values():
        if text is not None:
            check_names(
                parse_choice(text, "configure"),
                current_platform.name,
                _names(current_platform.platform),
                all_backend_names,
            )
    changed: dict[str, str | None] = {}
    for key in sorted(choices, key=lambda key: (key not in ("self", "cross"), len(key))):
        matching = [
            name
            for name, layer in layers
            if (layer.role == key if key in ("self", "cross") else fnmatchcase(name, key))
        ]
        if not matching and key not in ("self", "cross"):
            raise ValueError(
                f"configure: no attention layer is named {key!r}; there are {[name for name, _ in layers][:20]}"
            )
        changed.update(dict.fromkeys(matching, choices[key]))
    for name, layer in layers:
        if name in changed:
            layer.configured = changed[name]
    return list(changed)


def _keeping_queries(structure: Structure) -> Structure:
    assert isinstance(structure, KeyPadding)
    if structure.queries == "same":
        raise ValueError(
            "structure: KeyPadding(queries='same') says that queries are the keys' tokens, which role 'cross' denies"
        )
    return structure.with_queries("all")


def _check_backend(choice: str) -> None:
    """Every name must be some installed platform's: which one, the tensors will decide."""
    check_names(
        parse_choice(choice, "configure"), current_platform.name, _names(current_platform.platform), all_backend_names
    )


def _names(platform: Platform) -> tuple[str, ...]:
    return tuple(backend.name for backend in backends_of(platform))


def _check_eligible(choice: str | None, asked: dict[str, Any]) -> None:
    """Refuse when the layer is built what no backend that it may use on the current platform does, in any route.

    Asked: what a layer knows before its first call and no composition can add to a slot.
    """
    platform = current_platform.platform
    parsed = AUTOMATIC if choice is None else parse_choice(choice, "argument")
    named, automatic = chosen_first(parsed, platform.name, backends_of(platform))
    against = {backend.name: _lacks(backend, asked) for backend in (*named, *automatic)}
    if against and all(against.values()):
        told = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in against.items())
        raise UnsupportedRequest.because(
            f"no backend of {platform.name} that this layer may use can do what it asks for. {told}",
            backend=choice,
            platform=platform.name,
            reasons=against,
        )


def _lacks(backend: Backend, asked: dict[str, Any]) -> tuple[str, ...]:
    closest: tuple[str, ...] | None = None
    for slot in backend.slots:
        features = slot.features
        reasons = []
        if asked["quant"] and asked["quant"] not in features.quant:
            reasons.append(f"quant {asked['quant']!r} not in ({', '.join(sorted(features.quant)) or 'none'})")
        reasons += [
            f"{name} is not supported"
            for name in ("softcap", "deterministic")
            if asked[name] and not getattr(features, name)
        ]
        closest = tuple(reasons) if closest is None or len(reasons) < len(closest) else closest
    return closest or ()
