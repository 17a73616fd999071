"""A padded batch in a small encoder: one KeyPadding serves every layer, and padding holds no influence."""

import torch

import polyattn as pa


class Block(torch.nn.Module):
    """Self-attention with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.attention = pa.Attention(heads, width // heads)

    def forward(self, x: torch.Tensor, padding: pa.KeyPadding) -> torch.Tensor:
        """x [B,S,width] -> [B,S,width]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return x + self.attention(q, k, v, padding).flatten(-2)


def main() -> None:
    """Run four layers over rows of 50, 20 and 7 tokens, then the same tokens with other padding."""
    torch.manual_seed(0)
    lengths = [50, 20, 7]
    layers = [Block(64, 4) for _ in range(4)]
    padding = pa.KeyPadding.from_lengths(lengths, max(lengths))
    x = torch.randn(3, 50, 64)
    noise = x.clone()
    for row, length in enumerate(lengths):
        noise[row, length:] = torch.randn(50 - length, 64)

    with torch.inference_mode():
        for layer in layers:
            x, noise = layer(x, padding), layer(noise, padding)

    kept = padding.keep
    print("kept rows differ by", (x - noise)[kept].abs().max().item(), "when the padding holds other values")
    print(
        "the structure was prepared",
        padding.builds,
        "time for",
        len(layers),
        "layers; route",
        layer.attention.last_route.name,
    )


if __name__ == "__main__":
    main()
