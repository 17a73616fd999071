"""The two errors a caller meets when no backend can serve a call; both say what, why not, and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class UnsupportedRequest(ValueError, NotImplementedError):
    """The request is valid, but no eligible backend can run it.

    Fields: `platform`, `backend` (the choice as asked, or None), `reasons` (backend name -> its reasons).

    >>> import polyattn as pa
    >>> issubclass(pa.UnsupportedRequest, ValueError)
    True
    """

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        platform: str | None = None,
        reasons: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        super().__init__(message)
        self.backend, self.platform, self.reasons = backend, platform, dict(reasons or {})


class BackendUnavailable(ImportError, ValueError):
    """A backend or platform that was asked for by name is not installed or did not load.

    Fields as in `UnsupportedRequest`.

    >>> import polyattn as pa
    >>> issubclass(pa.BackendUnavailable, ImportError)
    True
    """

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        platform: str | None = None,
        reasons: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        super().__init__(message)
        self.backend, self.platform, self.reasons = backend, platform, dict(reasons or {})
