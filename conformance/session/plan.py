"""The plan: which scenarios a rule reads, and at which world sizes."""

from collections.abc import Mapping, Sequence

from conformance.judging.rule import Rule, WorldSizes
from conformance.scenarios.feed import feed_of
from conformance.scenarios.model import Scenario
from conformance.scenarios.profiles import Profile, SizeLimit
from conformance.session.adaptations import adapt_scenario
from conformance.session.prerequisites import is_noticed_by_futures, reason_not_applicable
from conformance.subjects.claims import LOCAL, Claims
from conformance.subjects.kinds import KINDS


class Plan:
    """The runs of one subject.

    Args:
        kind: the kind of subject.
        claims: its claims.
        profile: the profile that scenarios run in.
        world_sizes: the world sizes of the session.
        seed: the seed that the numbers of drawn scenarios come from.
        steps: the number of steps that a long run has at least.
        limit: the largest number of ranks that a scenario may bring itself; None for any.

    Attributes:
        world_sizes: the sizes that the subject accepts, in order.
        below_minimum: the sizes that it must refuse.
        plainest: the scenario that is judged first, as written.
    """

    def __init__(
        self,
        kind: str,
        claims: Claims,
        profile: Profile,
        world_sizes: Sequence[int],
        seed: int = 0,
        steps: int = 0,
        limit: SizeLimit | None = None,
    ) -> None:
        self._claims = claims
        self._limit = limit
        self._profile = profile
        self._seed = seed
        self._steps = steps
        self.world_sizes = tuple(
            sorted(size for size in world_sizes if size >= claims.min_world_size)
        )
        self.below_minimum = tuple(sorted(set(world_sizes) - set(self.world_sizes)))
        self.plainest = KINDS[kind].scenarios[0]
        self._by_name: Mapping[str, Scenario] = {
            scenario.name: scenario for scenario in KINDS[kind].scenarios
        }
        # Each rule asks for the scenarios that it reads, and for those that come before.
        self._adapted: dict[Scenario, Scenario] = {}

    @property
    def primary(self) -> int:
        """The world size at which the plainest scenario is judged first."""
        return next((size for size in self.world_sizes if size > 1), self.world_sizes[0])

    def adapted(self, scenario: Scenario) -> Scenario:
        """Return a scenario as it runs for this subject."""
        if scenario not in self._adapted:
            adapted = adapt_scenario(scenario, self._claims, self._profile, self._seed, self._steps)
            self._adapted[scenario] = adapted
        return self._adapted[scenario]

    @property
    def steps_of_long_run(self) -> int:
        """The number of steps of the longest run; 0 if the kind has no long run."""
        runs = [self.adapted(scenario) for scenario in self._by_name.values() if scenario.long_run]
        return max((feed_of(scenario).steps for scenario in runs), default=0)

    def named(self, name: str) -> Scenario:
        """Return the scenario of a name, as it runs for this subject."""
        return self.adapted(self._by_name[name])

    def place_of(self, scenario: Scenario) -> int:
        """Return the place of a scenario in the order in which scenarios run."""
        return list(self._by_name).index(scenario.name)

    def scenarios_of(self, rule: Rule) -> list[Scenario]:
        """Return the scenarios that a rule reads for this subject, as written.

        A lossy or fused hook may keep memory of its rank alone, which serves no other rank. Where
        futures are complete at once, they tell of no failure. A hook that is on WORLD alone is not
        judged on a twin with another group.
        """
        has_memory = bool(self._claims.lossy or self._claims.fused)
        return [
            scenario
            for scenario in rule.on
            if (scenario not in rule.if_inexact or self._loses_on(scenario))
            and not (self._profile.ordered and is_noticed_by_futures(scenario))
            and not (self._claims.world_only and scenario.joint and scenario.twin_groups)
            and (
                not scenario.resume.of_rank_0
                or not (has_memory or self._exceeds_limit(self.adapted(scenario)))
            )
        ]

    def _loses_on(self, scenario: Scenario) -> bool:
        """Whether results may differ from the mean where a scenario runs, on all ranks alike."""
        claims = self._claims
        is_inexact = bool(claims.rounded or (claims.lossy and claims.lossy != LOCAL))
        return is_inexact and bool(self.adapted(scenario).fits(self.world_sizes))

    def runs_of(self, rule: Rule) -> list[tuple[Scenario, int]]:
        """Return the scenarios that a rule reads, each with a world size."""
        if rule.probes or reason_not_applicable(rule, self._profile):
            return []  # the runs of probes are known once others have been made
        scenarios = [self.adapted(scenario) for scenario in self.scenarios_of(rule)]
        if rule.worlds is WorldSizes.BELOW_MINIMUM:
            return [(scenario, size) for scenario in scenarios for size in self.below_minimum]
        runs = [
            (scenario, size)
            for scenario in scenarios
            for size in scenario.fits(self.world_sizes)
            if not self._exceeds_limit(scenario)
        ]
        if rule.worlds is WorldSizes.PRIMARY:
            return [(scenario, size) for scenario, size in runs if size == self.primary]
        if rule.worlds is WorldSizes.OTHERS:
            return [(scenario, size) for scenario, size in runs if size != self.primary]
        return runs

    def beyond_limit(self, rule: Rule) -> list[int]:
        """Return the numbers of ranks that a rule's scenarios bring, and that are too many."""
        scenarios = map(self.adapted, rule.on)
        return [scenario.own_size for scenario in scenarios if self._exceeds_limit(scenario)]

    def _exceeds_limit(self, scenario: Scenario) -> bool:
        return self._limit is not None and scenario.own_size > self._limit.largest

    def prerequisites(self, scenario: Scenario, size: int) -> list[tuple[Scenario, int]]:
        """Return the runs that must have ended well before this one is tried.

        They have the same world size. A scenario that brings a size of its own has those at the
        smallest size above 1 in their place, but for the run that has saved its state.
        """
        if scenario.name == self.plainest.name:
            return []
        before = (self.plainest, self._by_name[scenario.prerequisite])
        adapted = [self.adapted(plainer) for plainer in before]
        if size not in self.world_sizes:
            size = self.primary
        runs = [(plainer, size) for plainer in adapted if size in plainer.fits(self.world_sizes)]
        if scenario.resume.resumes and adapted[1] not in [plainer for plainer, _ in runs]:
            runs.append((adapted[1], adapted[1].fits(self.world_sizes)[0]))
        return runs
