"""Rules: their numbers, words and functions; and the golden list that a certificate needs.

A rule is a function of records. Its docstring's first paragraph is the requirement, the rest the
intent. The files of ``conformance/rules`` hold one section each; importing them fills the book.
"""

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conformance.scenarios.model import Scenario
from conformance.subjects.kinds import HOOK, kind_of

MUST, SHOULD = "MUST", "SHOULD"
SECTIONS = {
    "1": "Contract with DDP",
    "2": "Equivalence with vanilla allreduce",
    "3": "Replicas",
    "4": "Buckets and DDP's options",
    "5": "Accumulation",
    "6": "Optimizer parity",
    "7": "Uneven inputs",
    "8": "Special values",
    "9": "Non-interference",
    "10": "Collectives",
    "11": "State",
    "12": "Failure",
    "13": "Lossy, local and fused claims",
    "14": "Averagers",
    "15": "Optimizer wrappers",
    "16": "Sync strategies",
    "17": "Joins",
    "18": "Quantized collectives",
    "19": "Activation checkpointing",
    "20": "At scale, simulated",
    "21": "CUDA",
}
AT_SCALE = "20"
OF_DEVICES = {"21": "cuda"}  # sections that speak of what one type of device has, and no other
GOLDEN = Path(__file__).parent.parent / "golden.txt"


class WorldSizes(enum.Enum):
    """The world sizes of the profile that a rule is judged at; each with the sentence of RULES.md."""

    ALL = "at every world size"
    PRIMARY = "at the smallest world size above 1"
    OTHERS = "at the other world sizes"
    BELOW_MINIMUM = "at world sizes below what it claims"


@dataclass(frozen=True)
class Rule:
    """One numbered requirement.

    Attributes:
        number: ``section.place``.
        title: a few words.
        level: MUST decides the certificate, SHOULD is reported beside it.
        since: the version of the rule book that has it.
        on: the scenarios whose records it reads.
        owns: those of them whose breaking is its failure; for other rules such a run is "not run".
        needs: rules without which this one would say nothing new; it runs only where they hold.
        reads_all_runs: whether it reads all its runs at once instead of one after another.
        may_refuse: whether an exception of the hook, on every rank, is an answer too.
        claimed: the claim (an attribute of ``Claims``) without which it does not apply, and nothing is run for it; '' is none.
        baseline: what else is run in the same scenario, and read after the subject's own run: ``vanilla`` is DDP without a hook,
            ``like`` are the references that the claim of that name says; '' is nothing.
        worlds: the world sizes it is judged at.
        certifies_machine: the reference must pass it before a subject is judged.
        blamed_for: the kind of failed run (``run_failures.FailedRun.kind``) that fails this rule,
            whatever scenario it happens in; '' for none.
        judges_lossy_results: it takes the place of 2.1 and 2.2 for a subject with a lossy claim.
        source: torch documentation, paper or issue number.
        remedy: where to look when it fails.
        check: the function, ``(run, claims, found)``, or ``(runs, claims, found)`` if ``across``.
    """

    number: str
    title: str
    level: str
    since: str
    on: tuple[Scenario, ...]
    owns: tuple[Scenario, ...]
    needs: tuple[str, ...]
    reads_all_runs: bool
    may_refuse: bool
    claimed: str
    baseline: str
    worlds: WorldSizes
    certifies_machine: bool
    blamed_for: str
    judges_lossy_results: bool
    source: str
    remedy: str
    check: Callable[..., None]

    @property
    def section(self) -> str:
        return self.number.partition(".")[0]

    @property
    def kind(self) -> str:
        """The kind of subject that it speaks of."""
        return kind_of(self.section)

    @property
    def device(self) -> str:
        """The type of device that it speaks of; '' is every one."""
        return OF_DEVICES.get(self.section, "")

    @property
    def requirement(self) -> str:
        return _paragraphs(self.check)[0]

    @property
    def intent(self) -> str:
        return " ".join(_paragraphs(self.check)[1:])

    @property
    def order(self) -> tuple[int, int]:
        section, place = self.number.split(".")
        return int(section), int(place)


_BOOK: dict[str, Rule] = {}


def rule(
    number: str,
    title: str,
    *,
    on: tuple[Scenario, ...],
    remedy: str,
    source: str,
    owns: tuple[Scenario, ...] = (),
    needs: tuple[str, ...] = (),
    level: str = MUST,
    since: str = "1.0",
    reads_all_runs: bool = False,
    may_refuse: bool = False,
    claimed: str = "",
    baseline: str = "",
    worlds: WorldSizes = WorldSizes.ALL,
    certifies_machine: bool = False,
    blamed_for: str = "",
    judges_lossy_results: bool = False,
) -> Callable[[Callable[..., None]], Rule]:
    """Make a rule of a function and enter it in the book."""

    def enter(check: Callable[..., None]) -> Rule:
        if number in _BOOK:
            raise ValueError(f"rule {number} is in the book twice")
        _BOOK[number] = Rule(
            number=number,
            title=title,
            level=level,
            since=since,
            on=on,
            owns=owns,
            needs=needs,
            reads_all_runs=reads_all_runs,
            may_refuse=may_refuse,
            claimed=claimed,
            baseline=baseline,
            worlds=worlds,
            certifies_machine=certifies_machine,
            blamed_for=blamed_for,
            judges_lossy_results=judges_lossy_results,
            source=source,
            remedy=remedy,
            check=check,
        )
        return _BOOK[number]

    return enter


def golden_list(kind: str = HOOK, device: str = "cpu") -> list[str]:
    """Return the numbers of the MUST rules that a certificate for such a subject, on such a device, needs: as kept under version
    control."""
    numbers = [line.split()[0] for line in GOLDEN.read_text().splitlines() if line and not line.startswith("#")]
    sections = {number: number.partition(".")[0] for number in numbers}
    return [n for n in numbers if kind_of(sections[n]) == kind and OF_DEVICES.get(sections[n], device) == device]


def _paragraphs(function: Callable[..., None]) -> list[str]:
    text = inspect.getdoc(function) or ""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
