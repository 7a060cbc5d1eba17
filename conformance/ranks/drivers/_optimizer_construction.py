"""The construction of an optimizer wrapper, by the arguments that its signature takes."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from conformance.errors import TargetError
from conformance.ranks.drivers._given_parameters import make_of_either
from conformance.ranks.drivers._kit_averager import Averager
from conformance.ranks.drivers._optimizer_backwards import give_gradient_dtypes
from conformance.ranks.drivers._user_optimizer import UserOptimizer
from conformance.ranks.drivers.base import RankDriver
from conformance.scenarios.optimizer import READ_ONCE, Setting
from conformance.scenarios.optimizer_groups import without_empty_groups
from conformance.scenarios.optimizer_training import MANY_GROUPS, USER_OPTIMIZER, wrapped_class

# The kit chooses these options, since the right values of parameters depend on them.
_CHOSEN_BY_KIT = ("lr", "momentum", "weight_decay")


def names_in_signature(driver: RankDriver) -> set[str]:
    """Return the names in the target's signature; ``**`` if it takes any keyword.

    Raises:
        TargetError: the target sets an argument that the kit chooses.
    """
    target = driver.target()
    others = ("params", "optim", "optimizer_class", "averager")
    chosen = [name for name in (*_CHOSEN_BY_KIT, *others) if name in target.kwargs]
    if chosen:
        raise TargetError(f"{chosen[0]}= is for the kit to choose; leave it out of the target")
    try:
        parameters = inspect.signature(target.function).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {
        "**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name
        for parameter in parameters
    }


class Construction:
    """Makes the subject's optimizer, and the groups that it is given at first or later.

    Args:
        driver: the rank.
        setting: the options and groups of the scenario.
        params: the parameters of the model.
        averager: the kit's own averager, if the target takes one.
    """

    def __init__(
        self,
        driver: RankDriver,
        setting: Setting,
        params: list[torch.nn.Parameter],
        averager: Averager | None,
    ) -> None:
        self._driver = driver
        self._setting = setting
        self._params = params
        self._averager = averager
        self._wrapped = wrapped_class(driver.scenario)
        self._is_regrouped = bool(driver.saved and setting.regrouped)

    def make(self, names: set[str]) -> Any:
        """Return the subject's optimizer, without a group that has no parameters if that raises.

        Args:
            names: those in the target's signature.

        Raises:
            TargetError: the signature takes no optimizer, or what it returns is none.
        """
        without = without_empty_groups(self._setting)
        if without.groups == self._setting.groups:
            return self._made(names)
        activity = self._driver.activity
        try:
            return self._made(names)
        except Exception as error:
            self._driver.activity = activity
            why = f"{type(error).__name__}: {error}"[:300]
            self._driver.recorder.event("refuses_empty_group", why=why)
        self._setting = without
        return self._made(names)

    def _made(self, names: set[str]) -> Any:
        """Return the subject's optimizer, and record the options that it has taken.

        Args:
            names: those in the target's signature.

        Raises:
            TargetError: the signature takes no optimizer, or what it returns is none.
        """
        # The optimizer may register hooks on gradients, which have their dtypes by then.
        if not give_gradient_dtypes(self._driver.scenario, self._params):
            self._driver.recorder.event("no_gradient_dtypes")
        options = self._as_given(self._setting.options)
        name = self._wrapped
        inner = UserOptimizer if name == USER_OPTIMIZER else getattr(torch.optim, name)
        # With optimizer_class, ``**`` passes the options of the inner optimizer.
        passed_on = options if "optimizer_class" in names and "**" in names else {}
        taken = options
        if not passed_on and "optim" not in names:
            taken = {name: value for name, value in options.items() if name in names}
        is_grouped = bool(self._setting.groups)
        if "lr" not in taken and not is_grouped:
            raise TargetError(
                "an optimizer wrapper takes optim, or optimizer_class and **options, or lr: "
                "its signature has none of them"
            )
        self._driver.recorder.event(
            "made",
            averager=bool(self._averager),
            options={name: self._setting.options[name] for name in taken},
            takes_any=bool({"optim", "optimizer_class"} & names),
        )
        make = partial(
            self._driver.make,
            lambda target: replace(target, kwargs={**passed_on, **target.kwargs}),
            optimizer_class=lambda: inner,
            optim=lambda: inner(self._first_groups() if is_grouped else self._params, **options),
            averager=lambda: self._averager,
            **{name: (lambda value=value: value) for name, value in options.items()},
        )

        def given() -> list[Any]:
            return self._first_groups() if is_grouped else list(self._params)

        is_rare = self._driver.scenario.name == MANY_GROUPS.name
        if self._driver.scenario.name in READ_ONCE:
            is_rare = not self._driver.target().requires_a_list("params")
        if is_rare and "params" in names:
            made = make_of_either(self._driver, make, partial(self._rarely, given), given)
        else:
            made = make(params=given)
        if not callable(getattr(made, "step", None)):
            name = type(made).__name__
            raise TargetError(f"an optimizer wrapper has a method step(); {name} has none")
        return made

    def _rarely(self, given: Callable[[], list[Any]]) -> Any:
        """Return the parameters, or the groups, in the form that few trainers have."""
        if self._driver.scenario.name in READ_ONCE:
            return iter(given())
        # torch takes the parameter itself for a list of one.
        return [{**group, "params": _one_or_all(group["params"])} for group in given()]

    def group(self, number: int) -> dict[str, Any]:
        """Return one parameter group."""
        plan = self._setting
        groups = plan.regrouped if self._is_regrouped else plan.groups
        # The entries of a group that is added after a load are replaced by no state.
        is_loaded = self._is_regrouped and (plan.given_first or number < self._loaded)
        entries = plan.new_entries if is_loaded else plan.entries
        indices, options = groups[number]
        params = [self._params[index] for index in indices]
        return {
            **{"params": params, **self._as_given(options)},
            **(copy.deepcopy(entries[number]) if entries else {}),
        }

    def appended(self) -> list[dict[str, Any]]:
        """Return the groups that are added before a saved state is loaded."""
        if not self._is_regrouped or self._setting.given_first:
            return []
        return [self.group(number) for number in range(self._first, self._loaded)]

    def _first_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups that exist from the start."""
        return [self.group(number) for number in range(self._first)]

    @property
    def _first(self) -> int:
        """The number of groups at the construction."""
        plan = self._setting
        if plan.given_first:
            return len(plan.groups)
        return self._loaded - plan.appended if self._is_regrouped else plan.groups_at(-1)

    @property
    def _loaded(self) -> int:
        """The number of groups in the state that other processes have saved."""
        return self._setting.groups_at(self._setting.saves_at - 1)

    def _as_given(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options in the form in which optimizers are given them."""
        given = dict(options)
        if self._setting.has_tensor_rates and "lr" in given:
            # torch's Adam divides the tensor by a bias correction, and rounds to its dtype.
            is_divided = self._wrapped != "SGD"
            dtype = torch.float64 if is_divided else torch.float32
            given["lr"] = torch.tensor(given["lr"], dtype=dtype)
        return given


def _one_or_all(params: list[torch.nn.Parameter]) -> torch.nn.Parameter | list[torch.nn.Parameter]:
    return params[0] if len(params) == 1 and params[0].dim() else params
