"""The subject of a certificate, and the strings that name it.

The command line names a subject with strings, and the judging process keeps them as strings. Only
ranks import the objects that the strings name (``ranks.resolve``). A package can also describe
itself: ``--hook mypkg:subject`` may name a :class:`Subject`, and ``--setup`` functions may return a
:class:`Case`.
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
        claims: as in ``--claims``; None leaves them to pyproject.toml or to the default, exact.
    """

    hook: Any = None
    state: Any = None
    setup: Callable[..., Any] | None = None
    claims: str | None = None


@dataclass
class Case:
    """The result of a ``--setup`` function for one DDP module.

    Attributes:
        state: the state to register, if ``hook`` is given.
        hook: the hook to register; None if the set-up has registered the hook itself.
        on_step: called with the step number before each forward.
        after_backward: called after each backward, before gradients are read.
        close: called when the run is over; stop threads here.
        saved: the object that ``checkpointable`` saves and loads, if it is not ``state``: for
            example the optimizer of a fused hook.
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
        kind: the kind of the subject.
        target: of another kind, as in the option of the kind's name.
    """

    hook: str | None = None
    state: str | None = None
    setup: str | None = None
    kind: str = HOOK
    target: str | None = None

    @property
    def name(self) -> str:
        """The string that names the subject to people."""
        return self.target or self.hook or self.setup or "vanilla"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments in the target."""
        target = self.target or self.hook
        return parse_target(target, f"--{self.kind}").kwargs if target else {}

    def to_json(self) -> dict[str, Any]:
        """Return the strings by name."""
        return asdict(self)


def make_spec(
    kind: str,
    target: str | None,
    state: str | None = None,
    setup: str | None = None,
) -> SubjectSpec:
    """Check the strings that name a subject, without importing anything.

    Args:
        kind: the kind of the subject.
        target: as in the option of the kind's name.
        state, setup: of a hook, as in the options of these names.

    Raises:
        UsageError: the strings do not name one subject, or one of them cannot be parsed.
    """
    if kind != HOOK and (state or setup):
        raise UsageError(f"--state and --setup belong to a hook, not to {KINDS[kind].with_article}")
    if bool(target) == bool(setup):
        alternative = ", or --setup module:function" if kind == HOOK else ""
        raise UsageError(f"name one subject: --{kind} module:attribute{alternative}")
    if target:
        parse_target(target, f"--{kind}")
    if setup:
        parse_target(setup, "--setup")
    if state and state not in CONTEXT_NAMES:
        parse_target(state, "--state")
    # Certificates hold the target of a hook under a name of its own.
    if kind == HOOK:
        return SubjectSpec(hook=target, state=state, setup=setup)
    return SubjectSpec(kind=kind, target=target)


def parse_subject(hook: str | None, state: str | None, setup: str | None) -> SubjectSpec:
    """Check the strings of ``--hook``, ``--state`` and ``--setup``; see :func:`make_spec`."""
    return make_spec(HOOK, hook, state, setup)


def parse_other(kind: str, target: str) -> SubjectSpec:
    """Check the string that names a subject of another kind; see :func:`make_spec`."""
    return make_spec(kind, target)


def reference_of(kind: str) -> SubjectSpec:
    """Return the reference of a kind: the control, which is judged in every run."""
    return make_spec(kind, KINDS[kind].reference)


REFERENCE = reference_of(HOOK)
