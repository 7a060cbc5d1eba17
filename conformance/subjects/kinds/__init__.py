"""The kinds of subject beside hooks: their options, claims and scenarios. Imports no torch.

Each has one module here, which says what ranks are given; one in ``drive``, which is what ranks do with it; and one section of
the rule book, which says what must hold of their records. The way from the command line to a certificate is that of hooks.
"""

from conformance.subjects.kinds._kind import Kind
from conformance.subjects.kinds.averager import AVERAGER
from conformance.subjects.kinds.collective import COLLECTIVE
from conformance.subjects.kinds.hook import HOOK as _HOOK
from conformance.subjects.kinds.joinable import JOINABLE
from conformance.subjects.kinds.optimizer import OPTIMIZER
from conformance.subjects.kinds.strategy import STRATEGY
from conformance.subjects.kinds.wrapper import WRAPPER

HOOK = "hook"
KINDS: dict[str, Kind] = {kind.name: kind for kind in (_HOOK, AVERAGER, OPTIMIZER, STRATEGY, JOINABLE, COLLECTIVE, WRAPPER)}


def kind_of(section: str) -> str:
    """Return the kind of subject that a section of the rule book speaks of."""
    return next(kind.name for kind in KINDS.values() if section in kind.sections)


__all__ = ["HOOK", "KINDS", "Kind", "kind_of"]
