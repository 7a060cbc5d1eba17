"""What is certified, and how it is named: a hook, or one of the other kinds (``kinds``).

The command line names a subject with strings; the process that judges keeps them as strings. Only
the ranks import what they name (``resolve.py``). A package can also describe itself: ``--hook
mypkg:subject`` may name a :class:`Subject`, and ``--setup`` functions may return a :class:`Case`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from conformance.errors import UsageError
from conformance.subjects.kinds import HOOK, KINDS
from conformance.subjects.target import parse_target

CONTEXT_NAMES = ("process_group", "pg", "model", "rank", "world_size", "device", "optimizer")


@dataclass(frozen=True)
class Subject:
    """A hook with its state and claims, described beside the hook.

    Attributes:
        hook: the communication hook, ``(state, bucket) -> Future[Tensor]``.
        state: the state itself, or a factory that takes any of ``CONTEXT_NAMES`` by name.
        setup: instead of hook: a function as ``--setup`` takes it.
        claims: as in ``--claims``; None means "as said elsewhere, or exact".
    """

    hook: Any = None
    state: Any = None
    setup: Callable[..., Any] | None = None
    claims: str | None = None


@dataclass
class Case:
    """What a ``--setup`` function made for one DDP module.

    Attributes:
        state: the state to register, if ``hook`` is given.
        hook: the hook to register; None when the set-up registered it itself.
        on_step: called with the step number before each forward.
        after_backward: called after each backward, before gradients are read.
        close: called when the run is over; stop threads here.
        saved: what ``checkpointable`` saves and loads, where it is not ``state``, such as the optimizer of a fused hook.
    """

    state: Any = None
    hook: Any = None
    on_step: Callable[[int], object] | None = None
    after_backward: Callable[[], object] | None = None
    close: Callable[[], object] | None = None
    saved: Any = None


@dataclass(frozen=True)
class SubjectSpec:
    """The strings that name a subject; travels to the ranks as JSON.

    Attributes:
        hook, state, setup: of a hook, as in the options of these names.
        kind: of the subject.
        target: of a subject of another kind, as in the option that is called as the kind is.
    """

    hook: str | None = None
    state: str | None = None
    setup: str | None = None
    kind: str = HOOK
    target: str | None = None

    @property
    def name(self) -> str:
        return self.target or self.hook or self.setup or "vanilla"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments in the target of another kind than a hook."""
        return parse_target(self.target, f"--{self.kind}").kwargs if self.target else {}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


REFERENCE = SubjectSpec(hook="hooks_ref:allreduce_hook")


def parse_subject(hook: str | None, state: str | None, setup: str | None) -> SubjectSpec:
    """Check the strings of ``--hook``, ``--state`` and ``--setup`` without importing anything.

    Raises:
        UsageError: neither or both of hook and setup are given, or one cannot be parsed.
    """
    if bool(hook) == bool(setup):
        raise UsageError("name one subject: --hook module:attribute, or --setup module:function")
    for option, text in (("--hook", hook), ("--setup", setup)):
        if text:
            parse_target(text, option)
    if state and state not in CONTEXT_NAMES:
        parse_target(state, "--state")
    return SubjectSpec(hook, state, setup)


def reference_of(kind: str) -> SubjectSpec:
    """Return the reference of a kind: the subject that every control run judges."""
    return parse_other(kind, KINDS[kind].reference) if kind != HOOK else REFERENCE


def parse_other(kind: str, target: str) -> SubjectSpec:
    """Check the string that names a subject of another kind.

    Raises:
        UsageError: it cannot be parsed.
    """
    parse_target(target, f"--{kind}")
    return SubjectSpec(kind=kind, target=target)
