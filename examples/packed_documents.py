"""Packed documents: rows of different lengths side by side, no padding, and no document sees another."""

import torch

import polyattn as pa


def main() -> None:
    """Attend within four documents in one call, and compare with one call a document."""
    torch.manual_seed(0)
    lengths = [300, 12, 75, 1]
    q, k, v = (torch.randn(sum(lengths), 8, 64) for _ in range(3))  # [tokens, heads, head_dim]
    documents = pa.Packed.from_lengths(lengths)

    with pa.record_routes() as log:
        packed = pa.attention(q, k, v, structure=documents, causal=True)
    print("route:", ", ".join(entry.route for entry in log.entries))

    rows = [t.split(lengths) for t in (q, k, v)]
    alone = [pa.attention(*(t[None] for t in one), causal=True)[0] for one in zip(*rows, strict=True)]
    print("largest difference from one call a document:", (packed - torch.cat(alone)).abs().max().item())


if __name__ == "__main__":
    main()
