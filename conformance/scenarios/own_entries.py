"""The user's own entries in parameter groups, beside the optimizer's options.

Training code keeps names, layers or factors there, and schedulers keep ``initial_lr``. torch's
optimizers ignore such entries, save them and load them. Their names and values are drawn from the
session's seed.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from conformance.scenarios.model import Scenario
from conformance.scenarios.optimizer import GROUPS, Setting
from conformance.scenarios.optimizer_states import RESTORED_RATES

Entries = dict[str, Any]

_NAMES = ("name", "role", "layer", "depth", "weight", "lr_scale", "frozen_at", "tags", "initial_lr")
_VARIANTS = (GROUPS.variant, RESTORED_RATES.variant, "saved_groups")


def with_entries(plan: Setting, scenario: Scenario) -> Setting:
    """Return the plan with three entries in each group, if the scenario has any.

    One more entry is written to a group before a step: of that step's state, if a state is saved or
    restored. Processes that load a state have other values, or none, before they load it.
    """
    if scenario.variant not in _VARIANTS:
        return plan
    # The scenarios that save a state and continue from it have one plan.
    draw = random.Random(f"{scenario.session_seed}/{scenario.variant}/entries")
    names = draw.sample(_NAMES, len(_NAMES))
    written_name = names.pop()
    count = len(plan.groups)
    kinds = draw.sample(range(_KINDS), _KINDS) * count
    entries = [
        {name: _value(draw, kinds.pop()) for name in draw.sample(names, 3)} for _ in range(count)
    ]
    group = draw.randrange(plan.groups_at(-1))
    restored, saved = plan.back
    kind = draw.randrange(_KINDS)
    last = max(saved, plan.saves_at - 1)
    written = {
        draw.randint(0, last) if last > 0 else 1: {group: {written_name: _value(draw, kind)}}
    }
    if restored >= 0:
        # This value is gone when the earlier state is restored.
        written[draw.randint(saved + 1, restored - 1)] = {group: {written_name: _value(draw, kind)}}
    has_others = [draw.random() < 0.5 for _ in entries]
    # One group at least of those that are loaded has other values: these must not stay.
    has_others[draw.randrange(plan.groups_at(plan.saves_at - 1))] = True
    new = [
        {name: _value(draw, draw.randrange(_KINDS)) for name in of_group} if has else {}
        for has, of_group in zip(has_others, entries, strict=True)
    ]
    return replace(plan, entries=tuple(entries), new_entries=tuple(new), written_entries=written)


# Two groups of three entries have all kinds of values.
_KINDS = 6


def _value(draw: random.Random, kind: int) -> Any:
    """Return a value of a kind that users have: a text, a number, a flag, or several."""
    values = (
        f"decoder.{draw.randrange(100)}",
        draw.randrange(1000),
        draw.uniform(0.0, 2.0),
        draw.random() < 0.5,
        (draw.randrange(10), draw.randrange(10)),
        [f"layer{draw.randrange(100)}", "bias"],
    )
    return values[kind]


def entries_at(plan: Setting, step: int) -> list[Mapping[str, Any]]:
    """Return the entries that each parameter group has before a step.

    By torch's contract a loaded state replaces those that groups had before.
    """
    of_groups = [dict(entries) for entries in plan.entries]
    restored, saved_after = plan.back
    saved: list[Entries] = []
    for earlier in range(step + 1):
        if earlier == restored:
            of_groups = [dict(entries) for entries in saved]
        for group, written in plan.written_entries.get(earlier, {}).items():
            of_groups[group].update(written)
        if earlier == saved_after:
            saved = [dict(entries) for entries in of_groups]
    return list(of_groups[: plan.groups_at(step)])
