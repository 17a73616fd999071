"""What the conformance kit asks of a backend, as requests: to be put to the resolver for a machine that is not here."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from polyattn.testing.asking import ask, explained
from polyattn.testing.cases import ALL_CASES
from polyattn.testing.targets import targets
from polyattn.vendor import Request


def kit_requests(device: str) -> list[Request]:
    """Of float16, with tensors on `device`; without video tiles, whose tensors take long to make."""
    return [replace(request, device=device) for request in _on_the_cpu()]


@cache
def _on_the_cpu() -> tuple[Request, ...]:
    (target,) = targets("cpu", "blocked")
    cases = [case for case in ALL_CASES if case.structure != "video_tiles"]
    asked = (explained(ask(case, target, torch.float16)).request for case in cases)
    return tuple(dict.fromkeys(asked))
