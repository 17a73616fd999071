"""A small Wan video transformer from diffusers: its self-attention dense and tile-sparse, with the error and the time.

pip install "polyattn[diffusers]"; python examples/wan_video.py [--frames 32] [--device cuda]

The weights are random, so that nothing is downloaded. Their attention is spread over all of the video, which few tiles
cannot hold, and most of the answer comes past it; a checkpoint distilled for sparse attention behaves otherwise.
"""

import argparse
import time
from collections.abc import Callable

import torch
from diffusers import WanTransformer3DModel

import polyattn as pa

TILE = (4, 4, 4)
PATCH = (1, 2, 2)
HEADS, HEAD_DIM, LAYERS, TEXT = 2, 64, 2, 16


class VideoSelfAttention:
    """A processor for `WanAttention`: rows of the video attend by `structure`, which all layers share."""

    def __init__(self, structure: pa.Dense | pa.VideoTiles) -> None:
        self.structure = structure

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        """hidden_states [B,S,heads*head_dim] -> the same shape."""
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("this processor is for the self-attention of a whole video")
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states)), attn.to_v(hidden_states)
        q, k, v = (rows.unflatten(2, (attn.heads, -1)) for rows in (q, k, v))
        q, k = (rotated(rows, *rotary_emb) for rows in (q, k))
        out = pa.attention(q, k, v, structure=self.structure)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3)))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, on pairs of neighbouring channels, as Wan has them."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


def small_wan(device: str) -> WanTransformer3DModel:
    """Wan's architecture, a few layers of it."""
    model = WanTransformer3DModel(
        patch_size=PATCH, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM, in_channels=4, out_channels=4,
        text_dim=32, freq_dim=32, ffn_dim=256, num_layers=LAYERS, rope_max_seq_len=128,
    )  # fmt: skip
    return model.eval().to(device)


def attend_by(model: WanTransformer3DModel, structure: pa.Dense | pa.VideoTiles) -> None:
    """Every self-attention of the model attends by this structure from now on; cross attention stays as it is."""
    for block in model.blocks:
        block.attn1.set_processor(VideoSelfAttention(structure))


def timed(call: Callable[[], torch.Tensor], device: str) -> tuple[torch.Tensor, float]:
    """The answer, and the least milliseconds of three calls after a first."""
    answer = call()
    taken = []
    for _ in range(3):
        if device != "cpu":
            torch.accelerator.synchronize()
        start = time.perf_counter()
        answer = call()
        if device != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - start)
    return answer, 1e3 * min(taken)


def apart(this: torch.Tensor, that: torch.Tensor) -> float:
    """The relative error of `this`, by norms."""
    return ((this - that).norm() / that.norm()).item()


def main() -> None:
    """Dense, then fewer and fewer tiles of the same video."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="height and width of the latent video")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = small_wan(asked.device)
    latents = torch.randn(1, 4, asked.frames, asked.size, asked.size, device=asked.device)
    text = torch.randn(1, TEXT, 32, device=asked.device)
    step = torch.tensor([500], device=asked.device)
    layout = pa.VideoLayout(tuple(size // patch for size, patch in zip(latents.shape[2:], PATCH, strict=True)))

    def denoised() -> torch.Tensor:
        return model(latents, step, text, return_dict=False)[0]

    first_layer = {}
    model.blocks[0].attn1.register_forward_hook(lambda module, inputs, out: first_layer.update(out=out))

    with torch.inference_mode():
        stock = denoised()
        attend_by(model, pa.Dense())
        dense, dense_ms = timed(denoised, asked.device)
        print(f"{layout.rows} tokens, {LAYERS} layers; our dense attention differs from diffusers' own by", end=" ")
        print(f"{(dense - stock).abs().max().item():.1e}")
        whole = first_layer["out"]
        print(f"{'tiles kept':>12} {'ms':>8} {'dense / this':>13} {'error, model':>13} {'error, layer':>13}  route")
        for sparsity in (0.0, 0.5, 0.8, 0.9):
            structure = pa.VideoTiles(layout, TILE, sparsity=sparsity, keep_sparse_numerics=True)
            attend_by(model, structure)
            with pa.record_routes() as log:
                sparse, ms = timed(denoised, asked.device)
            errors = apart(sparse, dense), apart(first_layer["out"], whole)
            kept = f"{structure.kept} of {structure.num_tiles}"
            names = ", ".join(sorted({entry.route for entry in log.entries}))
            print(f"{kept:>12} {ms:8.1f} {dense_ms / ms:12.2f}x {errors[0]:13.1e} {errors[1]:13.1e}  {names}")


if __name__ == "__main__":
    main()
