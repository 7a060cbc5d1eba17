"""Rules: their numbers, texts and functions, and the golden list of rules that a certificate needs.

A rule is a function of records. The first paragraph of its docstring is the requirement, the rest
is its reason. Each file of ``conformance/rules`` holds one section, and enters its rules in the
book when it is imported.
"""

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.scenarios.model import Scenario
from conformance.subjects.kinds import HOOK, kind_of

MUST = "MUST"
SHOULD = "SHOULD"
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
    "22": "Sizes as in training",
    "23": "Long runs",
    "24": "Clusters",
    "25": "Numbers in the subject's own code",
}
AT_SCALE = "20"
CLUSTERS = "24"  # its scenarios bring their own ranks
OF_DEVICES = {"21": "cuda"}  # sections that apply to one type of device
GOLDEN = Path(__file__).parent.parent / "golden.txt"


class WorldSizes(enum.Enum):
    """The world sizes of the profile that a rule is judged at. The values are texts of RULES.md."""

    ALL = "at every world size"
    PRIMARY = "at the smallest world size above 1 alone"
    OTHERS = "at every world size but the smallest above 1"
    BELOW_MINIMUM = "at world sizes below the claimed min_world_size"


@dataclass(frozen=True)
class Rule:
    """One numbered requirement.

    Attributes:
        number: ``section.place``.
        title: a few words, in the present tense.
        level: a MUST decides the certificate, a SHOULD is reported beside it.
        since: the version of the rule book that introduced the rule.
        on: the scenarios whose records the rule reads.
        if_inexact: the scenarios among them that are read only if the subject claims a result that
            is rounded, compressed or random, and a world size fits them.
        owns: the scenarios among them whose failed runs fail this rule. Other rules that read a
            failed run are "not run".
        needs: the rules that must hold before this one is judged, because one defect is to fail one
            rule.
        watches: the rule reads every run that the other rules of its kind need, one after another
            until it fails; ``on`` names the plainest of them. Runs that fail by themselves are left
            out, since the rule that owns the scenario fails for them.
        presumes: the rules that this one presumes, whatever their level: it does not apply if one
            of them fails, or does not apply itself.
        reads_all_runs: the function gets all runs at once, instead of one after another.
        may_refuse: the hook may raise an exception on every rank instead.
        refusable: the scenarios among them that the hook may refuse in this way; the others then
            decide.
        claimed: the claim (an attribute of ``Claims``) that the rule applies to. A subject without
            the claim is not run for it. Empty if the rule applies to all.
        unless: the claim under which the rule does not apply. Empty if there is none.
        baseline: the runs of the same scenario that are passed after the subject's own: ``vanilla``
            for DDP without a hook, ``like`` for the references that the claim of that name names.
            Empty for none.
        worlds: the world sizes that the rule is judged at.
        certifies_machine: the reference must pass the rule before a subject is judged.
        blamed_for: the kind of failed run (``run_failures.FailedRun.kind``) that fails this rule,
            in any scenario that the rule reads. Empty for none.
        judges_exact_results: the rule decides whether one result is right, which no rule can for a
            subject with a lossy claim.
        judges_lossy_results: the rule takes its place for such a subject.
        probes: the rule's runs are made for the numbers in the subject's own code
            (``scenarios/probes.py``); its scenario stands for all of them.
        source: torch documentation, paper or issue number.
        remedy: likely places of the mistake if the rule fails.
        check: the function, ``(run, claims, found)``; ``(runs, claims, found)`` if
            ``reads_all_runs``.
    """

    number: str
    title: str
    level: str
    since: str
    on: tuple[Scenario, ...]
    if_inexact: tuple[Scenario, ...]
    owns: tuple[Scenario, ...]
    needs: tuple[str, ...]
    watches: bool
    presumes: tuple[str, ...]
    reads_all_runs: bool
    may_refuse: bool
    refusable: tuple[Scenario, ...]
    claimed: str
    unless: str
    baseline: str
    worlds: WorldSizes
    certifies_machine: bool
    blamed_for: str
    judges_exact_results: bool
    judges_lossy_results: bool
    probes: bool
    source: str
    remedy: str
    check: Callable[..., None]

    @property
    def section(self) -> str:
        return self.number.partition(".")[0]

    @property
    def kind(self) -> str:
        """The kind of subject that the rule applies to."""
        return kind_of(self.section)

    @property
    def device(self) -> str:
        """The type of device that the rule applies to; empty for all types."""
        return OF_DEVICES.get(self.section, "")

    @property
    def requirement(self) -> str:
        return _paragraphs(self.check)[0]

    @property
    def reasons(self) -> list[str]:
        """The paragraphs after the requirement."""
        return _paragraphs(self.check)[1:]

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
    if_inexact: tuple[Scenario, ...] = (),
    owns: tuple[Scenario, ...] = (),
    needs: tuple[str, ...] = (),
    presumes: tuple[str, ...] = (),
    level: str = MUST,
    since: str = "1.0",
    watches: bool = False,
    reads_all_runs: bool = False,
    may_refuse: bool = False,
    refusable: tuple[Scenario, ...] = (),
    claimed: str = "",
    unless: str = "",
    baseline: str = "",
    worlds: WorldSizes = WorldSizes.ALL,
    certifies_machine: bool = False,
    blamed_for: str = "",
    judges_exact_results: bool = False,
    judges_lossy_results: bool = False,
    probes: bool = False,
) -> Callable[[Callable[..., None]], Rule]:
    """Decorate a function of records: make a rule of it, and enter the rule in the book.

    The arguments are the attributes of :class:`Rule`.
    """

    def enter(check: Callable[..., None]) -> Rule:
        if number in _BOOK:
            raise ValueError(f"rule {number} is in the book twice")
        _BOOK[number] = Rule(
            number=number,
            title=title,
            level=level,
            since=since,
            on=on,
            if_inexact=if_inexact,
            owns=owns,
            needs=needs,
            watches=watches,
            presumes=presumes,
            reads_all_runs=reads_all_runs,
            may_refuse=may_refuse,
            refusable=refusable,
            claimed=claimed,
            unless=unless,
            baseline=baseline,
            worlds=worlds,
            certifies_machine=certifies_machine,
            blamed_for=blamed_for,
            judges_exact_results=judges_exact_results,
            judges_lossy_results=judges_lossy_results,
            probes=probes,
            source=source,
            remedy=remedy,
            check=check,
        )
        return _BOOK[number]

    return enter


def registered_rules() -> dict[str, Rule]:
    """Return by number, in order, the rules of the sections that have been imported.

    :func:`conformance.rules.book` imports all sections first.
    """
    return dict(sorted(_BOOK.items(), key=lambda item: item[1].order))


def golden_list(kind: str = HOOK, device: str = "cpu") -> list[str]:
    """Return the numbers of the MUST rules that a certificate needs, as ``golden.txt`` lists them.

    Args:
        kind: the kind of subject.
        device: the type of device.
    """
    lines = GOLDEN.read_text().splitlines()
    numbers = [line.split()[0] for line in lines if line and not line.startswith("#")]
    return [number for number in numbers if _is_golden_for(number.partition(".")[0], kind, device)]


def _is_golden_for(section: str, kind: str, device: str) -> bool:
    return kind_of(section) == kind and OF_DEVICES.get(section, device) == device


def _paragraphs(function: Callable[..., None]) -> list[str]:
    text = inspect.getdoc(function) or ""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def with_needed(rules: Mapping[str, Rule], numbers: Iterable[str]) -> dict[str, Rule]:
    """Return the rules of these numbers and all rules that they build on, in the book's order.

    Args:
        rules: the whole book.
        numbers: numbers of rules; those of another kind than the book's are left out.
    """
    wanted = {number for number in numbers if number in rules}
    # They take the place of the exact rules for a subject with a lossy claim.
    wanted |= {number for number, rule in rules.items() if rule.judges_lossy_results}
    while (
        more := {
            needed
            for number in wanted
            for needed in (*rules[number].needs, *rules[number].presumes)
        }
        - wanted
    ):
        wanted |= more
    return {number: rule for number, rule in rules.items() if number in wanted}
