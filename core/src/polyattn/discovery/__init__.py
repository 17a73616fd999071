"""Which platforms and backends this process has: found through entry points, once, lazily, each with its reason."""

from polyattn.discovery.backends import all_backend_names, backend_reports, backends_of
from polyattn.discovery.current import CurrentPlatform, current_platform
from polyattn.discovery.report import BackendReport, PlatformReport
from polyattn.discovery.state import installed_platform, platform_for, platforms

__all__ = [
    "BackendReport",
    "CurrentPlatform",
    "PlatformReport",
    "all_backend_names",
    "backend_reports",
    "backends_of",
    "current_platform",
    "installed_platform",
    "platform_for",
    "platforms",
]
