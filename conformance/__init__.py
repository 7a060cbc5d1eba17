"""The conformance kit for gradient synchronisation in PyTorch.

pytest --pyargs conformance --hook mypkg:myhook
python -m conformance certify --hook mypkg:myhook

from conformance import certify          # in a test suite of your own
from conformance import Case, Subject    # beside a hook, to describe it
from conformance import watch            # in a training run
"""

from typing import TYPE_CHECKING, Any

from conformance.subjects.spec import Case, Subject

if TYPE_CHECKING:
    from conformance.session.certify import certify
    from conformance.session.options import Options
    from conformance.watching.judge import Finding
    from conformance.watching.watcher import Drift, Watcher, watch

__version__ = "0.1.0"

__all__ = ["Case", "Drift", "Finding", "Options", "Subject", "Watcher", "certify", "watch"]


def __getattr__(name: str) -> Any:
    # Ranks import this package beside the subject: the controller's modules are loaded on first
    # use.
    if name in ("Options", "certify"):
        import conformance.session.certify

        return getattr(conformance.session.certify, name)
    if name in ("Drift", "Finding", "Watcher", "watch"):
        import conformance.watching.watcher

        return getattr(conformance.watching.watcher, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
