"""Inputs of the fault cases: with q = 0 an answer is the plain mean of v over the visible keys, and any leak shows."""

import torch


def values(*rows, heads=2, dim=64, dtype=torch.float32):
    """[S, H, D] whose row s is filled with rows[s]."""
    return torch.tensor(rows, dtype=dtype).reshape(-1, 1, 1).expand(-1, heads, dim).contiguous()


def batch(*samples, **kind):
    """[B, S, H, D] of `values`."""
    return torch.stack([values(*rows, **kind) for rows in samples])


def assert_rows(out, expected, tolerance=1e-6):
    """Every head and channel of row s holds expected[s]."""
    want = torch.tensor(expected, dtype=out.dtype)[..., None, None].expand_as(out)
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
