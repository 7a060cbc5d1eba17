"""The claims of a subject, parsed from one line of text and written back.

Each kind of subject declares its claims in one table, ``Kind.claims`` (see ``kinds``). Everything
else is derived from it: the parser, the text of claims in certificates and records, error messages,
the help of ``--claims``, and the tables of claims in RULES.md and docs/your-hook.md.
"""

import difflib
import keyword
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.errors import UsageError
from conformance.subjects.arguments import parse_arguments, split_at_commas
from conformance.subjects.kinds import HOOK, KINDS, Claim, Form, Kind
from conformance.subjects.kinds._lossy import (
    CONTRACTION,
    DEFAULT_DELTA,
    DIFFERENCE,
    FEEDBACK,
    LOCAL,
    ROUNDED_DTYPES,
    UNBIASED,
)

AUTO = "auto"  # the value of --claims that tries claims
WITHOUT_CLAIMS = "what every"  # begins the text of a subject's claims if it makes none
_CLAIM = re.compile(r"(?P<name>[^\W\d]\w*)\s*(\((?P<arguments>.*)\))?", re.DOTALL)


@dataclass(frozen=True)
class Claims:
    """The claims that choose which result is right.

    Attributes:
        rounded: the dtype that values are rounded to on the way, or None.
        sum: the result is the sum over the group instead of the mean.
        scaled: factors before and after the sum are rounded, so that no result is exact.
        world_only: the group is always WORLD, whatever group the model lives on.
        lossy: how the result differs from the mean: FEEDBACK, DIFFERENCE, CONTRACTION, UNBIASED or
            LOCAL; '' if the result is not lossy.
        delta: of a compressor; see ``kinds.hook``.
        mixing: whether a local hook lets the gradients of all ranks meet.
        period: the steps in one of which a local hook gives the mean over all ranks; 0 if it claims
            none.
        noise: the deviation of the noise that a rank adds to each element; 0 for none.
        noise_of_one: one rank of the group adds it, and not each rank.
        warmup: steps before the first lossy one, as far as they are on record.
        long_warmup: all of these steps, if there are more than are on record; else 0.
        warmup_rounded: the dtype that values are rounded to in these steps, or None.
        fused: the optimizer that the hook steps, as an expression ``SGD(lr=0.1)``, or ''.
        after: steps before the first in which a fused hook steps its parameters.
        frees_gradients: a fused hook leaves no gradients when backward is over.
        like: the reference that gives the same results, as ``NAME,key=value``, or '' for none.
        dtypes: the names of the only dtypes that the subject takes; () for all.
        min_world_size: the smallest group that the subject takes; 0 for any.
        backends, devices: the names of the only ones that the subject takes; () for all.
        ratio: the largest share of the gradients' bytes that a rank sends after the warm-up, or
            None.
        checkpointable: the state can be saved and loaded.
        poststep: gradients are right only after the trainer has made a call when backward is over.
        call: the name of that call, or '' if it belongs to the set-up's Case.
        chained: callbacks start collectives.
        keeps_unused: what is held back of a parameter stays if no rank has used it in a step, whose
            backwards are under no_sync but for the last one.
        rescaled: the name of the function that is called after a change of the loss scale, or ''.
        kind: the kind of the subject.
        options: the values of the claims that have no field here, by claim, in the order in which
            they were typed. Claims of hooks all have fields.
    """

    rounded: str | None = None
    sum: bool = False
    scaled: bool = False
    world_only: bool = False
    lossy: str = ""
    delta: float = DEFAULT_DELTA
    mixing: bool = True
    period: int = 0
    noise: float = 0.0
    noise_of_one: bool = False
    warmup: int = 0
    long_warmup: int = 0
    warmup_rounded: str | None = None
    fused: str = ""
    after: int = 0
    frees_gradients: bool = False
    like: str = ""
    dtypes: tuple[str, ...] = ()
    min_world_size: int = 0
    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    ratio: float | None = None
    checkpointable: bool = False
    poststep: bool = False
    call: str = ""
    chained: bool = False
    keeps_unused: bool = False
    rescaled: str = ""
    kind: str = HOOK
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def has(self, name: str) -> bool:
        """Whether this is claimed."""
        return name in self.options or bool(getattr(self, name, False))

    @property
    def steps_of_warmup(self) -> int:
        """The number of steps before the first lossy one."""
        return self.long_warmup or self.warmup

    @property
    def of_warmup(self) -> "Claims":
        """The claims that choose the right result in the steps of the warm-up."""
        return Claims(rounded=self.warmup_rounded, world_only=self.world_only)

    @property
    def limits_bytes(self) -> bool:
        """Whether a share of the gradients' bytes is claimed, which may be 0."""
        return self.ratio is not None

    @property
    def mixes(self) -> bool:
        """Whether a local hook has to let the gradients of all ranks meet."""
        return self.lossy == LOCAL and self.mixing and self.ratio != 0

    @property
    def unbiased(self) -> bool:
        """Whether results are random, and right on average."""
        return self.lossy == UNBIASED

    def least_noise(self, ranks: int) -> float:
        """Return the deviation of the noise in the mean of so many ranks, which is larger if they
        draw the same."""
        return self.noise / (ranks if self.noise_of_one else math.sqrt(ranks))

    @property
    def holds_back(self) -> bool:
        """Whether the state holds parts of gradients, or estimates of them, for later steps."""
        return self.lossy in (FEEDBACK, DIFFERENCE)

    @property
    def reference(self) -> str:
        """The reference that the subject claims to be like, as ``NAME,key=value``."""
        return self.like or str(self.options["like"]["reference"])

    def __str__(self) -> str:
        known = KINDS[self.kind].claims
        # Options first, in the order typed; claims with fields in the order of their table. The
        # texts of certificates are compared, so this order stays.
        names = dict.fromkeys([*self.options, *known])
        texts = [known[name].write(self) for name in names]
        return ", ".join(text for text in texts if text) or f"{WITHOUT_CLAIMS} {self.kind} is"


# ---- Parsing


def parse_claims(text: str, kind: str = HOOK) -> Claims:
    """Parse claims as written on the command line.

    Args:
        text: the claims, separated by commas.
        kind: the kind of the subject.

    Raises:
        UsageError: the text is not a list of claims of this kind, or claims contradict each other.
    """
    if text == str(Claims(kind=kind)):
        return Claims(kind=kind)  # certificates and records hold this text for no claims
    subject_kind = KINDS[kind]
    claimed: dict[str, Mapping[str, Any]] = {}
    for part in _split(text, subject_kind):
        claim, values = _read(part, text, subject_kind)
        if claim.name in claimed:
            raise UsageError(f"--claims: {claim.name!r} is given twice in {text!r}")
        claimed[claim.name] = values
    reason = subject_kind.contradiction(claimed)
    if reason:
        raise UsageError(f"--claims: {text!r}: {reason}")
    fields: dict[str, Any] = {}
    options = {}
    for name, values in claimed.items():
        if subject_kind.claims[name].sets_fields:
            fields |= values
        else:
            options[name] = values
    return Claims(kind=kind, options=options, **fields)


def _split(text: str, kind: Kind) -> list[str]:
    parts = split_at_commas(text)
    if len(parts) == 1 and text.strip().startswith("(") and text.strip().endswith(")"):
        parts = split_at_commas(text.strip()[1:-1])  # the list may stand in parentheses
    if len(parts) > 1 and not parts[-1]:
        parts.pop()  # a trailing comma
    if not all(parts):
        raise _unreadable(text, kind)
    return parts


def _read(part: str, text: str, kind: Kind) -> tuple[Claim, Mapping[str, Any]]:
    """Return a claim and its values."""
    match = _CLAIM.fullmatch(part)
    if not match:
        raise _unreadable(text, kind)
    name = match["name"]
    if name not in kind.claims:
        near = difflib.get_close_matches(name, kind.claims, n=1)
        known = f"did you mean {near[0]}?" if near else f"known: {', '.join(kind.claims)}."
        raise UsageError(
            f"--claims: {name!r} is not a claim of {kind.with_article}; {known} {_page(kind)}"
        )
    claim = kind.claims[name]
    try:
        return claim, claim.read(*_arguments(match["arguments"] or ""))
    except ValueError as error:
        raise UsageError(f"--claims: {name} {error}") from error


def _arguments(text: str) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments by position, as text, and those with names.

    Raises:
        ValueError: they cannot be read.
    """
    positional = []
    named: dict[str, Any] = {}
    for argument in parse_arguments(text):
        if argument.name is None:
            positional.append(str(argument.value).removeprefix("torch."))
        elif argument.name in named:
            raise ValueError(f"takes {argument.name}= once, not twice")
        elif keyword.iskeyword(argument.name):
            # Optimizers are written as an expression of Python, which this would break.
            raise ValueError(f"cannot take {argument.name}=: it is a keyword of Python")
        else:
            named[argument.name] = argument.value
    return positional, named


def _unreadable(text: str, kind: Kind) -> UsageError:
    return UsageError(
        f"--claims: cannot read {text!r}; type claims with commas between them; "
        f"known: {', '.join(kind.claims)}. {_page(kind)}"
    )


def default_claims(kind: str, arguments: Mapping[str, Any]) -> Claims:
    """Return the claims of a subject for which none are given.

    Args:
        kind: the kind of the subject.
        arguments: the arguments in its target.

    Raises:
        UsageError: the kind needs claims, and none follow from the arguments.
    """
    try:
        text = KINDS[kind].default_claims(arguments)
    except ValueError as error:
        raise UsageError(f"--{kind}: {error}") from error
    return parse_claims(text, kind) if text else Claims(kind=kind)


# ---- Texts about claims


def _page(kind: Kind) -> str:
    page = "docs/your-hook.md" if kind.name == HOOK else "docs/other-kinds.md"
    return f"{page} has their arguments"


def _forms(claims: Iterable[Claim]) -> Iterator[Form]:
    return (form for claim in claims for form in claim.forms)


def claims_help() -> str:
    """Return the help text of ``--claims``."""
    shared = set.intersection(*({*kind.claims} for kind in KINDS.values()))
    parts = []
    for kind in KINDS.values():
        own = [claim.forms[0].text for name, claim in kind.claims.items() if name not in shared]
        if own:
            parts.append(f"of {kind.with_article}: {', '.join(own)}")
    every = [KINDS[HOOK].claims[name].forms[0].text for name in sorted(shared)]
    parts.append(f"of every kind: {', '.join(every)}")
    return (
        "the claims of the subject, with commas between them; may be repeated; "
        f"{'; '.join(parts)}; "
        "auto tries claims of a hook and proposes some; default: exact for a hook, otherwise "
        "the claims that follow from the arguments of the target"
    )


def claims_table(kind: str) -> str:
    """Return the claims of a kind as a Markdown table."""
    lines = ["| claim | meaning | judged by |", "|---|---|---|"]
    for form in _forms(KINDS[kind].claims.values()):
        cells = [f"`{form.text}`", form.meaning, form.judged_by or "-"]
        escaped = [cell.replace("|", r"\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines) + "\n"


__all__ = [
    "AUTO",
    "CONTRACTION",
    "DIFFERENCE",
    "FEEDBACK",
    "LOCAL",
    "ROUNDED_DTYPES",
    "UNBIASED",
    "Claims",
    "claims_help",
    "claims_table",
    "default_claims",
    "parse_claims",
]
