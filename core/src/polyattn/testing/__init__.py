"""The conformance kit: every structure, dtype, stride and edge, against the reference, for any backend.

    pytest -p polyattn.testing.plugin --pyargs polyattn.testing --polyattn-backend cuda:fa3

or `run_conformance("cuda:fa3")` without pytest. Importing this package imports neither torch nor pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyattn.testing.conformance import Failure, Report, run_conformance

__all__ = ["Failure", "Report", "run_conformance"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'polyattn.testing' has no attribute {name!r}")
    from polyattn.testing import conformance

    return getattr(conformance, name)
