"""The first call: two prompts of different length attend to themselves, and padding never matters."""

import torch

import polyattn as pa

q, k, v = (torch.randn(2, 128, 8, 64) for _ in range(3))  # [batch, rows, heads, head_dim]
padding = pa.KeyPadding.from_lengths([128, 40], 128)  # build it once, share it between all layers

out = pa.attention(q, k, v, structure=padding)

print(out.shape, "padded rows are zero:", bool(out[1, 40:].eq(0).all()))
print(pa.explain(q, k, v, structure=padding))  # which backend runs this, and why the others do not
