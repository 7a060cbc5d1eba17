"""The kinds of subject: their options, claims and scenarios. Imports no torch.

A kind consists of four modules, each called as the kind is, and a field of options:

- here, ``NAME = Kind(...)``: its claims, each declared once as a ``Claim``, and its scenarios;
  enter it in ``KINDS`` below;
- ``scenarios/NAME.py``: the runs of a subject;
- ``ranks/drivers/NAME.py``: a ``RankDriver``, which runs the subject on a rank;
- ``rules/section_N_NAMES.py``: the requirements on the records of these runs, in a section of
  their own;
- the field ``NAME`` of ``session.options.Options``, for the option ``--NAME``.

A reference in ``hooks_ref`` is the control; ``Kind.reference`` is its target. The options of the
command line, the parser of claims, the tables of claims and the tests of all of them read
``KINDS``. No other code depends on the kind.
"""

from conformance.subjects.kinds._claim import Claim, Form, Reference
from conformance.subjects.kinds._kind import Kind
from conformance.subjects.kinds.averager import AVERAGER
from conformance.subjects.kinds.collective import COLLECTIVE
from conformance.subjects.kinds.hook import HOOK as _HOOK
from conformance.subjects.kinds.joinable import JOINABLE
from conformance.subjects.kinds.optimizer import OPTIMIZER
from conformance.subjects.kinds.strategy import STRATEGY
from conformance.subjects.kinds.wrapper import WRAPPER

_ALL = (_HOOK, AVERAGER, OPTIMIZER, STRATEGY, JOINABLE, COLLECTIVE, WRAPPER)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
HOOK = _HOOK.name


def kind_of(section: str) -> str:
    """Return the kind of subject to which a section of the rule book applies."""
    return next(kind.name for kind in KINDS.values() if section in kind.sections)


__all__ = ["HOOK", "KINDS", "Claim", "Form", "Kind", "Reference", "kind_of"]
