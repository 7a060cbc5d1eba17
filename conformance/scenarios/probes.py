"""Scenarios made for a number that the subject's own code compares with.

A branch such as ``if numel > 65_536`` may be taken by no scenario of the book. If the number can be
found in the code, these scenarios reach both sides of the comparison, for each quantity that the
number may count. They are made from the plainest scenario of hooks, and judged as it is:

sizes     buckets of one parameter each, of N - 1, N, N + 1 and 2 N + 1 elements; beyond 262,144
          of N + 1 and 2 N + 1, and beyond 4,194,304 of N + 1; up to 2**20, N + 1 also in half and
          double precision
counts    a bucket of N + 2 tensors, and N + 2 buckets
steps     N + 3 steps, with a parameter of each size that is tried, up to 4,096 elements; for exact
          and rounded results also the four steps around N with parameters of the larger sizes,
          after N - 1 steps without a record; under ``local`` as many steps more as a rank may
          take until it hears the others again
worlds    N and N + 1 ranks, up to 8
values    gradients near 16 times the number, and others near a 256th of it
dtypes    parameters of 3 to 70,001 elements of that dtype

Residuals of large parameters. A hook that keeps residuals is judged by their sum, once they are
empty. A low rank of r takes r of the m directions of a random m x m matrix out in a step: in m/r
steps the residual of one step is empty (simulated for m from 64 to 362, r of 1 and 2, one and two
ranks: 0.94 to 1.06 m/r). So many steps of many large parameters would take too long. If a probe has
a parameter of more than 4,096 elements, all its parameters are therefore judged by the norm of
results, as in the scenario `large`, and the one that reaches the other side of the number is run
once more without the others, for 5/4 m steps.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from conformance.scenarios.hook import LARGE, VALUES
from conformance.scenarios.model import DDPOptions, Param, Scenario

# Other scenarios have buckets, tensors and steps on both sides of smaller numbers.
LEAST_TRIED = 16
_LEAST_COUNT = 4
LARGEST_SIZE = 2**25
LARGEST_COUNT = 2048
LARGEST_BUCKET_COUNT = 256
LARGEST_STEP = 4096
LARGEST_WORLD = 8

# Above it, random values would take longer to make than a run may last.
_LARGEST_RANDOM = 2**22
_LARGEST_WITH_NEIGHBOURS = 2**18
_LARGEST_IN_EACH_DTYPE = 2**20
_LARGEST_BESIDE_STEPS = 4096
_LARGEST_LONG = 2**17
_LARGEST_AMONG_OTHERS = 4096  # if residuals are to be empty in the end
_EMPTIED = "_emptied"
# In elements times steps; some ten seconds.
_LARGEST_LATE_WORK = 2**30
_LONGEST_ALONE = 200  # steps, as in 23.5
_EACH_BUCKET_ALONE = DDPOptions(bucket_cap_mb=1 / 2**20)

PROBE = replace(
    VALUES,
    name="probe",
    summary="made for a number in the subject's own code, in a branch that no other scenario "
    "reaches",
    steps=("crafted", "normal", "crafted"),
    world_sizes=(2,),
)


@dataclass(frozen=True)
class Probe:
    """A scenario for a number.

    Attributes:
        scenario: the scenario.
        world: the world size; 0 for that of the plainest run.
        by_step: each of its steps is judged by itself, so that the first may leave no record.
        enough: of its parameters, those that reach the other side of the number.
    """

    scenario: Scenario
    world: int = 0
    by_step: bool = False
    enough: tuple[Param, ...] = ()


@dataclass(frozen=True)
class ProbeMaker:
    """How runs are made for the numbers in the code of a kind of subject.

    Attributes:
        rule: the number of the rule that reads these runs.
        of_number: returns the scenarios that reach both sides of a number. It takes the number, the
            quantities that it may be, the place in the code, and all numbers that are tried.
        of_dtype: returns the scenario with parameters of a dtype, which it takes with the place in
            the code; None if dtypes are not tried.
        judged_as: returns the scenario as which one of these is adapted to claims and judged. It
            takes the probe, and whether the subject keeps residuals. None if it is adapted as
            itself.
        least_named: smaller numbers that are not tried are those that other scenarios reach.
    """

    rule: str
    of_number: Callable[[float, Collection[str], str, Sequence[float]], Iterator[Probe]]
    of_dtype: Callable[[str, str], Probe] | None = None
    judged_as: Callable[[Scenario, bool], Scenario] | None = None
    least_named: int = LEAST_TRIED


def judged_as(probe: Scenario, holds_back: bool) -> Scenario:
    """Return the scenario as which a probe is adapted to claims and judged.

    It is the plainest one. A lossy result is judged there over a hundred steps and more, which
    would take too long for large parameters; they are judged as in the scenario `large`.
    """
    among_others = holds_back and not probe.name.endswith(_EMPTIED)
    limit = _LARGEST_AMONG_OTHERS if among_others else _LARGEST_LONG
    return VALUES if _largest(probe) <= limit else LARGE


def with_residuals_emptied(probe: Probe) -> Iterator[Probe]:
    """Yield a probe of a subject that keeps residuals, and, if it has large parameters, the one
    that goes on until they are empty.
    """
    yield probe
    if probe.enough and _largest(probe.scenario) > _LARGEST_AMONG_OTHERS:
        scenario = replace(probe.scenario, params=probe.enough, name=probe.scenario.name + _EMPTIED)
        if _largest(scenario) <= _LARGEST_LONG:
            yield replace(probe, scenario=scenario)


def steps_until_empty(probe: Scenario) -> int:
    """Return after how many steps the residuals of a probe are empty, whatever the claimed delta;
    0 if it does not go on for so long.
    """
    return 5 * math.isqrt(_largest(probe)) // 4 if probe.name.endswith(_EMPTIED) else 0


def _largest(scenario: Scenario) -> int:
    return max(math.prod(param.shape) for param in scenario.params)


def probes_of_number(
    value: float, quantities: Collection[str], place: str, others: Sequence[float]
) -> Iterator[Probe]:
    """Yield the scenarios that reach both sides of a number.

    Args:
        value: the number.
        quantities: the quantities that it may be: ``sizes``, ``counts``, ``steps``, ``worlds``,
            ``values``.
        place: where the code compares with it.
        others: all numbers that are tried.
    """
    made = replace(PROBE, summary=f"made for the number {value} in {place}")
    if "values" in quantities:
        yield _values(made, value)
    if value != int(value):
        return
    value = int(value)
    if "sizes" in quantities and LEAST_TRIED <= value <= LARGEST_SIZE:
        yield _sizes(made, value)
    if "counts" in quantities and _LEAST_COUNT <= value <= LARGEST_COUNT:
        yield from _counts(made, value)
    if "steps" in quantities and _LEAST_COUNT <= value <= LARGEST_STEP:
        yield _steps(made, value, others)
        yield from _late_steps(made, value, others)
    if "worlds" in quantities or value <= LARGEST_WORLD:
        for world in (value, value + 1):
            if 2 < world <= LARGEST_WORLD:
                scenario = replace(made, name=f"probe_{value}_ranks", world_sizes=(world,))
                yield Probe(scenario, world)


def probe_of_dtype(dtype: str, place: str) -> Probe:
    """Return the scenario that has parameters of a dtype only."""
    params = tuple(Param((size,), dtype) for size in (3, 1031, 70_001))
    summary = f"made for the dtype {dtype} in {place}"
    name = f"probe_{dtype}"
    return Probe(replace(PROBE, name=name, summary=summary, params=params, ddp=_EACH_BUCKET_ALONE))


def _values(made: Scenario, value: float) -> Probe:
    """Feed gradients far above a number and far below it, by parameter."""
    exponent = math.ceil(math.log2(value))
    params = tuple(
        replace(param, exponent=exponent + shift) for shift in (4, -8) for param in VALUES.params
    )
    name = f"probe_values_near_two_to_{exponent}".replace("-", "minus_")
    # Crafted values are exact in half precision only near 1.
    steps = ("normal",) * 3
    return Probe(replace(made, name=name, params=params, steps=steps, ddp=_EACH_BUCKET_ALONE))


def _sizes(made: Scenario, value: int) -> Probe:
    if value <= _LARGEST_WITH_NEIGHBOURS:
        sizes = [size for size in (value - 1, value, value + 1, 2 * value + 1) if size]
    elif value <= _LARGEST_RANDOM:
        sizes = [value + 1, 2 * value + 1]
    else:
        sizes = [value + 1]
    params = [Param((size,)) for size in sizes]
    if value <= _LARGEST_IN_EACH_DTYPE:
        for dtype in ("float64", "float16", "bfloat16"):
            params.append(Param((value + 1,), dtype))
    steps = ("crafted", "normal") if value <= _LARGEST_RANDOM else ("crafted",)
    scenario = replace(
        made,
        name=f"probe_{value}_elements",
        params=tuple(params),
        steps=steps,
        ddp=_EACH_BUCKET_ALONE,
    )
    return Probe(scenario, enough=(Param((value + 1,)),))


def _counts(made: Scenario, value: int) -> Iterator[Probe]:
    tensors = tuple(Param((1 + index % 7,)) for index in range(value + 2))
    yield Probe(replace(made, name=f"probe_{value}_tensors", params=tensors))
    if value <= LARGEST_BUCKET_COUNT:
        name = f"probe_{value}_buckets"
        yield Probe(replace(made, name=name, params=tensors, ddp=_EACH_BUCKET_ALONE))


def _steps(made: Scenario, value: int, others: Sequence[float]) -> Probe:
    sizes = [int(size) + 1 for size in others if 1 < size <= _LARGEST_BESIDE_STEPS]
    params = (*VALUES.params, *(Param((size,)) for size in dict.fromkeys(sizes)))
    kinds = ("crafted", "normal", "crafted")
    steps = tuple(kinds[step % 3] for step in range(value + 3))
    scenario = replace(
        made, name=f"probe_{value}_steps", params=params, steps=steps, ddp=_EACH_BUCKET_ALONE
    )
    return Probe(scenario)


def _late_steps(made: Scenario, value: int, others: Sequence[float]) -> Iterator[Probe]:
    """Yield the steps around a number with parameters beyond the larger sizes, if there are any."""
    params: list[Param] = []
    elements = 0
    for size in sorted({int(other) + 1 for other in others if other > _LARGEST_BESIDE_STEPS}):
        elements += size
        if value * elements > _LARGEST_LATE_WORK or elements > _LARGEST_RANDOM:
            break
        params.append(Param((size,)))
    if params:
        name = f"probe_{value}_steps_at_sizes"
        steps = ("normal", "crafted", "normal", "crafted")
        scenario = replace(
            made,
            name=name,
            params=(*params, *VALUES.params[:1]),
            steps=steps,
            unrecorded_steps=value - 1,
            ddp=_EACH_BUCKET_ALONE,
        )
        yield Probe(scenario, by_step=True)


def steps_after(scenario: Scenario, period: int) -> int:
    """Return the number of last steps of a probe of ``local`` results in which all ranks meet.

    They begin after the number, and there are as many as rule 23.5 lets a rank wait. Probes that
    reach no late step have none.

    Args:
        scenario: the probe.
        period: the claimed period, or 0.
    """
    return (period or _LONGEST_ALONE) + 1 if scenario.name.endswith("_steps") else 0


OF_HOOKS = ProbeMaker("25.1", probes_of_number, probe_of_dtype, judged_as)
