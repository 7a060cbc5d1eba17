"""A joinable that trains the same steps in one context and in two, and values that are out of date.

The driver is the trainer of a joinable that leaves its parameters as they are: it clears gradients,
and steps. It is none of another joinable, which may keep its gradients for the next step. A first
context shows it.

In a context with uneven inputs the driver finds the tensors that the steps of a rank change, and
its shadows leave as they are. When the same context is run again, with a new joinable, the driver
sets some tensors back by one step after the first shadow: the gradients, and the tensors that all
ranks hold alike after a join. So the rank holds the values of one that has joined a step earlier.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from conformance.ranks.drivers._contexts import Contexts
from conformance.ranks.drivers._join_numbers import Numbers, digest_of, parts_of
from conformance.ranks.drivers._joinables import OfGroup
from conformance.ranks.drivers.base import RankDriver
from conformance.ranks.instruments.digest import digest_of_bytes
from conformance.ranks.instruments.global_seeds import kept_generators
from conformance.scenarios.join_part_draws import (
    TRIAL,
    WHOLE,
    PartContext,
    Uneven,
    part_contexts,
    uneven_contexts,
)

GRADIENT = "gradient"


class InParts:
    """Train joinables, and record their numbers.

    Args:
        contexts: runs them.
        make: makes a joinable.
        take_step: takes a step of a joinable.
    """

    def __init__(
        self,
        contexts: Contexts,
        make: Callable[[], Any],
        take_step: Callable[[Any], None],
    ) -> None:
        self.contexts = contexts
        self.driver = contexts.driver
        self.make = make
        self.take_step = take_step
        self.made: list[Any] = []
        self.is_trainer = False
        self.alike: frozenset[str] = frozenset()
        self.outdated: tuple[str, ...] = ()

    def run(self) -> None:
        """Run all contexts."""
        scenario = self.driver.scenario
        uneven = {
            number: (one, number == one.outdated)
            for one in uneven_contexts(scenario)
            for number in (one.plain, one.outdated)
        }
        for number, context in enumerate(part_contexts(scenario)):
            if context.is_new and not self._make():
                return
            of_early = uneven.get(number)
            if number == TRIAL:
                self.is_trainer = not self._train(number, context)
            elif of_early is None or of_early[0].early != self.driver.group_rank:
                self._train(number, context)
            else:
                self._join_early(number, context, *of_early)
            if number == WHOLE:
                self.alike = self._exchange(_digests(self._tensors()))

    def _make(self) -> bool:
        """Make a joinable; return whether it is a new one.

        All of them draw the same numbers as they are made.
        """
        with kept_generators():
            made = self.make()
        if any(made is one for one in self.made):
            self.driver.recorder.event("one_object")
            return False
        self.made.append(made)
        return True

    def _train(self, number: int, context: PartContext, watch: "_Watch | None" = None) -> bool:
        """Train in a context; return whether parameters have changed in its steps."""
        subject = self.made[-1]
        numbers = TracedNumbers(
            self.driver, subject, lambda: self.take_step(subject), context.begin, watch
        )
        numbers.is_trainer = self.is_trainer
        joinables = [subject]
        if watch:
            joinables.append(_Watching(self.driver, watch.shadowed))
        inputs = self.contexts.own(context.inputs)
        with numbers.watched(number):
            self.contexts.run(joinables, inputs, [numbers.step], numbers.leaving)
            numbers.left()
        return numbers.has_stepped

    def _join_early(
        self, number: int, context: PartContext, uneven: Uneven, goes_back: bool
    ) -> None:
        watch = _Watch(self._tensors, self.outdated if goes_back else ())
        self._train(number, context, watch)
        if goes_back:
            self.driver.recorder.event("outdated", names=list(watch.went_back))
        else:
            self.outdated = tuple(
                name
                for name in sorted(watch.kept)
                if name in self.alike or name.startswith(GRADIENT)
            )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.made[-1])

    def _exchange(self, digests: dict[str, str]) -> frozenset[str]:
        """Return the names of the tensors that all ranks hold alike."""
        driver = self.driver
        keys = [f"digests/{rank}" for rank in range(driver.world)]
        driver.signals.set(keys[driver.rank], json.dumps(digests))
        driver.barrier("digests of all ranks")
        held = [json.loads(driver.signals.get(key)) for key in keys]
        return frozenset(
            name for name in digests if len({of_rank.get(name) for of_rank in held}) == 1
        )


class TracedNumbers(Numbers):
    """Records digests of parameters and gradients in each step, and the rates of optimizers.

    The inputs are drawn by the number of the step alone.

    Args:
        begin: the number of the first step.
        watch: sees the values of the tensors after each step, on a rank that joins early.
    """

    def __init__(
        self,
        driver: RankDriver,
        subject: Any,
        take_step: Callable[[], None],
        begin: int,
        watch: "_Watch | None" = None,
    ) -> None:
        super().__init__(driver, subject, take_step, drawn_as=WHOLE)
        self.begin = begin
        self.at = begin
        self.watch = watch
        self.before: list[str] | None = None
        self.mean: list[str] = []
        self.has_stepped = False

    def step(self) -> None:
        if self.at == self.begin:
            self._note_held("begun")
        at = self.at
        self.before = None
        held = self._parameters()
        super().step()
        after = self._parameters()
        self.has_stepped = self.has_stepped or after != held
        self.driver.recorder.event(
            "traced",
            at=at,
            before=self.before,
            local={str(index): digest_of(value) for index, value in self.local.items()},
            mean=self.mean,
            after=after,
            settings=_settings(self.subject),
            is_seen=self._is_seen(),
            numbers=_numbers(self.subject),
        )
        if self.watch:
            self.watch.stepped()

    def leaving(self) -> None:
        super().leaving()
        self._note_held("leaving")

    def _receiver(self, index: int) -> Callable[[torch.Tensor], None]:
        receive = super()._receiver(index)

        def receive_first(gradient: torch.Tensor) -> None:
            if self.before is None:
                # No gradient has arrived before, so that no hook has stepped a parameter.
                self.before = self._parameters()
            receive(gradient)

        return receive_first

    def _keep_gradients(self) -> None:
        self.mean = [
            "none" if parameter.grad is None else digest_of(parameter.grad)
            for parameter in self.parameters
        ]

    def _parameters(self) -> list[str]:
        return [digest_of(parameter) for parameter in self.parameters]

    def _note_held(self, when: str) -> None:
        self.driver.recorder.event(
            "held",
            when=when,
            parameters=self._parameters(),
            digests=_digests(tensors_of(self.subject, with_gradients=False)),
            generators=_generators(self.subject),
        )

    def _is_seen(self) -> bool:
        """Whether optimizers of torch, whose rates can be read, have all trained parameters."""
        stepped = {
            id(parameter)
            for part in parts_of(self.subject).values()
            if isinstance(part, torch.optim.Optimizer)
            for group in part.param_groups
            for parameter in group["params"]
        }
        return all(id(parameter) in stepped for parameter in self.parameters)


class _Watch:
    """The tensors of a joinable on a rank that joins early.

    Args:
        read: returns the tensors.
        to_set_back: the names of tensors that go back by one step after the first shadow.

    Attributes:
        kept: the names of the tensors of floating-point numbers that the last step has changed, and
            that all shadows have left as they were.
        went_back: the names of tensors that have gone back.
    """

    def __init__(
        self, read: Callable[[], dict[str, torch.Tensor]], to_set_back: tuple[str, ...]
    ) -> None:
        self.read = read
        self.to_set_back = to_set_back
        self.went_back: tuple[str, ...] = ()
        self.kept: set[str] = set()
        self.last: dict[str, torch.Tensor] = {}
        self.previous: dict[str, torch.Tensor] = {}
        self.shadows = 0

    def stepped(self) -> None:
        """Keep the values after a step, and those after the step before."""
        self.previous = self.last
        self.last = {name: value.detach().clone() for name, value in self.read().items()}

    def shadowed(self) -> None:
        """Compare the values after a shadow; set some back after the first one."""
        self.shadows += 1
        now = self.read()
        if self.shadows == 1:
            self.kept = {
                name
                for name, value in self.last.items()
                if value.is_floating_point() and not _same(value, self.previous.get(name))
            }
        self.kept = {name for name in self.kept if _same(now.get(name), self.last[name])}
        if self.shadows == 1 and self.to_set_back:
            self.went_back = tuple(
                name
                for name in self.to_set_back
                if name in self.kept and _set(now[name], self.previous.get(name))
            )


class _Watching(OfGroup):
    """Calls a function after each shadow of the joinable before it."""

    def __init__(self, driver: RankDriver, function: Callable[[], None]) -> None:
        super().__init__(driver.group, driver.device)
        self.function = function

    def join_hook(self, **_: Any) -> JoinHook:
        watching = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                watching.function()

        return Hook()


def tensors_of(subject: Any, with_gradients: bool = True) -> dict[str, torch.Tensor]:
    """Return the dense tensors of a joinable by name, as far as they can be found."""
    found: dict[str, Any] = {}
    parts = {"": subject, **parts_of(subject)}
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            found |= {f"{name}{key}": value for key, value in part.named_parameters()}
            found |= {f"{name}{key}": value for key, value in part.named_buffers()}
        elif isinstance(part, torch.optim.Optimizer):
            found |= _tensors_of_optimizer(name, part)
        elif name:
            found |= _flat(name.removesuffix("."), part, depth=2)
    if with_gradients:
        found |= {
            f"{GRADIENT} of {name}": value.grad
            for name, value in found.items()
            if isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None
        }
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    }


def _tensors_of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            key = f"{name}group {number}, parameter {place}"
            found[key] = parameter
            for field, value in optimizer.state.get(parameter, {}).items():
                found[f"{key}, {field}"] = value
    return found


def _flat(name: str, value: Any, depth: int) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    items: Any = ()
    if depth and isinstance(value, dict):
        items = value.items()
    elif depth and isinstance(value, (list, tuple)):
        items = enumerate(value)
    found: dict[str, torch.Tensor] = {}
    for place, (key, inner) in enumerate(items):
        # A key may be an object, or its id, which other ranks do not have.
        label = key if isinstance(key, str) else place
        found |= _flat(f"{name}/{label}", inner, depth - 1)
    return found


def _settings(subject: Any) -> dict[str, str]:
    """Return the hyperparameters of optimizers, such as rates."""
    found: dict[str, str] = {}
    for name, part in parts_of(subject).items():
        groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else ()
        for number, group in enumerate(groups):
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    value = value.item()
                if key != "params" and isinstance(value, (int, float, tuple)):
                    found[f"{key} of {name}group {number}"] = repr(value)
    return found


def _numbers(subject: Any) -> dict[str, str]:
    """Return the numbers among the attributes of a joinable: rates, or counts of contexts."""
    return {
        name: repr(value)
        for name, value in getattr(subject, "__dict__", {}).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _generators(subject: Any) -> dict[str, str]:
    """Return digests of the states of random generators among the attributes of a joinable."""
    found: dict[str, str] = {}
    for name, value in getattr(subject, "__dict__", {}).items():
        if isinstance(value, torch.Generator):
            found[name] = digest_of(value.get_state())
        elif isinstance(value, random.Random):
            found[name] = digest_of_bytes(repr(value.getstate()).encode())
    return found


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest_of(value) for name, value in tensors.items()}


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


@torch.no_grad()
def _set(tensor: torch.Tensor, value: torch.Tensor | None) -> bool:
    """Set a tensor to a value; return whether that is possible."""
    if value is None or value.shape != tensor.shape:
        return False
    try:
        tensor.copy_(value)
    except RuntimeError:
        # The elements of an expanded tensor share their memory.
        return False
    return True
