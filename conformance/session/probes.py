"""The search for numbers in the subject's own code, and the runs that reach them.

``Kind.probes`` makes them, and names the rule that reads them.

Coverage of the runs so far names the branches that none took. The numbers in their conditions are
tried; their runs may reach branches with further numbers, which are tried next.
"""

from dataclasses import dataclass, replace
from typing import Any

from conformance.judging.oracles.code_numbers import Dtype, Number, dtypes_in, numbers_in
from conformance.judging.oracles.lossy import TRIALS, TRIALS_OF_VALUES
from conformance.judging.verdict import NOTHING_TO_TRY
from conformance.scenarios.hook import VALUES
from conformance.scenarios.model import DRAINING, Scenario
from conformance.scenarios.probes import (
    Probe,
    steps_after,
    steps_until_empty,
    with_residuals_emptied,
)
from conformance.session.coverage import Measured, Tried
from conformance.session.plan import Plan
from conformance.subjects.claims import UNBIASED, Claims
from conformance.subjects.kinds import KINDS
from conformance.subjects.spec import CONTEXT_NAMES, SubjectSpec
from conformance.subjects.target import parse_target

MOST_NUMBERS = 8
_KEPT_DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64")


@dataclass(frozen=True)
class Wanted:
    """A run that is to be made.

    Attributes:
        scenario: the scenario, adapted to the claims.
        world: its world size.
        entry: the entry of the number on the certificate, which lists its runs.
    """

    scenario: Scenario
    world: int
    entry: dict[str, Any]


class Probes:
    """The probes of one subject.

    Args:
        subject: the subject, whose targets have arguments.
        claims: its claims.
        plan: adapts scenarios.
        capacity: the largest world size that can be run; None if there is no limit.

    Attributes:
        tried: the numbers that were tried.
    """

    def __init__(
        self, subject: SubjectSpec, claims: Claims, plan: Plan, capacity: int | None
    ) -> None:
        self._maker = KINDS[subject.kind].probes
        self._arguments = _arguments(subject)
        self._claims = claims
        self._plan = plan
        self._capacity = capacity
        self._seen: set[float | str] = set()
        self._made: set[str] = set()
        self.tried = Tried()

    def next(self, measured: Measured) -> list[Wanted]:
        """Return the runs for the numbers that have not been tried yet."""
        coverage = measured.coverage
        maker = self._maker
        if coverage is None or maker is None:
            return []
        numbers = numbers_in(coverage, self._arguments)
        values = [number.value for number in numbers]
        wanted: list[Wanted] = []
        for number in numbers:
            if number.value in self._seen:
                continue
            self._seen.add(number.value)
            quantities = set(number.quantities)
            if self._claims.fused:
                # The parameters that the hook steps would overflow.
                quantities.discard("values")
            probes = list(maker.of_number(number.value, quantities, number.place, values))
            if not probes or self._is_full():
                if number.value >= maker.least_named:
                    self.tried.out_of_reach.append(_entry(number))
                continue
            wanted += self._wanted(probes, _entry(number))
        if maker.of_dtype is None:
            return wanted
        for dtype in dtypes_in(coverage):
            if dtype.value not in self._seen and self._takes(dtype.value) and not self._is_full():
                self._seen.add(dtype.value)
                probe = maker.of_dtype(dtype.value, dtype.place)
                wanted += self._wanted([probe], _entry(dtype))
        return wanted

    def reason(self, measured: Measured) -> str:
        """Return why there was nothing to run."""
        if measured.coverage is None:
            return f"coverage was not measured: {measured.reason}"
        if self.tried.out_of_reach:
            numbers = ", ".join(
                f"{one['value']} ({one['file']}:{one['line']})" for one in self.tried.out_of_reach
            )
            return f"no scenario reaches these numbers: {numbers}"
        return f"none of the branches that were never taken {NOTHING_TO_TRY}"

    def _is_full(self) -> bool:
        return len(self.tried.numbers) >= MOST_NUMBERS

    def _takes(self, dtype: str) -> bool:
        return dtype in self._claims.dtypes if self._claims.dtypes else dtype in _KEPT_DTYPES

    def _wanted(self, probes: list[Probe], entry: dict[str, Any]) -> list[Wanted]:
        found = []
        if self._claims.holds_back:
            probes = [part for probe in probes for part in with_residuals_emptied(probe)]
        for probe in probes:
            world = probe.world or self._plan.primary
            too_large = self._capacity is not None and world > self._capacity
            if too_large or world < self._claims.min_world_size:
                continue
            if probe.by_step and (self._claims.lossy or self._claims.fused):
                continue
            if f"{probe.scenario.name}@{world}" not in self._made:
                self._made.add(f"{probe.scenario.name}@{world}")
                found.append(Wanted(self._adapted(probe), world, entry))
        if found:
            self.tried.numbers.append(entry)
        return found

    def _adapted(self, probe: Probe) -> Scenario:
        """Return a probe as the plainest scenario would run under the claims."""
        return adapted_probe(probe.scenario, self._plan, self._claims)


def adapted_probe(scenario: Scenario, plan: Plan, claims: Claims) -> Scenario:
    """Return a probe as it runs under the claims of a plan."""
    maker = KINDS[scenario.kind].probes
    if maker is None or maker.judged_as is None:
        return plan.adapted(scenario)
    if claims.lossy:
        # A few crafted elements are so large that the rest could be lost unnoticed.
        more = steps_after(scenario, claims.period) if claims.mixes else 0
        scenario = replace(scenario, steps=("normal",) * (len(scenario.steps) + more))
    judged = maker.judged_as(scenario, claims.holds_back)
    adapted = plan.adapted(replace(scenario, name=judged.name))
    steps = adapted.steps
    if claims.lossy == UNBIASED and judged is VALUES:
        # Draws of ``values`` are also compared with each other, which takes more of them. A probe
        # for a number of steps needs as many as that.
        before = steps[: len(steps) - TRIALS_OF_VALUES]
        steps = before + steps[-1:] * max(TRIALS, len(scenario.steps))
    more = steps_until_empty(scenario) - sum(kind in DRAINING for kind in steps)
    steps += steps[-1:] * max(0, more)
    return replace(adapted, name=scenario.name, steps=steps, prerequisite=VALUES.name)


def _arguments(subject: SubjectSpec) -> dict[str, Any]:
    """Return the arguments in all targets of a subject, those of its state too."""
    given: dict[str, Any] = {}
    for text in (subject.state, subject.setup, subject.hook, subject.target):
        if text and text not in CONTEXT_NAMES:
            given |= parse_target(text, "").kwargs
    return given


def _entry(found: Number | Dtype) -> dict[str, Any]:
    return {"value": found.value, "file": found.file, "line": found.line, "runs": []}
