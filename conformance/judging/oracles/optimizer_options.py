"""The options of each parameter of an optimizer wrapper, which are rewritten between steps."""

import copy
from collections.abc import Mapping
from typing import Any

from conformance.scenarios.optimizer import Setting


class Options:
    """The options of all parameters, and each group's own count of its steps.

    Args:
        plan: the groups, and what is written to them.
        of_all: the options of the construction, for parameters if there are no groups, and for
            groups that leave out some.
    """

    def __init__(self, plan: Setting, of_all: Mapping[str, Any]) -> None:
        self._plan = plan
        self._of_all = dict(of_all)
        self._indices = [indices for indices, _ in plan.groups]
        self._of_groups = [{**of_all, **options} for _, options in plan.groups]

    def begin_step(self, step: int) -> None:
        """Write the options of a step, and count it."""
        rate = self._plan.rates[step] if self._plan.rates else None
        if rate is not None:
            self._of_all["lr"] = rate
        for group, written in self._plan.changes.get(step, {}).items():
            self._of_groups[group].update(written)
        for options in self._of_groups[: self._plan.groups_at(step)]:
            options["turns"] = options.get("turns", 0) + 1

    def saved(self) -> Any:
        """Return the options, for :meth:`restore`."""
        return copy.deepcopy((self._of_all, self._of_groups))

    def restore(self, saved: Any) -> None:
        """Go back to saved options."""
        self._of_all, self._of_groups = copy.deepcopy(saved)

    def rates(self) -> list[float]:
        """Return the learning rates of all groups."""
        return [options["lr"] for options in self._of_groups]

    def regroup(self) -> dict[int, int]:
        """Load the state into the groups of other processes.

        By torch's contract states and options are matched by their places in the groups. Return
        the parameter whose state each parameter receives.
        """
        before = [index for indices in self._indices for index in indices]
        self._indices = [indices for indices, _ in self._plan.regrouped]
        after = [index for indices in self._indices for index in indices]
        return dict(zip(after, before, strict=True))

    def of(self, index: int, step: int) -> Mapping[str, Any] | None:
        """Return the options of a parameter's group, or None while it is in no group."""
        if not self._plan.groups:
            return self._of_all
        if not is_in_a_group(self._plan, index, step):
            return None
        groups = zip(self._indices, self._of_groups, strict=True)
        return next(options for indices, options in groups if index in indices)


def is_in_a_group(plan: Setting, index: int, step: int) -> bool:
    """Return whether a parameter is in a parameter group at a step."""
    return index not in plan.in_no_group(step)
