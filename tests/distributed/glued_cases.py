"""Calls over several ranks beside the same call on one: structures by name, what every rank holds by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel, shard

BATCH, HEADS, KV_HEADS, WIDTH, V_WIDTH = 2, 4, 2, 8, 6
ROWS, PREFIX, SUFFIX, JOINT = 13, 3, 2, 4


@dataclass
class Call:
    """The structure and arguments of a call, for the glued sequence."""

    structure: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    batch: int = BATCH
    gate: bool = False


def call_of(name: str, queries: int, keys: int) -> Call:
    """The structure `name` over a glued sequence of so many rows."""
    random = torch.Generator().manual_seed(7)
    lengths = [keys, max(keys - 5, 0)]
    if name == "dense":
        return Call()
    if name == "softcap":
        return Call(arguments={"softcap": 2.0, "scale": 0.3})
    if name == "causal":
        return Call(arguments={"causal": True})
    if name == "window":
        return Call(arguments={"window": (4, 2)})
    if name == "causal window":
        return Call(arguments={"window": 5, "causal": True})
    if name == "tail padding":
        same = None if queries == keys else "all"
        return Call(pa.KeyPadding.from_lengths(lengths, keys, queries=same))
    if name == "padding everywhere":
        keep = torch.rand(BATCH, keys, generator=random) < 0.4
        keep[1, : keys // 2] = False
        return Call(pa.KeyPadding.from_mask(keep, queries="all"))
    if name == "causal padding":
        same = None if queries == keys else "all"
        return Call(pa.KeyPadding.from_lengths(lengths, keys, queries=same), {"causal": True})
    if name == "pads alone on a rank":
        return Call(pa.KeyPadding.from_lengths([3, 2], keys, queries="all"))
    if name == "mask of keys":
        return Call(pa.Mask.keys(torch.rand(BATCH, keys, generator=random) < 0.6))
    if name == "mask of pairs":
        return Call(pa.Mask.pairs(torch.rand(queries, keys, generator=random) < 0.6))
    if name == "additive mask of heads":
        bias = torch.randn(BATCH, HEADS, queries, keys, generator=random)
        return Call(pa.Mask(bias.masked_fill(bias > 1.0, float("-inf"))))
    if "documents" in name and "spanned" not in name:
        q = _documents(queries)
        k = _documents(keys)
        structure = pa.Packed.from_lengths(q, None if q == k else k)
        return Call(structure, {"causal": "causal" in name, "window": 2 if "window" in name else None}, batch=1)
    if name == "spanned documents":
        k = _documents(keys)
        return Call(
            pa.Packed.from_lengths(_documents(queries), k, spans=[[(0, min(2, n))] if n else [] for n in k]), batch=1
        )
    if name == "spans":
        return Call(pa.Spans([[(1, 4), (6, keys - 1)]] * BATCH))
    if name == "spans of each sample":
        return Call(pa.Spans([[(2, 7)], [(0, 1), (5, keys)]]))
    if name == "block map":
        kept = torch.rand(BATCH, HEADS, -(-queries // 4), -(-keys // 3), generator=random) < 0.5
        return Call(pa.BlockMap.from_mask(kept, 4, 3))
    if name == "video tiles":
        layout = pa.VideoLayout((queries - 2, 1, 1), prefix=(2,))
        return Call(pa.VideoTiles(layout, (2, 1, 1), topk=2), gate=True)
    raise AssertionError(name)


def _documents(rows: int) -> list[int]:
    """Documents of unequal length, an empty one among them, and two rows that belong to none."""
    first, second = rows // 3, rows // 2
    return [first, 0, second, rows - first - second - 2]


#: What every rank holds -> (joint front, prefix, suffix, joint rear) query rows, the same of keys, how it is given.
HELD: dict[str, tuple[tuple[int, int, int, int], tuple[int, int, int, int], str]] = {
    "nothing": ((0, 0, 0, 0), (0, 0, 0, 0), "counts"),
    "prefix counted": ((0, PREFIX, 0, 0), (0, PREFIX, 0, 0), "counts"),
    "prefix apart": ((0, PREFIX, 0, 0), (0, PREFIX, 0, 0), "apart"),
    "suffix counted": ((0, 0, SUFFIX, 0), (0, 0, SUFFIX, 0), "counts"),
    "suffix apart": ((0, 0, SUFFIX, 0), (0, 0, SUFFIX, 0), "apart"),
    "both counted": ((0, PREFIX, SUFFIX, 0), (0, PREFIX, SUFFIX, 0), "counts"),
    "both apart": ((0, PREFIX, SUFFIX, 0), (0, PREFIX, SUFFIX, 0), "apart"),
    "keys' prefix counted": ((0, 0, 0, 0), (0, PREFIX, 0, 0), "counts"),
    "keys' prefix apart": ((0, 0, 0, 0), (0, PREFIX, 0, 0), "apart"),
    "joint front": ((JOINT, 0, 0, 0), (JOINT, 0, 0, 0), "counts"),
    "joint rear": ((0, 0, 0, JOINT), (0, 0, 0, JOINT), "counts"),
    "joint keys": ((0, 0, 0, 0), (JOINT, 0, 0, 0), "counts"),
    "joint, prefix and suffix": ((JOINT, PREFIX, SUFFIX, 0), (JOINT, PREFIX, SUFFIX, 0), "apart"),
}
#: Structures that need as many queries as keys, which a prefix of keys alone denies.
SQUARE = ("video tiles",)


def outcome(
    group: dist.ProcessGroup, degrees: dict[str, Any], name: str, held: str, more: dict[str, Any] | None = None
) -> dict[str, float]:
    """The largest differences from one rank's answer: of the output, the LSE and, where asked for, the gradients."""
    more = dict(more or {})
    ask = {key: more.pop(key, default) for key, default in _ASKED.items()}
    (qf, qp, qs, qr), (kf, kp, ks, kr), given = HELD[held]
    queries, keys = qf + qp + ask["rows"] + qs + qr, kf + kp + ask["kv_rows"] + ks + kr
    call = call_of(name, queries, keys)
    batch = call.batch
    random = torch.Generator().manual_seed(3)
    heads, kv_heads = ask["heads"]

    def made(rows: int, heads: int, width: int) -> torch.Tensor:
        return torch.randn(batch, rows, heads, width, generator=random, dtype=ask["dtype"])

    q, k, v = made(queries, heads, WIDTH), made(keys, kv_heads, WIDTH), made(keys, kv_heads, V_WIDTH)
    if call.gate:
        v = made(keys, kv_heads, WIDTH)
    gate = made(queries, heads, v.shape[-1]) if call.gate else None
    parallel = SequenceParallel(**degrees, mesh=group)
    if ask["state"]:
        parallel = parallel.holding(ask["state"], ask["state_kv"])
    tensors = [q, k, v]
    whole = [tensor.clone().requires_grad_(ask["grad"]) for tensor in tensors]
    gates = None if gate is None else gate.clone().requires_grad_(ask["grad"])
    lse = not call.gate
    want = pa.attention(*whole, structure=call.structure, gate=gates, return_lse=lse, **call.arguments, **more)
    want_out, want_lse = want if lse else (want, None)

    mine = [tensor.clone().requires_grad_(ask["grad"]) for tensor in tensors]
    cuts = ((qf, qp, ask["rows"], qs, qr), (kf, kp, ask["kv_rows"], ks, kr), (kf, kp, ask["kv_rows"], ks, kr))
    parts = [tensor.split(cut, dim=1) for tensor, cut in zip(mine, cuts, strict=True)]
    complete = ask["complete"]
    local = [
        piece[2] if complete and letter else _strided(shard(piece[2], parallel), ask["strided"])
        for letter, piece in enumerate(parts)
    ]
    replicated, joint = None, None
    if qp or qs or kp or ks or complete:
        if given == "apart":
            replicated = pa.Replicated(
                prefix=tuple(piece[1] for piece in parts) if qp else None,
                suffix=tuple(piece[3] for piece in parts) if qs else None,
                kv_prefix=tuple(piece[1] for piece in parts[1:]) if kp and not qp else None,
                kv=complete,
            )
        else:
            local = [torch.cat([piece[1], rows, piece[3]], 1) for piece, rows in zip(parts, local, strict=True)]
            replicated = pa.Replicated(
                prefix=qp or None, suffix=qs or None, kv_prefix=kp if kp and not qp else None, kv=complete
            )
    if kf or kr:
        where, at = ("front", 0) if kf else ("rear", 4)
        joint = pa.Joint(*(piece[at] for piece in parts), where=where)
    if gate is not None:
        own_gate = gate.clone().requires_grad_(ask["grad"])
        g = own_gate.split(cuts[0], dim=1)
        gate = torch.cat([g[0], g[1], shard(g[2], parallel), g[3], g[4]], 1)
    out = pa.attention(
        *local, structure=call.structure, gate=gate, return_lse=lse, parallel=parallel, joint=joint,
        replicated=replicated, **call.arguments, **more,
    )  # fmt: skip
    out, out_lse = out if lse else (out, None)
    lead, trail = qf + qp, qs + qr
    rows = shard(torch.arange(ask["rows"]), parallel, dim=0) + lead
    rows = torch.cat([torch.arange(lead), rows, torch.arange(queries - trail, queries)])
    found = {"out": _apart(out, want_out[:, rows])}
    if lse:
        found["lse"] = _apart(out_lse, want_lse[:, :, rows])
    if ask["grad"]:
        weight = torch.randn(want_out.shape, generator=random, dtype=ask["dtype"])
        lse_weight = torch.randn(batch, heads, queries, generator=random)
        shares = torch.ones(queries)
        shares[:lead] = shares[queries - trail :] = 1 / parallel.world_size  # rows that all hold count once among them
        shares = shares[rows]
        loss = (want_out * weight).sum()
        mine_loss = (out * weight[:, rows] * shares[:, None, None]).sum()
        if lse and ask["lse_grad"]:
            loss = loss + (want_lse.masked_fill(want_lse.isinf(), 0.0) * lse_weight).sum()
            seen = out_lse.masked_fill(out_lse.isinf(), 0.0)
            mine_loss = mine_loss + (seen * lse_weight[:, :, rows] * shares).sum()
        loss.backward()
        mine_loss.backward()
        if gates is not None:
            whole, mine = [*whole, gates], [*mine, own_gate]
        for letter, one, several in zip(["q", "k", "v", "gate"], whole, mine, strict=False):
            total = several.grad
            dist.all_reduce(total, group=group)
            found[f"gradient of {letter}"] = _apart(total, one.grad)
    return found


_ASKED: dict[str, Any] = {
    "rows": ROWS, "kv_rows": ROWS, "heads": (HEADS, KV_HEADS), "state": ROWS, "state_kv": None, "complete": False,
    "grad": False, "lse_grad": True, "dtype": torch.float32, "strided": False,
}  # fmt: skip


def outcomes(
    group: dist.ProcessGroup, degrees: dict[str, Any], name: str, held: list[str], more: dict[str, Any] | None = None
) -> dict[str, dict[str, float]]:
    """`outcome` for each of what ranks may hold."""
    return {each: outcome(group, degrees, name, each, more) for each in held}


def _strided(tensor: torch.Tensor, strided: bool) -> torch.Tensor:
    """The same values with strides of another order and a gap in every row."""
    if not strided:
        return tensor
    wide = torch.empty(*tensor.permute(1, 2, 0, 3).shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    view = wide[..., : tensor.shape[-1]].permute(2, 0, 1, 3)
    return view.copy_(tensor)


def _apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference; infinite where one is not finite and the other is another."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    if got.numel() == 0:
        return 0.0
    same = (got == want) | ((got - want).abs() < float("inf"))
    return (got - want).abs().masked_fill(got == want, 0.0).max().item() if bool(same.all()) else float("inf")
