"""The kinds of subject: their options, claims and scenarios. Imports no torch.

A new kind, say ``sharding``, consists of one module in each of these packages, and their entries:

- ``subjects/kinds/sharding.py``: ``SHARDING = Kind(...)``, with each of its claims declared once as
  a ``Claim``, and its scenarios; entered in ``KINDS`` below;
- ``scenarios/sharding.py``: the runs of a subject;
- ``ranks/drivers/sharding.py``: a ``RankDriver``, which runs the subject on a rank; entered in
  ``ranks.rank._DRIVERS``;
- ``rules/section_N_sharding.py``: the requirements on the records of these runs, in a section of
  their own; its title is entered in ``judging.rule.SECTIONS``, its MUST rules in ``golden.txt``;
- the field ``sharding`` of ``session.options.Options``, for the option ``--sharding``, and the
  argument of ``session.certify.certify`` with this name.

A right implementation in ``hooks_ref`` is the control; ``Kind.reference`` is its target. The
command line, the parser of claims and the tables of claims are derived from ``KINDS``.
"""

import functools

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


@functools.cache
def kind_of(section: str) -> str:
    """Return the kind of subject to which a section of the rule book applies."""
    return next(kind.name for kind in KINDS.values() if section in kind.sections)


__all__ = ["HOOK", "KINDS", "Claim", "Form", "Kind", "Reference", "kind_of"]
