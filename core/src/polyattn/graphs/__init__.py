"""Device graphs of modules whose attention cannot always be captured: segments, with eager calls between them."""

from polyattn.graphs.breakable import BreakableGraph

__all__ = ["BreakableGraph"]
