"""What there is to know of a kind of subject before torch is imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.scenarios.model import Scenario

# Takes the arguments and options that a claim was written with, and returns what it says; raises ValueError with what is wrong.
Reader = Callable[[list[str], dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A kind of subject.

    Attributes:
        name: also of its option, ``--averager``, and of the module of ``drive`` that has ranks work with such a subject.
        summary: one line for people.
        sections: of the rule book; their rules apply to this kind, and no others do.
        reference: the target that is judged beside every subject, as its control.
        scenarios: in which ranks work with it; the first is the plainest, and one that breaks it is judged in no other.
        claims: what it can say of itself, by name; each with what reads its arguments.
        default_claims: from the arguments in the target, what it says where nobody says anything: '' if nothing can be told from them.
        contradiction: what is missing from what it says, or contradicts itself; '' if nothing.
        adapt: a scenario as it is run for a subject that says so.
        default_reason: who makes the default claims, as the certificate names it.
        searches_claims: ``--claims auto`` can try claims for it.
        bound: it is a function that the kit calls again and again, rather than what makes an object on each rank.
    """

    name: str
    summary: str
    sections: tuple[str, ...]
    reference: str
    scenarios: tuple[Scenario, ...]
    claims: Mapping[str, Reader]
    default_claims: Callable[[Mapping[str, Any]], str]
    contradiction: Callable[[Mapping[str, Any]], str] = lambda said: ""
    adapt: Callable[[Scenario, Mapping[str, Any]], Scenario] = lambda scenario, said: scenario
    default_reason: str = "the arguments of the target"
    searches_claims: bool = False
    bound: bool = False


def flag(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Read a claim without arguments."""
    if args or options:
        raise ValueError("takes no arguments")
    return {}


def like(*names: str) -> Reader:
    """Return what reads ``like(NAME, option=value, ...)``, where NAME is one of these, which ``hooks_ref`` has."""

    def read(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
        if len(args) != 1 or args[0] not in names:
            raise ValueError(f"takes one of {', '.join(names)}, and the options to make it with; got {', '.join(args) or 'none'}")
        return {"name": args[0], "options": options}

    return read


def whole(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least ``least``, or raise ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"takes {name}, a whole number from {least} on; got {value!r}")
    return value
