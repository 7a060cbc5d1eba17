"""The declaration of a claim, from which everything else about the claim is derived."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance.subjects.arguments import split_at_commas, write_call, write_named

if TYPE_CHECKING:
    from conformance.subjects.claims import Claims

# Takes the arguments by position, as text, and those with names; returns the values of the claim.
# Raises ValueError with the reason, beginning with a verb: "takes no arguments".
Reader = Callable[[list[str], dict[str, Any]], dict[str, Any]]
# Returns the claim as typed, or None if the subject does not make it.
Writer = Callable[["Claims"], str | None]


@dataclass(frozen=True)
class Form:
    """A way to type a claim, with its meaning; a row in the tables of claims.

    Attributes:
        text: an example, as typed.
        meaning: one plain sentence.
        judged_by: the rules that hold a subject to the claim; None if the claim only selects runs.
    """

    text: str
    meaning: str
    judged_by: str | None


@dataclass(frozen=True)
class Claim:
    """A claim that subjects of a kind can make.

    Attributes:
        name: the word that the claim begins with.
        forms: the ways to type it.
        read: parses its arguments into its values.
        write: turns the values back into text.
        sets_fields: the values are fields of ``Claims``; otherwise they are kept together in
            ``Claims.options``, under the claim's name.
    """

    name: str
    forms: tuple[Form, ...]
    read: Reader
    write: Writer
    sets_fields: bool = False


def table(*claims: Claim) -> Mapping[str, Claim]:
    """Return claims by name. Those that set fields of ``Claims`` are written in this order."""
    return {claim.name: claim for claim in claims}


# ---- Claims that are kept in Claims.options


def option_claim(name: str, *forms: Form, read: Reader) -> Claim:
    """Return a claim that is kept in ``Claims.options``.

    Args:
        name: the word that the claim begins with.
        forms: the ways to type it.
        read: returns its values; the value called ``name`` is its argument by position.
    """

    def write(claims: "Claims") -> str | None:
        if name not in claims.options:
            return None
        values = dict(claims.options[name])
        positional = values.pop("name", "")
        return write_call(name, positional, *write_named(values.items()))

    return Claim(name, forms, read, write)


def option_flag(name: str, meaning: str, judged_by: str) -> Claim:
    """Return a claim without arguments that is kept in ``Claims.options``."""
    return option_claim(name, Form(name, meaning, judged_by), read=no_arguments)


# ---- Claims that set fields of Claims


def field_flag(name: str, meaning: str, judged_by: str) -> Claim:
    """Return a claim without arguments that sets the field of its name to true."""

    def read(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
        no_arguments(args, options)
        return {name: True}

    def write(claims: "Claims") -> str | None:
        return name if getattr(claims, name) else None

    return Claim(name, (Form(name, meaning, judged_by),), read, write, sets_fields=True)


def min_world_size(judged_by: str | None = None) -> Claim:
    """Return the claim of every kind that its subjects need some number of ranks.

    Args:
        judged_by: the rule of the kind that runs a subject on fewer ranks, if there is one.
    """
    meaning = (
        "The subject takes groups of two ranks or more, and refuses smaller groups with an error."
        if judged_by
        else "The subject takes groups of two ranks or more; smaller groups are not judged."
    )

    def read(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
        # A certificate covers world sizes up to 4.
        if len(args) != 1 or options or args[0] not in ("2", "3", "4"):
            raise ValueError("takes a number of ranks from 2 to 4: min_world_size(2)")
        return {"min_world_size": int(args[0])}

    def write(claims: "Claims") -> str | None:
        size = claims.min_world_size
        return f"min_world_size({size})" if size else None

    forms = (Form("min_world_size(2)", meaning, judged_by),)
    return Claim("min_world_size", forms, read, write, sets_fields=True)


# ---- like(REFERENCE, key=value, ...)


@dataclass(frozen=True)
class Reference:
    """A reference of ``hooks_ref`` that a subject can claim to be like.

    Attributes:
        target: the reference, as in the option of its kind.
        seed: the option that takes the seed, or None if the reference draws no random numbers.
        has_state: the options belong to the state, not to the target.
    """

    target: str
    seed: str | None = None
    has_state: bool = False


def read_reference(names: Collection[str]) -> Callable[[list[str], dict[str, Any]], str]:
    """Return a function that parses ``NAME, key=value, ...`` into the text ``NAME,key=value``."""

    def read(args: list[str], options: dict[str, Any]) -> str:
        if len(args) != 1 or args[0] not in names:
            given = ", ".join(args) or "none"
            raise ValueError(
                f"takes a reference of hooks_ref, and the options to make it with; "
                f"one of {', '.join(names)}; got {given}"
            )
        return ",".join([args[0], *write_named(options.items())])

    return read


def write_reference(text: str) -> str:
    """Return the claim to be like a reference, from the text of :func:`read_reference`."""
    return write_call("like", *split_at_commas(text))


# ---- Readers


def no_arguments(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Read a claim without arguments."""
    if args or options:
        raise ValueError("takes no arguments")
    return {}


def read_name(known: Collection[str]) -> Reader:
    """Return the reader of a claim that takes one of these names."""

    def read(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
        if len(args) != 1 or args[0] not in known or options:
            raise ValueError(f"takes one of {', '.join(known)}")
        return {"name": args[0]}

    return read


def whole_number(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least ``least``, or raise ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"takes {name}, a whole number from {least} on; got {value!r}")
    return value


def is_number(value: Any) -> bool:
    """Whether a value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
