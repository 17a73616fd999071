"""The plain meaning of every structure, written for reading: the oracle. It shares no code with any fast path."""

from polyattn.reference.attention import reference_attention

__all__ = ["reference_attention"]
