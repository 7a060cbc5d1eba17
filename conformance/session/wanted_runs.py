"""The runs that rules need, before they are made: to begin them early, to count them, and for rules
that watch every run.
"""

from collections.abc import Container, Mapping, Sequence

from conformance.judging.rule import Rule, WorldSizes
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import Profile
from conformance.session.plan import Plan
from conformance.session.prerequisites import reason_not_applicable
from conformance.subjects.claims import Claims


class WantedRuns:
    """The runs that the rules of one kind need under one subject's claims.

    Args:
        rules: the whole book.
        plan: which scenarios a rule reads, and at which world sizes.
        kind: the kind of subject.
        claims: its claims.
        profile: the profile that scenarios run in.

    Attributes:
        announced: the rules that will be judged.
    """

    def __init__(
        self, rules: Mapping[str, Rule], plan: Plan, kind: str, claims: Claims, profile: Profile
    ) -> None:
        self._rules = rules
        self._plan = plan
        self._kind = kind
        self._claims = claims
        self._profile = profile
        self.announced: Sequence[str] = ()

    def announce(self, numbers: Sequence[str]) -> None:
        """Set the rules that will be judged; before that, no run is wanted for them."""
        self.announced = numbers

    def of_announced(self) -> list[tuple[Scenario, int]]:
        """Return the subject's runs that the announced rules will need, each once."""
        wanted = self._with_baselines()
        return [(scenario, size) for baseline, scenario, size in wanted if not baseline]

    def _with_baselines(self) -> list[tuple[str, Scenario, int]]:
        """Return the baseline, or "" for the subject itself, and the run; each once."""
        rules = [self._rules[number] for number in self.announced]
        wanted = [
            (baseline, *run)
            for rule in rules
            if self._is_claimed(rule) and not (rule.unless and self._claims.has(rule.unless))
            for run in self._plan.runs_of(rule)
            for baseline in (("", rule.baseline) if rule.baseline else ("",))
        ]
        if any(rule.watches for rule in rules):
            wanted += [("", *run) for run in self.watched()]
        return list(dict.fromkeys(wanted))

    def count(self) -> int:
        """Return the number of runs that the announced rules need."""
        return len({(scenario.name, size) for scenario, size in self.of_announced()})

    def not_among(self, made: Container[tuple[str, int]]) -> list[tuple[str, Scenario, int]]:
        """Return the runs of the announced rules that can begin at once, and those of baselines.

        Args:
            made: the scenarios' names and world sizes of the subject's runs that exist.

        Returns:
            ``Rule.baseline``, or "" for the subject itself, the scenario and the world size.
        """
        return [
            (baseline, scenario, size)
            for baseline, scenario, size in self._with_baselines()
            if not scenario.resume.resumes and (baseline or (scenario.name, size) not in made)
        ]

    def watched(self) -> list[tuple[Scenario, int]]:
        """Return the runs that rules need which do not watch, in the order of the scenarios."""
        rules = [
            rule
            for rule in self._rules.values()
            if not rule.watches
            and rule.kind == self._kind
            and rule.worlds is not WorldSizes.BELOW_MINIMUM
            and self._is_claimed(rule)
            and rule.device in ("", self._profile.device)
            and reason_not_applicable(rule, self._profile) is None
        ]
        wanted = dict.fromkeys(run for rule in rules for run in self._plan.runs_of(rule))
        return sorted(wanted, key=lambda run: self._plan.place_of(run[0]))

    def _is_claimed(self, rule: Rule) -> bool:
        return is_claimed(rule, self._claims)


def is_claimed(rule: Rule, claims: Claims) -> bool:
    """Whether a rule is about every subject of its kind, or about a claim that this one makes."""
    return not rule.claimed or claims.has(rule.claimed)
