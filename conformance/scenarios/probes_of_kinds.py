"""Scenarios made for a number in the code of a subject of another kind than hooks.

``probes.py`` has those of hooks. Here a kind's scenario of large models, or of a long run, takes
the number in place of the sizes or steps that are drawn for it, and is judged as it is:

sizes   parameters, messages or activations of N - 1, N, N + 1 and 2 N + 1 elements; beyond 262,144
        of N + 1 and 2 N + 1; a number beyond 2**22 may be one of bytes, and N is a fourth of it
counts  a model of N + 2 parameters
steps   N + 3 steps, calls or contexts; N + 3 shadowed steps; as many averages, if they fit
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from conformance.scenarios import (
    averager_training,
    collective_training,
    joins_in_training,
    optimizer_training,
    strategy_training,
    wrapper_training,
)
from conformance.scenarios.model import Param, Scenario
from conformance.scenarios.probes import LEAST_TRIED, Probe, ProbeMaker
from conformance.scenarios.tables import prime_from

LARGEST_SIZE = 2**22
LARGEST_COUNT = 2048
LARGEST_STEP = 2048

# Of an element of float32.
_BYTES = 4
# Other scenarios have steps, and models have tensors, on both sides of smaller numbers.
_LEAST_STEP = {
    "averager": 100,
    "optimizer": 100,
    "strategy": 100,
    "joinable": 100,
    "collective": 300,
    "wrapper": 300,
}
_LEAST_COUNT = 170
_LARGEST_WITH_NEIGHBOURS = 2**18
# A message of rows has a scale for each row in some formats.
_COLUMNS = range(64, 1, -1)


def _of_kind(plain: Scenario) -> Scenario:
    """Return the scenario in the rule book that stands for all probes of a kind."""
    return replace(
        plain,
        name=f"{plain.kind}_probe",
        summary="made for a number in the subject's own code, in a branch that no other scenario "
        "reaches",
        prerequisite=plain.kind,
    )


AVERAGER = _of_kind(averager_training.LARGE)
OPTIMIZER = _of_kind(optimizer_training.LARGE)
STRATEGY = _of_kind(strategy_training.LARGE)
JOINABLE = _of_kind(joins_in_training.LONG)
COLLECTIVE = _of_kind(collective_training.LARGE)
WRAPPER = _of_kind(wrapper_training.LARGE)


def maker_for(kind: str, rule: str) -> ProbeMaker:
    """Return the maker of a kind's probes, which a rule reads."""
    return ProbeMaker(rule, partial(probes_of_kind, kind), least_named=max(_LEAST_STEP.values()))


def probes_of_kind(
    kind: str,
    value: float,
    quantities: Collection[str],
    place: str,
    others: Sequence[float] = (),
) -> Iterator[Probe]:
    """Yield the scenarios of a kind that reach both sides of a number.

    Args:
        kind: the kind of subject, which is not a hook.
        value: the number.
        quantities: the quantities that it may be: ``sizes``, ``counts``, ``steps``; others are
            left out.
        place: where the code compares with it.
        others: all numbers that are tried. They lie in runs of their own.
    """
    if value != int(value):
        return
    value = int(value)
    summary = f"made for the number {value} in {place}"
    of_sizes = LEAST_TRIED <= value <= _BYTES * LARGEST_SIZE and "sizes" in quantities
    of_counts = _LEAST_COUNT <= value <= LARGEST_COUNT and "counts" in quantities
    of_steps = _LEAST_STEP[kind] <= value <= LARGEST_STEP and "steps" in quantities
    for quantity, is_tried in (("elements", of_sizes), ("tensors", of_counts), ("steps", of_steps)):
        for made in _MAKERS[kind].get(quantity, ()) if is_tried else ():
            scenario = made(value)
            name = f"probe_{value}_{quantity}"
            if scenario.variant == joins_in_training.MANY.variant:
                name = f"probe_{value}_contexts"
            yield Probe(replace(scenario, name=name, summary=summary, prerequisite=kind))


def _sizes(value: int) -> list[int]:
    if value > LARGEST_SIZE:
        value //= _BYTES
    if value <= _LARGEST_WITH_NEIGHBOURS:
        return [value - 1, value, value + 1, 2 * value + 1]
    return [value + 1, 2 * value + 1]


def _parameters_of(plain: Scenario) -> Callable[[int], Scenario]:
    def of_sizes(value: int) -> Scenario:
        return replace(plain, params=tuple(Param((size,)) for size in _sizes(value)))

    return of_sizes


def _tensors_of(plain: Scenario) -> Callable[[int], Scenario]:
    def of_tensors(value: int) -> Scenario:
        return replace(plain, params=tuple(Param((1 + at % 7,)) for at in range(value + 2)))

    return of_tensors


def _steps_of(plain: Scenario) -> Callable[[int], Scenario]:
    def of_steps(value: int) -> Scenario:
        return replace(plain, steps=plain.steps[:1] * (value + 3))

    return of_steps


def _messages(value: int) -> Scenario:
    sizes = _sizes(value)
    params = [*map(_matrix, sizes)]
    if value <= _LARGEST_WITH_NEIGHBOURS:
        # There are messages above larger numbers in other layouts.
        params.append(replace(params[-1], layout="transposed"))
    return replace(
        collective_training.LARGE,
        params=tuple(params),
        steps=collective_training.LARGE.steps[:1],
        period=prime_from(min(max(101, max(sizes) // 3), 130_000)),
    )


def _matrix(numel: int) -> Param:
    """Return a matrix of exactly so many elements, with up to 64 columns."""
    columns = next((count for count in _COLUMNS if numel % count == 0), 1)
    return Param((numel // columns, columns))


def _calls(value: int) -> Scenario:
    kinds = ("normal", "uneven")
    steps = tuple(kinds[call % 2] for call in range(value + 3))
    return replace(collective_training.LONG, steps=steps)


def _activations(value: int) -> Scenario:
    return replace(wrapper_training.LARGE, params=tuple(Param((size,)) for size in _sizes(value)))


def _steps_of_wrapper(value: int) -> Scenario:
    rows = tuple(1 + step % 12 for step in range(value + 3))
    steps = ("normal",) * (value + 3)
    late = Param((wrapper_training.LONG_STEPS[0] // 3,))
    return replace(wrapper_training.LONG, steps=steps, params=(Param(rows), late))


def _shadowed(value: int) -> Scenario:
    return averager_training.with_option(joins_in_training.LONG, "inputs", value + 3)


_Maker = Callable[[int], Scenario]
_MAKERS: Mapping[str, Mapping[str, tuple[_Maker, ...]]] = {
    "averager": {
        "elements": (_parameters_of(averager_training.LARGE),),
        "tensors": (_tensors_of(averager_training.LARGE),),
        "steps": (_steps_of(averager_training.LONG),),
    },
    "optimizer": {
        "elements": (_parameters_of(optimizer_training.LARGE),),
        "tensors": (_tensors_of(optimizer_training.LARGE),),
        "steps": (_steps_of(optimizer_training.LONG),),
    },
    "strategy": {
        "elements": (_parameters_of(strategy_training.LARGE),),
        "tensors": (_tensors_of(strategy_training.LARGE),),
        "steps": (_steps_of(strategy_training.LONG),),
    },
    "joinable": {"steps": (_shadowed, _steps_of(joins_in_training.MANY))},
    "collective": {"elements": (_messages,), "steps": (_calls,)},
    "wrapper": {"elements": (_activations,), "steps": (_steps_of_wrapper,)},
}
