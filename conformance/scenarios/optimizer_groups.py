"""Plans of parameter groups that leave out options: those of the construction count then.

``SGD([{"params": body}, {"params": head, "lr": 1e-3}], lr=1e-2, momentum=0.9)`` is the example of
torch's documentation (torch.optim, Per-parameter options). A group from ``add_param_group`` gets
the options of the construction, too, and not those that a schedule has written to other groups. The
options of a construction are none of the defaults of the class. All numbers are drawn.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conformance.scenarios.optimizer import Setting

Options = Mapping[str, Any]
Group = tuple[tuple[int, ...], Options]

# Options that a group leaves out together: torch takes no dampening with nesterov.
OF_SGD = (("lr",), ("momentum",), ("dampening", "nesterov"), ("weight_decay",), ("maximize",))
OF_ADAM = (("lr",), ("betas",), ("eps",), ("weight_decay",), ("amsgrad",), ("maximize",))


def leaving_out(
    groups: Sequence[Group], draw: random.Random, options: Sequence[tuple[str, ...]], added: int
) -> tuple[Group, ...]:
    """Return groups, some without all of their options: one that exists from the start, or more.

    Args:
        groups: the groups, with all of their options.
        draw: the source of the numbers.
        options: the names of options that may be left out, each with those that go with it.
        added: the number of groups that are added later; these leave out some, too.
    """
    first = len(groups) - added
    places = {*draw.sample(range(first), draw.randint(1, first)), *range(first, len(groups))}
    return tuple(
        (indices, _without(of_group, draw, options) if place in places else of_group)
        for place, (indices, of_group) in enumerate(groups)
    )


def _without(
    of_group: Options, draw: random.Random, options: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """Leave out all options, as often as not, or some."""
    count = len(options) if draw.random() < 0.5 else draw.randint(1, len(options))
    left_out = {name for names in draw.sample(options, count) for name in names}
    return {name: value for name, value in of_group.items() if name not in left_out}


def few_groups(draw: random.Random) -> Setting:
    """Return the plan of two groups and an added one; SGD stays exact.

    The construction has momentum or weight decay. One group has the opposite, and the two others
    leave out options or change them. Few digits are enough: with weight decay the learning rate is
    1/2 or 1, and there is no momentum.
    """
    first_rate, second_rate = (2.0**-exponent for exponent in draw.sample(range(2, 6), 2))
    summing = {"lr": first_rate, "momentum": 1.0, "weight_decay": 0.0}
    decaying = {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.5}
    if draw.random() < 0.5:
        of_all, other = summing, decaying
        changes = {"lr": second_rate, "momentum": 0.0}
    else:
        of_all, other = decaying, summing
        changes = {"lr": 1.0, "weight_decay": 0.0}

    def part() -> dict[str, float]:
        """Return the options that a group has itself: none, as often as not, or one or both."""
        count = 0 if draw.random() < 0.5 else draw.randint(1, 2)
        return {name: changes[name] for name in sorted(draw.sample(sorted(changes), count))}

    first = [part(), other]
    draw.shuffle(first)
    members = ((0, 3), (1, 2), (4,))
    groups = tuple(zip(members, (*first, part()), strict=True))
    return Setting(options=of_all, groups=groups, added=(2,))


def with_zeros(
    groups: Sequence[Group],
    changes: Mapping[int, Mapping[int, Any]],
    draw: random.Random,
    zeros: Sequence[Options] = ({"momentum": 0.0}, {"weight_decay": 0.0}),
) -> tuple[Group, ...]:
    """Let options be 0, each in a group that is drawn, until a step rewrites them.

    Args:
        groups: the groups, with options of their own.
        changes: what steps rewrite: options by the number of their group, which are never 0.
        draw: the source of the numbers.
        zeros: the options, each with those that go with it.
    """
    numbers = sorted({number for change in changes.values() for number in change})
    changed = list(groups)
    for options in zeros:
        number = draw.choice(numbers)
        indices, own = changed[number]
        if not options.keys() <= own.keys():
            # It has left one of them out, and leaves out its rate instead.
            own = {name: value for name, value in own.items() if name != "lr"}
        changed[number] = (indices, {**own, **options})
    return tuple(changed)


def many_groups(params: int, draw: random.Random, most: int = 40) -> Setting:
    """Divide the parameters among 12 to ``most`` groups, each with one parameter at least."""

    def options() -> dict[str, float]:
        return {
            "lr": draw.uniform(0.01, 0.2),
            "momentum": draw.uniform(0.5, 0.95),
            "weight_decay": draw.uniform(0.01, 0.2),
        }

    count = draw.randint(12, most)
    places = draw.sample(range(params), params)
    members = [[place] for place in places[:count]]
    for place in places[count:]:
        draw.choice(members).append(place)
    groups = [(tuple(sorted(indices)), options()) for indices in members]
    names = [(name,) for name in options()]
    return Setting(
        warmup=2, period=2, options=options(), groups=leaving_out(groups, draw, names, added=0)
    )


def with_empty_group(plan: Setting, draw: random.Random) -> Setting:
    """Return a plan with one more group, which has no parameter: it is in front of another one.

    A list of all biases, or of a frozen part, may be empty.
    """
    place = draw.randrange(len(plan.groups))
    empty: Group = ((), draw.choice(plan.groups)[1])
    return replace(plan, groups=(*plan.groups[:place], empty, *plan.groups[place:]))


def without_empty_groups(plan: Setting) -> Setting:
    """Return a plan without the groups that have no parameters."""
    return replace(plan, groups=tuple(group for group in plan.groups if group[0]))


def groups_together(params: int, draw: random.Random) -> Setting:
    """Divide the parameters among 12 to 24 groups; every other step rewrites some options."""
    plan = many_groups(params, draw, most=24)
    changes = {
        step: {
            group: {"lr": draw.uniform(0.01, 0.2), **_moving(draw)}
            for group in draw.sample(range(len(plan.groups)), 3)
        }
        for step in range(1, 8, 2)
    }
    zeroed = with_zeros(plan.groups, changes, draw)
    return replace(plan, groups=zeroed, changes=changes)


def _moving(draw: random.Random) -> dict[str, float]:
    return {"momentum": draw.uniform(0.5, 0.95), "weight_decay": draw.uniform(0.01, 0.2)}
