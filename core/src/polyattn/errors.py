"""The two errors a caller meets when no backend can serve a call; both say what, why not, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

_Self = TypeVar("_Self", bound="_Refusal")


class _Refusal(Exception):
    """What a refusal carries beside its text. No __init__ of its own: Dynamo raises these inside graphs too.

    backend   the choice as asked, or None
    platform  the platform that was asked, or None
    reasons   backend name -> its reasons
    """

    backend: str | None = None
    platform: str | None = None
    reasons: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @classmethod
    def because(
        cls: type[_Self],
        message: str,
        *,
        backend: str | None = None,
        platform: str | None = None,
        reasons: Mapping[str, tuple[str, ...]] | None = None,
    ) -> _Self:
        """The error with its fields filled in."""
        error = cls(message)
        error.backend, error.platform, error.reasons = backend, platform, dict(reasons or {})
        return error


class UnsupportedRequest(_Refusal, ValueError, NotImplementedError):
    """The request is valid, but no eligible backend can run it. Fields: `backend`, `platform`, `reasons`.

    >>> import polyattn as pa
    >>> issubclass(pa.UnsupportedRequest, ValueError)
    True
    """


class BackendUnavailable(_Refusal, ImportError, ValueError):
    """A backend or platform that was asked for by name is not installed or did not load. Fields as above.

    >>> import polyattn as pa
    >>> issubclass(pa.BackendUnavailable, ImportError)
    True
    """
