"""What detection says of each candidate: plain facts, one readable line, JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["accepted", "declined", "failed", "skipped"]


@dataclass(frozen=True)
class PlatformReport:
    """One platform candidate and what became of it.

    status        accepted: usable devices were found. declined: it said no, or speaks another API level.
                  failed: broken, squatting, clashing. skipped: not asked, its module was never imported
    entry_point   the entry point's value, "module:attribute"
    reason        why it was not accepted ("" when it was)
    detail        what its probe saw, and a remark when it was slow
    seconds       time to import it and to probe (0.0 when it was not asked)
    traceback     where a failed one broke
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    status: Status
    reason: str = ""
    detail: str = ""
    device_type: str | None = None
    priority: int | None = None
    api: int | None = None
    devices: int | None = None
    seconds: float = 0.0
    traceback: str = ""

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    def __str__(self) -> str:
        facts = f"device type {self.device_type}, priority {self.priority}" if self.status == "accepted" else ""
        said = "; ".join(text for text in (facts, self.reason, self.detail) if text)
        return f"{self.name}: {self.status} ({self.distribution} {self.version}): {said}"


@dataclass(frozen=True)
class BackendReport:
    """One third-party backend (entry point "<platform>.<backend>") and what became of it; fields as above."""

    platform: str
    backend: str
    distribution: str
    version: str
    entry_point: str
    status: Status
    reason: str = ""
    traceback: str = ""

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    def __str__(self) -> str:
        said = f": {self.reason}" if self.reason else ""
        return f"{self.platform}:{self.backend}: {self.status} ({self.distribution} {self.version}){said}"
