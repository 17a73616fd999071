"""What every structure is tried with: heads, head dims, strides, scores, positions, and what is asked back."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from polyattn.testing.cases.call import Call, Case, Window, edges, edges_without_lse
from polyattn.testing.cases.maker import PLAIN, Heads, Maker, contiguous_buffer, strided_buffer

HEAD_DIMS = (16, 40, 64, 72, 80, 96, 128, 256)


class Base(Protocol):
    """A structure's plain call, open to other heads and to the arguments that score and position take."""

    def __call__(
        self,
        make: Maker,
        heads: Heads = PLAIN,
        *,
        causal: bool = ...,
        scale: float | None = ...,
        window: Window | None = ...,
        softcap: float = ...,
    ) -> Call: ...


def variations(structure: str, base: Base) -> tuple[Case, ...]:
    """One thing at a time away from the plain call, so that a failure names its cause."""
    return (
        *_heads(structure, base),
        *_strides(structure, base),
        *edges(
            structure,
            {
                "scale_zero": partial(base, scale=0.0),
                "scale_given": partial(base, scale=0.37),
                "scale_negative": partial(base, scale=-0.2),
                "softcap": partial(base, softcap=1.5),
            },
        ),
        *_asks(structure, base),
    )


def positions(structure: str, base: Base) -> tuple[Case, ...]:
    """Causal and windows, for the structures that combine with them."""
    windows: dict[str, Window] = {
        "window_left": (2, 0),
        "window_both": (1, 2),
        "window_right_unbounded": (1, None),
        "window_left_unbounded": (None, 1),
        "window_itself": (0, 0),
        "window_integer": 2,
    }
    return (
        *edges(structure, {"causal": partial(base, causal=True)}),
        *edges(structure, {name: partial(base, window=window) for name, window in windows.items()}),
        *edges(
            structure,
            {
                "causal_window": partial(base, causal=True, window=2),
                # A kernel that hides by -inf before it scales makes NaN of these.
                "causal_scale_zero": partial(base, causal=True, scale=0.0),
                "causal_scale_negative": partial(base, causal=True, scale=-0.2),
                "window_scale_zero": partial(base, window=(1, 1), scale=0.0),
                "causal_softcap_gqa": partial(base, heads=Heads(4, 2), causal=True, softcap=1.5),
                "causal_window_gqa": partial(base, heads=Heads(4, 1), causal=True, window=(1, 0)),
                "causal_v_dim": partial(base, heads=Heads(v_dim=32), causal=True),
            },
        ),
    )


def _heads(structure: str, base: Base) -> tuple[Case, ...]:
    several = {
        "plain": PLAIN,
        "one_head": Heads(1, 1),
        "gqa": Heads(6, 2),
        "mqa": Heads(4, 1),
        "v_dim_narrower": Heads(v_dim=32),
        "v_dim_wider": Heads(v_dim=128),
        "v_dim_192_128": Heads(head_dim=192, v_dim=128),
        "gqa_v_dim": Heads(4, 2, v_dim=32),
    }
    sizes = {f"head_dim_{size}": Heads(head_dim=size) for size in HEAD_DIMS}
    return (
        *edges(structure, {name: partial(base, heads=heads) for name, heads in several.items()}),
        *edges_without_lse(structure, {name: partial(base, heads=heads) for name, heads in sizes.items()}),
    )


def _strides(structure: str, base: Base) -> tuple[Case, ...]:
    everything = {
        f"strides_{name}": Heads(strides=(name,) * 3)
        for name in ("transposed", "fused", "stepped", "misaligned", "row_gaps")
    }
    only = {
        "strides_only_v": Heads(strides=("contiguous", "contiguous", "transposed")),
        "strides_only_q": Heads(strides=("transposed", "contiguous", "contiguous")),
        "strides_expanded_kv": Heads(strides=("contiguous", "one_head", "one_head")),
        "strides_gqa_fused": Heads(4, 2, strides=("contiguous", "fused", "fused")),
    }
    return edges_without_lse(
        structure, {name: partial(base, heads=heads) for name, heads in (everything | only).items()}
    )


def _asks(structure: str, base: Base) -> tuple[Case, ...]:
    gqa: partial[Call] = partial(base, heads=Heads(4, 2))
    return (
        Case(f"{structure}/out", structure, base, buffer=contiguous_buffer),
        Case(f"{structure}/out_strided", structure, base, buffer=strided_buffer),
        Case(f"{structure}/out+lse", structure, base, lse=True, buffer=contiguous_buffer),
        Case(f"{structure}/out_gqa", structure, gqa, buffer=contiguous_buffer),
        Case(f"{structure}/lse+grad", structure, base, lse=True, grad=True),
        Case(f"{structure}/deterministic", structure, base, deterministic=True),
        Case(f"{structure}/deterministic+grad", structure, base, grad=True, deterministic=True),
        Case(f"{structure}/deterministic_gqa+grad", structure, gqa, grad=True, deterministic=True),
    )
