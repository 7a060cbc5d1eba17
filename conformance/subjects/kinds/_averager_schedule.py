"""The schedules that averagers claim, and their scenarios as long as these schedules need."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conformance.scenarios.averager import (
    DTYPES,
    FLAT,
    FORMS,
    INTEGERS,
    RESUMED,
    SAVED,
    SUBGROUPS,
    large_integers,
)
from conformance.scenarios.averager_loops import (
    CLOSE,
    OVERFLOWS,
    ROWS,
    averages_alone,
    averages_of,
    freezes_any,
    idle,
)
from conformance.scenarios.averager_rests import let_rest
from conformance.scenarios.averager_training import (
    AUTOCAST,
    CHANGING,
    CHANGING_LATE,
    DRIFTING,
    GOES_ON,
    IDLE,
    LARGE,
    LATE,
    LOADS_FIRST,
    LONG,
    LONG_STEPS,
    MODELS_COME,
    MOVED,
    NEAR_LIMIT,
    ONE_MODEL,
    RESUMED_EARLY,
    ROLLED_BACK,
    ROLLED_TO_START,
    SAVED_EARLY,
    SPECIAL,
    TWO,
    TWO_GROUPS,
    large_halves,
    large_halves_first,
    many_params,
    on_one_group,
    on_two_groups,
    two_large,
    with_option,
    with_tied,
)
from conformance.scenarios.averaging_schedule import HELD, MAX_STEPS, QUIET, Schedule, lengthened
from conformance.scenarios.conditions_together import AVERAGER as TOGETHER
from conformance.scenarios.conditions_together import is_long
from conformance.scenarios.failing_collectives import AVERAGER as FAILING
from conformance.scenarios.failing_collectives import MOST_SUCCEEDING
from conformance.scenarios.kinds_in_clusters import AVERAGER as CLUSTERS
from conformance.scenarios.kinds_under_default_dtypes import AVERAGER as DEFAULT_DTYPES
from conformance.scenarios.model import Scenario
from conformance.scenarios.seeds import generator, shared_generator
from conformance.subjects.target import parse_target

_MOST_CALLS = 400  # of the averager of each further model
_STATEFUL = ("DiLoCoModelAverager", "OuterStepModelAverager", "EMAModelAverager")


def schedule_of(options: Mapping[str, Any]) -> Schedule | None:
    """Return the schedule that the claims of an averager name, or None if they name none.

    Args:
        options: the values of the claims by name.
    """
    if options.get("periodic"):
        return _periodic(options["periodic"])
    if options.get("hierarchical"):
        return _hierarchical(options["hierarchical"])
    if not options.get("like"):
        return None
    reference, arguments = _reference_of(options)
    if "period_group_size_dict" in arguments:
        return _hierarchical(arguments)
    if reference.startswith("OuterStepModelAverager"):
        # Its first round begins when it is made, so that its first average ends a round.
        period = _number(arguments.get("period"), 1)
        return Schedule((period,), period - 1, period - 1)
    return _periodic(arguments)


def largest_group(options: Mapping[str, Any]) -> int:
    """Return the size of the largest group that the claims of an averager name, or 0."""
    arguments = options.get("hierarchical") or {}
    if options.get("like"):
        _, arguments = _reference_of(options)
    sizes = arguments.get("period_group_size_dict")
    return max(sizes.values(), default=0) if isinstance(sizes, Mapping) else 0


def _reference_of(options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the reference that an averager is claimed to be like, and its arguments."""
    reference = str(options["like"]["reference"])
    return reference, parse_target(f"hooks_ref:{reference}", "--claims like").kwargs


def _periodic(arguments: Mapping[str, Any]) -> Schedule:
    warmup = _number(arguments.get("warmup_steps"), 0)
    return Schedule((_number(arguments.get("period"), 1),), warmup, warmup)


def _hierarchical(arguments: Mapping[str, Any]) -> Schedule:
    sizes = arguments["period_group_size_dict"]
    periods = sizes if isinstance(sizes, Mapping) else {}
    numbers = tuple(_number(period, 1) for period in periods)
    return Schedule(numbers or (1,), _number(arguments.get("warmup_steps"), 0), 0)


def _number(value: Any, default: int) -> int:
    """Return a number of steps; the subject itself refuses a wrong one."""
    return value if isinstance(value, int) and value >= default else default


def adapt(scenario: Scenario, options: Mapping[str, Any]) -> Scenario:
    """Return a scenario of an averager with its drawn numbers, as long as its schedule needs."""
    schedule = schedule_of(options)
    if schedule is None:
        return scenario
    if scenario.name in {cluster.name for cluster in (*CLUSTERS, *TOGETHER)}:
        scenario = _with_claimed_ranks(scenario, options)
    if scenario.is_probe:
        return _probe(scenario, schedule)
    draw = generator(scenario)
    match scenario.name:
        case LARGE.name:
            # A parameter of 2**20 to 2**21 elements is the largest.
            params = (*large_halves_first(draw), *many_params(draw, 2**20))
            scenario = replace(scenario, params=params)
            steps = lengthened(scenario.steps, schedule, averages=scenario.steps, alone=True)
            return replace(scenario, steps=steps)
        case SPECIAL.name:
            return _meet_special_values(scenario, schedule, draw, options)
        case NEAR_LIMIT.name:
            scenario = replace(scenario, params=(*scenario.params, *large_halves(draw)))
            kinds = _near_limit(scenario.steps, options)
            steps = lengthened(kinds, schedule, averages=kinds, alone=True)
            return replace(scenario, steps=steps)
        case INTEGERS.name:
            first = draw.choice((3, 4))
            params = (*scenario.params, *large_integers(draw))
            scenario = replace(scenario, params=params, size=first + 3, nodes=(first, 3))
            scenario = _with_claimed_ranks(scenario, options)
            return replace(scenario, steps=lengthened(scenario.steps, schedule, alone=True))
        case ROWS.name:
            kinds = scenario.steps
            dues = averages_of(schedule, len(kinds))
            steps = lengthened(kinds, schedule, averages=kinds, alone=True, also=dues)
            return replace(scenario, steps=steps)
        case OVERFLOWS.name | CLOSE.name:
            return averages_alone(scenario, schedule)
        case IDLE.name:
            return idle(scenario, schedule, draw, between_only=is_stateful(options))
        case TWO.name:
            if _is_like(options, "EMA"):
                # It leaves the parameters as they are: one model may have several.
                scenario = with_option(scenario, ONE_MODEL, True)
            return _take_turns(scenario, schedule, draw)
        case TWO_GROUPS.name:
            scenario = _take_groups(scenario, options, draw)
            return _take_turns(scenario, schedule, draw)
        case CHANGING.name:
            return _change(scenario, schedule, draw)
        case CHANGING_LATE.name:
            return _change(scenario, schedule, draw, after=LATE)
        case MOVED.name:
            return _move(scenario, schedule, draw, options)
        case LONG.name:
            kinds = scenario.steps[:1] * draw.randint(*LONG_STEPS)
            if _is_like(options, "Gossip"):
                # Two ranks have one partner each.
                scenario = replace(scenario, size=4)
            scenario = replace(scenario, steps=lengthened(kinds, schedule))
            if not is_stateful(options):
                scenario = let_rest(scenario, schedule)
            first = schedule.first(min(schedule.periods))
            return (
                with_option(scenario, MODELS_COME, first + 1) if first < _MOST_CALLS else scenario
            )
        case DRIFTING.name:
            return _drift(scenario, schedule, draw)
        case SAVED.name | RESUMED.name:
            draw = random.Random(f"{scenario.session_seed}/saved")
            return _save(scenario, schedule, draw.choice(_between_averages(schedule)))
        case SAVED_EARLY.name | RESUMED_EARLY.name:
            draw = random.Random(f"{scenario.session_seed}/saved early")
            if "like" not in options:
                # Means need no state that differs among ranks: rank 0 may write the checkpoint.
                scenario = with_option(scenario, LOADS_FIRST, True)
            return _save(scenario, schedule, draw.choice(_before_averages(schedule)))
        case ROLLED_BACK.name:
            return _roll_back(scenario, schedule, draw)
        case ROLLED_TO_START.name:
            return _roll_to_start(scenario, schedule, draw)
    if scenario.name in {failing.name for failing in FAILING}:
        return _fail(scenario, schedule)
    if scenario.name in {together.name for together in TOGETHER}:
        if is_long(scenario):
            return _save_late(scenario, schedule)
        return _come_together(scenario, schedule, options)
    if scenario.name == DEFAULT_DTYPES.name:
        return _change_dtypes(scenario, schedule)
    if scenario.variant == AUTOCAST.variant:
        # Random values of so many elements take long: only averages have them.
        steps = lengthened(scenario.steps, schedule, alone=True)
        return replace(scenario, params=(*scenario.params, *two_large(draw)), steps=steps)
    if scenario.name == SUBGROUPS.name and "world_only" not in options:
        scenario = with_option(scenario, GOES_ON, True)
    if scenario.name == FORMS.name:
        scenario = freezes_any(scenario, draw)
    if scenario.name == FLAT.name and not options.get("like"):
        scenario = with_tied(scenario, draw)
    averages = ("crafted", "normal") if scenario.name == DTYPES.name else ()
    return replace(scenario, steps=lengthened(scenario.steps, schedule, averages=averages))


def _largest_group(options: Mapping[str, Any]) -> int:
    """Return the size of the largest group of a hierarchical claim; 0 without such a claim."""
    claimed = options.get("hierarchical")
    if options.get("like"):
        reference = str(options["like"]["reference"])
        claimed = parse_target(f"hooks_ref:{reference}", "--claims like").kwargs
    sizes = (claimed or {}).get("period_group_size_dict")
    numbers = sizes.values() if isinstance(sizes, Mapping) else ()
    return max((size for size in numbers if isinstance(size, int)), default=0)


def _with_claimed_ranks(scenario: Scenario, options: Mapping[str, Any]) -> Scenario:
    """Leave groups out for an averager over WORLD; take the ranks of the largest group.

    A hierarchical averager makes process groups, and all ranks of WORLD have to make these in one
    order: two averagers on disjoint groups would wait for each other.
    """
    largest = _largest_group(options)
    if scenario.groups and (largest > 1 or "world_only" in options):
        scenario = replace(scenario, groups=(), size=scenario.own_size)
    if largest < 2 or not scenario.own_size:
        return scenario
    first = largest - 1 if len(set(scenario.nodes)) > 1 else largest // 2
    return replace(scenario, size=largest, nodes=(first, largest - first))


def _take_groups(scenario: Scenario, options: Mapping[str, Any], draw: random.Random) -> Scenario:
    """Draw the groups of two averagers, unless the claims fix these: the size of the largest group,
    or WORLD.
    """
    largest = _largest_group(options)
    if largest > 1:
        return on_one_group(scenario, largest)
    if "world_only" in options:
        return on_one_group(scenario, scenario.size)
    return on_two_groups(scenario, draw)


def _change_dtypes(scenario: Scenario, schedule: Schedule) -> Scenario:
    """Go on for three averages, and change the default dtype after each of them.

    With a schedule of three steps, all averages would have the same of three dtypes.
    """
    period = min(schedule.periods)
    dues = [schedule.first(period)]
    while len(dues) < len(scenario.default_dtypes):
        dues.append(schedule.next(period, dues[-1] + 1))
    steps = lengthened(scenario.steps, schedule, also=dues)
    if len(steps) <= dues[-1]:
        steps += scenario.steps[:1] * (dues[-1] + 1 - len(steps))
    passed = [sum(map(schedule.is_due, range(step))) for step in range(len(steps))]
    dtypes = scenario.default_dtypes
    return replace(
        scenario,
        steps=steps,
        default_dtypes=tuple(dtypes[count % len(dtypes)] for count in passed),
    )


def _is_like(options: Mapping[str, Any], name: str | tuple[str, ...]) -> bool:
    """Whether the averager claims to be like a reference whose name begins so."""
    return "like" in options and str(options["like"]["reference"]).startswith(name)


def is_stateful(options: Mapping[str, Any]) -> bool:
    """Whether the averager claims to be like a reference that remembers earlier averages."""
    return _is_like(options, _STATEFUL)


def _remembers_means(options: Mapping[str, Any]) -> bool:
    """Whether results are means, or averages of means, so that these have no larger magnitude."""
    return not is_stateful(options) or _is_like(options, "EMA")


# The first outer step goes beyond the mean by this factor at most, so that it stays in the range
# of float16: values of ``limit`` on two and three ranks are below 48,000.
_LARGEST_OUTER_STEP = 1.35


def _near_limit(kinds: Sequence[str], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of values of averages, with those of ``limit`` as the claims allow these.

    An outer step may leave the range of float16 although the mean does not: after the first one,
    momentum and the distance from earlier values come in.
    """
    if _remembers_means(options):
        return tuple(kinds)
    later = ["crafted" if kind == "limit" else kind for kind in kinds]
    reference = str(options["like"]["reference"])
    arguments = parse_target(f"hooks_ref:{reference}", "--claims like").kwargs
    step = float(arguments.get("lr", 0.7)) * (1 + float(arguments.get("momentum", 0.9)))
    if reference.startswith("OuterStep") and step > _LARGEST_OUTER_STEP:
        return tuple(later)
    # DiLoCo's first round begins with the mean itself.
    later.remove("crafted")
    return ("limit", *later)


def _meet_special_values(
    scenario: Scenario, schedule: Schedule, draw: random.Random, options: Mapping[str, Any]
) -> Scenario:
    """Feed special values in a drawn order, and ordinary ones after them."""
    *kinds, last = scenario.steps
    draw.shuffle(kinds)
    kinds = list(_near_limit(kinds, options))
    period = min(schedule.periods)
    dues = [schedule.first(period)]
    while len(dues) <= len(kinds):
        dues.append(schedule.next(period, dues[-1] + 1))
    averages = (*kinds, last)
    steps = lengthened(scenario.steps, schedule, averages=averages, alone=True, also=dues)
    return replace(scenario, steps=steps)


def _take_turns(scenario: Scenario, schedule: Schedule, draw: random.Random) -> Scenario:
    """Let two averagers take turns in a drawn order, until both have averaged twice."""
    steps = lengthened((scenario.steps[0],) * 2, schedule)
    # The second model begins later, so that a count that both share shows.
    left = {"0": len(steps), "1": len(steps)}
    order = ["0"] * draw.randint(1, max(1, min(*schedule.periods, 7, len(steps) - 1)))
    left["0"] -= len(order)
    while any(left.values()):
        model = draw.choice("01")
        model = model if left[model] else "10"[int(model)]
        left[model] -= 1
        order.append(model)
    counts = {"0": 0, "1": 0}
    kinds = []
    for model in order:
        kinds.append(steps[counts[model]])
        counts[model] += 1
    return with_option(replace(scenario, steps=tuple(kinds)), "turns", "".join(order))


def _probe(scenario: Scenario, schedule: Schedule) -> Scenario:
    """Make a run for a number as long as the schedule needs.

    Large parameters change at averages alone. A long run has an average after its last step as
    written; it has as many averages as steps, if they fit.
    """
    if scenario.variant == LARGE.variant:
        # The control gets the scenario as the subject's schedule has made it.
        kinds = tuple(kind for kind in scenario.steps if kind != QUIET)
        steps = lengthened(kinds, schedule, averages=kinds, alone=True)
        return replace(scenario, steps=steps)
    period = min(schedule.periods)
    written = len(scenario.steps)
    last = schedule.first(period) + written * period
    if last >= MAX_STEPS // 2:
        last = schedule.next(period, written)
    return replace(scenario, steps=lengthened(scenario.steps[:1] * (last + 1), schedule))


def _change(
    scenario: Scenario,
    schedule: Schedule,
    draw: random.Random,
    after: tuple[int, int] = (0, 0),
) -> Scenario:
    """Change the model at a drawn step between two averages, between the next two, and once more
    between the next two.

    Args:
        after: the least and the largest number of averages before the first two, if they fit.
    """
    period = max(schedule.periods)
    fitting = (MAX_STEPS // 2 - schedule.first(period)) // period - 4
    first = schedule.first(period) + min(draw.randint(*after), max(0, fitting)) * period
    names = ("change", "addition", "removal")
    drawn = [
        draw.randint(first + number * period + 1, first + (number + 1) * period)
        for number in range(len(names))
    ]
    also = [step for at in drawn for step in (at - 1, at)]
    steps = lengthened(scenario.steps, schedule, also=(*also, first + 4 * period))
    changed = replace(scenario, steps=steps)
    for name, at in zip(names, drawn, strict=True):
        changed = with_option(changed, name, at)
    return changed


def _move(
    scenario: Scenario, schedule: Schedule, draw: random.Random, options: Mapping[str, Any]
) -> Scenario:
    """Give the parameters new memory at a drawn step before the second average, and before the
    third one.
    """
    period = max(schedule.periods)
    first = schedule.first(period)
    moves = [draw.randint(due + 1, due + period) for due in (first, first + period)]
    also = (*moves, first + 2 * period)
    steps = lengthened(scenario.steps, schedule, also=also, alone=True)
    scenario = with_option(replace(scenario, steps=steps), "moves", " ".join(map(str, moves)))
    if is_stateful(options):
        # The state may be stored by parameter, and in the dtype of the first average.
        return with_option(scenario, "state", "kept")
    return scenario


def _drift(scenario: Scenario, schedule: Schedule, draw: random.Random) -> Scenario:
    """Move the parameters after the first average, and call the averager for up to 200 more.

    Soon after the move, within a tenth of the averages, a state is saved and loaded.
    """
    period = min(schedule.periods)
    first = schedule.first(period)
    number = max(1, min(200, (MAX_STEPS // 2 - first) // period))
    last = first + number * period
    kinds = {first: "crafted", first + 1: "crafted", last: HELD}
    steps = tuple(kinds.get(step, QUIET) for step in range(last + 1))
    loads_at = draw.randint(first + 2, first + 2 + number * period // 10)
    scenario = with_option(replace(scenario, steps=steps), "rolls_back_at", loads_at)
    return with_option(scenario, "lost_steps", 0)


def _fail(scenario: Scenario, schedule: Schedule) -> Scenario:
    """Let the failure come at the average of the drawn number, and go on for some averages more.

    From there on parameters change before each average: an averager may leave out those that no
    rank has changed.
    """
    period = min(schedule.periods)
    first = schedule.first(period)
    number = min(scenario.fault.step, max(0, (MAX_STEPS // 2 - first) // period))
    step = first + number * period
    last = step + MOST_SUCCEEDING * period
    changing = {0, *range(step, last + 1, period)}
    kinds = tuple(scenario.steps[0] if at in changing else QUIET for at in range(last + 1))
    return replace(scenario, steps=kinds, fault=replace(scenario.fault, step=step))


def _save(scenario: Scenario, schedule: Schedule, saves_at: int) -> Scenario:
    """Save after so many steps, and continue until an average of every period is due."""
    also = [saves_at - 1, saves_at]
    for period in schedule.periods:
        due = schedule.next(period, saves_at)
        also += [due, due + period]
    return replace(
        scenario,
        steps=lengthened(scenario.steps, schedule, also=also),
        resume=replace(scenario.resume, saves_at=saves_at),
    )


def _roll_back(scenario: Scenario, schedule: Schedule, draw: random.Random) -> Scenario:
    """Roll back between the first two averages, after steps with an average among them.

    A count of steps that is not rolled back shows. If there are several periods, the next step has
    the average of the longest one.
    """
    saves_at = draw.choice(_between_averages(schedule))
    if len(schedule.periods) > 1:
        longest = max(schedule.periods)
        saves_at = schedule.next(longest, schedule.first(longest) + 1)
    period = min(schedule.periods)
    numbers = [number for number in range(period + 1, 2 * period) if number % period]
    lost = draw.choice(numbers or [1, 2, 3])
    steps = _save(scenario, schedule, saves_at).steps
    scenario = with_option(replace(scenario, steps=steps), "rolls_back_at", saves_at)
    return with_option(scenario, "lost_steps", lost)


def _roll_to_start(scenario: Scenario, schedule: Schedule, draw: random.Random) -> Scenario:
    """Roll back to the state before the first step, after steps with an average or more."""
    period = min(schedule.periods)
    lost = schedule.first(period) + draw.randint(1, period + 1)
    scenario = replace(scenario, steps=lengthened(scenario.steps, schedule))
    return with_option(with_option(scenario, "rolls_back_at", 0), "lost_steps", lost)


def _save_late(scenario: Scenario, schedule: Schedule) -> Scenario:
    """Save at the drawn step, or at the next one at which a lost count of steps shows."""
    saves_at = scenario.resume.saves_at
    period = min(schedule.periods)
    return _save(scenario, schedule, saves_at + (period > 1 and saves_at % period == 0))


# The kinds of values of averages, in turn.
_TOGETHER = ("limit", "normal")


def _come_together(scenario: Scenario, schedule: Schedule, options: Mapping[str, Any]) -> Scenario:
    """Save between the first two averages, and go on for so many averages that each kind of value
    meets each default dtype.
    """
    saves_at = shared_generator(scenario, "save").choice(_between_averages(schedule))
    period = min(schedule.periods)
    dues = [schedule.first(period)]
    while len(dues) < len(_TOGETHER) * len(scenario.default_dtypes):
        due = schedule.next(period, dues[-1] + 1)
        if due >= MAX_STEPS:
            break
        dues.append(due)
    also = (saves_at - 1, saves_at, schedule.next(period, saves_at), *dues)
    steps = lengthened(scenario.steps, schedule, also=also)
    passed = [sum(map(schedule.is_due, range(step))) for step in range(len(steps))]
    kinds = _TOGETHER if _remembers_means(options) else ("crafted", "normal")
    dtypes = scenario.default_dtypes
    return replace(
        scenario,
        steps=tuple(
            kinds[count % len(kinds)] if schedule.is_due(step) and kind != QUIET else kind
            for step, (kind, count) in enumerate(zip(steps, passed, strict=True))
        ),
        default_dtypes=tuple(dtypes[count % len(dtypes)] for count in passed),
        resume=replace(scenario.resume, saves_at=saves_at),
    )


def _between_averages(schedule: Schedule) -> list[int]:
    """Return numbers of steps after which a lost count of steps shows.

    A count that begins again gives the same schedule if the number of lost steps is a multiple of
    the period.
    """
    period = min(schedule.periods)
    first = schedule.first(period)
    numbers = range(first + 1, first + max(2, 2 * period))
    return [number for number in numbers if number % period] or [first + 1]


def _before_averages(schedule: Schedule) -> list[int]:
    """Return numbers of steps within the warm-up, or before the second average if it has none."""
    within = list(range(1, schedule.first(min(schedule.periods))))
    return within or _between_averages(schedule)
