"""What a command needs before it starts: torch, a platform, and arguments that name one thing in one way."""

from __future__ import annotations

from polyattn.choice import check_names, parse_choice
from polyattn.cli.failure import UsageError
from polyattn.cli.torch_facts import torch_facts
from polyattn.discovery import all_backend_names, backends_of, current_platform
from polyattn.environment import environment
from polyattn.errors import BackendUnavailable
from polyattn.vendor import Platform


def need_torch() -> None:
    """Raise UsageError with the cause and the way out where torch cannot be imported."""
    facts = torch_facts()
    if "error" in facts:
        raise UsageError(f"torch cannot be imported: {facts['error'].rstrip('.')}. {facts['hint']}")


def need_platform() -> None:
    """Raise where our variables are malformed, or ask for a platform or a backend that nobody has."""
    try:
        check_environment_choice(current_platform.platform)
    except BackendUnavailable:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_environment_choice(platform: Platform) -> None:
    """Raise ValueError where POLYATTN_BACKEND names a backend that nobody has: every call would."""
    choice = environment().backend
    if choice is not None:
        here = [backend.name for backend in backends_of(platform)]
        check_names(parse_choice(choice, "environment"), platform.name, here, all_backend_names)


def split_backend(platform: str | None, backend: str | None) -> tuple[str | None, str | None]:
    """Platform and backend from "--platform cpu --backend sdpa" or "--backend cpu:sdpa".

    >>> split_backend(None, "cpu:sdpa")
    ('cpu', 'sdpa')
    """
    family, _, short = (backend or "").rpartition(":")
    if family and platform and family != platform:
        raise UsageError(f"--backend {backend} is of platform {family!r}, but --platform says {platform!r}")
    return platform or family or None, short or None
