"""A joinable that trains the same steps in one context and in several, and values that are out of
date.

The driver is the trainer of a joinable that leaves its parameters as they are: it clears gradients,
and steps. It is none of another joinable, which may keep its gradients for the next step. A first
context shows it.

In a context with uneven inputs the driver finds the values that the steps of a rank change, and its
shadows leave as they are. When the same context is run again, with a new joinable, the driver sets
some values back by one step after the first shadow: the gradients, and the tensors that all ranks
hold alike after a join. So the rank holds the values of one that has joined a step earlier. After
later shadows it mixes the elements of gradients, parameters and their states.

Elements and numbers. Some elements of a tensor may stay in shadows while others change, by chance
too: no input of a step has a word of an embedding, say. So elements go back by themselves only if
each step with even inputs has changed them, and no shadow; those of a parameter, or of a state for
it, only if autograd has computed a gradient other than 0 for them in each step that was shadowed. A
number in floating point, such as the mean of norms, may be that of the rank's own inputs, and
ranks have seen as many after even inputs. Elements and numbers therefore go back only if they are
the same on all ranks after the join of the uneven inputs, too.
"""

import json
from collections.abc import Callable
from typing import Any

import torch

from conformance.ranks.drivers._contexts import Contexts
from conformance.ranks.drivers._join_checkpoints import Checkpoint
from conformance.ranks.drivers._join_numbers import (
    Numbers,
    are_cleared,
    clear_gradients,
    digest_of,
    trained_by,
)
from conformance.ranks.drivers._join_parts import (
    deep_tensors_of,
    generators_of,
    named_numbers_of,
    parts_of,
)
from conformance.ranks.drivers._joined_values import (
    GRADIENT,
    Kept,
    Mask,
    Mixing,
    Steady,
    Watch,
    Watching,
    digests,
    names_by_parameter,
    numbers_of,
    settings_of,
    tensors_of,
)
from conformance.ranks.instruments.digest import digest_of_bytes
from conformance.ranks.instruments.global_seeds import kept_generators
from conformance.scenarios.join_loop_draws import DISABLED, RAISES, THROWS
from conformance.scenarios.join_part_draws import (
    SCHEDULE,
    TRIAL,
    WHOLE,
    PartContext,
    Uneven,
    long_contexts,
    part_contexts,
    uneven_contexts,
)
from conformance.scenarios.seeds import generator

MANY = 4096  # elements of a parameter whose gradients are told apart

# The first shadow after which values are mixed, and the number of shadows to the next one. In the
# long contexts, values of a step earlier are in use for thirty steps before that.
_MIXED = ((2, 2), 1)
_MIXED_IN_LONG = ((25, 35), 4)


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
        self.changing: dict[str, Mask] = {}
        self.outdated: dict[str, Mask | None] = {}
        self.are_dropped: list[bool] = []
        self.checkpoint = Checkpoint(self.driver)
        self.of_parameters: frozenset[str] = frozenset()

    def run(self) -> None:
        """Run all contexts."""
        scenario = self.driver.scenario
        uneven = {
            number: one
            for contexts in (uneven_contexts, long_contexts)
            for one in contexts(scenario, self.driver.world)
            for number in (one.plain, one.outdated)
        }
        late = {one.rest_again: one.late for one in uneven_contexts(scenario, self.driver.world)}
        for number, context in enumerate(part_contexts(scenario, self.driver.world)):
            if late.get(number, self.driver.group_rank) != self.driver.group_rank:
                clear_gradients(trained_by(self.made[-1]), self.are_dropped)
            if context.is_new and not self._make():
                return
            if context.resumes and not self.checkpoint.load_into(self.made[-1], number):
                self.contexts.go_on_with(number + 1)
                continue
            if number in uneven:
                self._train_unevenly(number, context, uneven[number])
            elif number == WHOLE:
                self._train_whole(context)
            else:
                numbers = self._train(number, context)
                if number == TRIAL:
                    self.is_trainer = not numbers.has_stepped

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

    def _train(
        self,
        number: int,
        context: PartContext,
        after_step: Callable[[], None] | None = None,
        watch: Watch | None = None,
    ) -> "TracedNumbers":
        """Train in a context, and return its numbers."""
        subject = self.made[-1]
        make = TracedNumbers
        if context.is_schedule or context.is_long:
            make = RatesOnly if context.is_schedule else StateOnly
        numbers = make(self.driver, subject, lambda: self.take_step(subject), context, after_step)
        numbers.is_trainer = self.is_trainer
        numbers.follows_state = number in (WHOLE, SCHEDULE)
        joinables = [subject]
        if watch:
            joinables.append(Watching(self.driver, watch.shadowed))
        inputs = self.contexts.own(context.inputs)
        steps = [numbers.step]
        with numbers.watched(number):
            if context.ending == RAISES:
                self.contexts.break_off(joinables, inputs, steps, number)
            elif context.ending == THROWS:
                self.contexts.run_to_its_error(
                    joinables, inputs, steps, throw_on_early_termination=True
                )
            elif context.ending == DISABLED:
                self.contexts.run(joinables, inputs, steps, enable=False)
            else:
                self.contexts.run(joinables, inputs, steps, numbers.leaving)
                numbers.left()
        numbers.note_followed()
        return numbers

    def _train_whole(self, context: PartContext) -> None:
        """Train with even inputs, and find the values that all ranks hold alike, and those that
        each step changes.
        """
        steady = Steady(self._tensors)
        self.are_dropped = self._train(WHOLE, context, steady.stepped).are_dropped
        self.changing = steady.changing
        self.alike = self._alike("even")

    def _train_unevenly(self, number: int, context: PartContext, uneven: Uneven) -> None:
        goes_back = number == uneven.outdated
        if uneven.late != self.driver.group_rank:
            watch = Watch(self._tensors, self._numbers, {})
            if goes_back:
                mixing = self._mixing(number, context)
                watch = Watch(self._tensors, self._numbers, self.outdated, mixing)
            self._train(number, context, watch.stepped, watch)
            if goes_back:
                self.driver.recorder.event("outdated", names=list(watch.went_back.values()))
                return
            kept = watch.kept
        else:
            begin = max(one for rank, one in enumerate(context.inputs) if rank != uneven.late)
            numbers = self._train(number, context)
            if goes_back:
                return
            kept = Kept()
            self._tell("gradients", number, numbers.moving_from(begin))
        self.checkpoint.save(self.made[-1])
        alike = self.alike & self._alike(str(number))
        if uneven.late != self.driver.group_rank:
            moving = {
                int(index): torch.tensor(mask)
                for index, mask in self._told("gradients", number, uneven.late).items()
            }
            self.outdated = self._outdated(kept, alike, moving)

    def _mixing(self, number: int, context: PartContext) -> Mixing:
        """Return the parameters, their gradients and states, that get other values.

        A tensor of another kind may be a count, of which the ranks take the largest.
        """
        gradients = {name for name in self.outdated if name.startswith(GRADIENT)}
        names = frozenset(gradients | (self.outdated.keys() & self.of_parameters))
        draw = generator(self.driver.scenario, f"mixing/{number}")
        first, every = _MIXED_IN_LONG if context.is_long else _MIXED
        return Mixing(names, draw, draw.randint(*first), every)

    def _outdated(
        self, kept: Kept, alike: frozenset[str], moving: dict[int, Mask]
    ) -> dict[str, Mask | None]:
        """Return the values that are to go back, with their elements if it is not all.

        Args:
            kept: by all shadows.
            alike: the values that all ranks hold alike after joins of even and of uneven inputs.
            moving: the elements of parameters that have had gradients in each shadowed step.
        """
        numbers = self._numbers()
        chosen: dict[str, Mask | None] = {
            name: None
            for name in sorted(kept.whole)
            if name in (alike if name in numbers else self.alike) or name.startswith(GRADIENT)
        }
        subject = self.made[-1]
        parameters = names_by_parameter(subject, trained_by(subject))
        self.of_parameters = frozenset(parameters)
        for name, mask in sorted(kept.parts.items()):
            if name in kept.whole or name not in alike or name.startswith(GRADIENT):
                continue
            elements = mask & self.changing.get(name, torch.zeros((), dtype=torch.bool))
            if name in parameters:
                gradients = moving.get(parameters[name])
                if gradients is None or gradients.numel() != elements.numel():
                    continue
                elements = elements & gradients.view(elements.shape)
            if elements.any():
                chosen[name] = elements
        return chosen

    def _tensors(self) -> dict[str, torch.Tensor]:
        return tensors_of(self.made[-1])

    def _numbers(self) -> dict[str, Any]:
        return numbers_of(self.made[-1])

    def _alike(self, when: str) -> frozenset[str]:
        """Return the names of the values that all ranks hold alike."""
        driver = self.driver
        numbers = {name: number.value for name, number in self._numbers().items()}
        own = digests(self._tensors() | numbers)
        self._tell("digests", when, own)
        driver.barrier(f"digests/{when} of all ranks")
        held = [self._told("digests", when, rank) for rank in range(driver.world)]
        return frozenset(name for name in own if len({one.get(name) for one in held}) == 1)

    def _tell(self, what: str, when: object, value: Any) -> None:
        driver = self.driver
        driver.signals.set(f"{what}/{when}/{driver.rank}", json.dumps(value))

    def _told(self, what: str, when: object, rank: int) -> Any:
        """Return the value of another rank."""
        return json.loads(self.driver.signals.get(f"{what}/{when}/{rank}"))


class TracedNumbers(Numbers):
    """Records digests of parameters and gradients in each step, and the rates of optimizers.

    The inputs are drawn by the number of the step alone.

    Args:
        context: the context.
        after_step: called after each step.
    """

    def __init__(
        self,
        driver: Any,
        subject: Any,
        take_step: Callable[[], None],
        context: PartContext,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(driver, subject, take_step, drawn_as=WHOLE)
        self.begin = context.begin
        self.at = context.begin
        self.after_step = after_step
        # No code of the driver runs at the end of a body that an exception ends.
        self.last = -1
        if context.ending in (RAISES, THROWS):
            self.last = context.begin + context.taken(driver.group_rank) - 1
        self.before: list[str] | None = None
        self.mean: list[str] = []
        self.are_dropped: list[bool] = []
        self.has_stepped = False
        self.follows_state = False
        self._followed: dict[str, str] = {}
        self._first_state: dict[str, str] = {}
        self._moved: set[str] = set()
        self._moving: list[dict[int, Mask]] = []

    def step(self) -> None:
        if self.at == self.begin:
            self._note_held("begun")
        at = self.at
        self.before = None
        held = self._parameters()
        super().step()
        after = self._parameters()
        self.has_stepped = self.has_stepped or after != held
        self._keep_moving()
        self._follow_state()
        self.driver.recorder.event(
            "traced",
            at=at,
            before=self.before,
            local={str(index): digest_of(value) for index, value in self.local.items()},
            mean=self.mean,
            is_cleared=are_cleared(self.parameters),
            after=after,
            settings=settings_of(self.subject),
            is_seen=self._is_seen(set(range(len(self.parameters)))),
            is_held=self._is_seen(set(self.local)),
            numbers={name: repr(one) for name, one in named_numbers_of(self.subject).items()},
        )
        if self.after_step:
            self.after_step()
        if at == self.last:
            self._note_held("leaving")

    def leaving(self) -> None:
        super().leaving()
        self._note_held("leaving")

    def note_followed(self) -> None:
        """Record digests of the state of all steps, which are the same on ranks that hold the same
        state after each of them; without values that no step changes.
        """
        if self.follows_state:
            digests = {name: self._followed[name] for name in self._followed if name in self._moved}
            self.driver.recorder.event("followed", digests=digests)

    def _follow_state(self) -> None:
        if not self.follows_state:
            return
        state = self._state(asks=False)
        if not self._followed:
            self._first_state = state
        known = self._followed or dict.fromkeys(state, "")
        self._moved |= {name for name in known if state.get(name) != self._first_state[name]}
        self._followed = {
            name: digest_of_bytes(f"{known[name]} {digest}".encode())
            for name, digest in state.items()
            if name in known
        }

    def _keep_moving(self) -> None:
        self._moving.append(
            {
                index: gradient.reshape(-1) != 0
                for index, gradient in self.local.items()
                if not gradient.is_sparse and gradient.numel() <= MANY
            }
        )

    def moving_from(self, begin: int) -> dict[int, list[bool]]:
        """Return the elements of gradients of autograd that are not 0 in any step from one on, by
        the number of their parameter.
        """
        steps = self._moving[begin - self.begin :]
        found = dict(steps[0])
        for step in steps[1:]:
            found = {index: mask & step[index] for index, mask in found.items() if index in step}
        return {index: mask.tolist() for index, mask in found.items()}

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
        self.are_dropped = [parameter.grad is None for parameter in self.parameters]

    def _parameters(self) -> list[str]:
        return [digest_of(parameter) for parameter in self.parameters]

    def _note_held(self, when: str) -> None:
        self.driver.recorder.event(
            "held",
            when=when,
            parameters=self._parameters(),
            is_cleared=are_cleared(self.parameters),
            digests=digests(
                deep_tensors_of(self.subject) | tensors_of(self.subject, with_gradients=False)
            ),
            generators=_generators(self.subject),
            floats={name: repr(one.value.item()) for name, one in numbers_of(self.subject).items()},
        )

    def _is_seen(self, indices: set[int]) -> bool:
        """Whether optimizers of torch, whose rates can be read, have some trained parameters."""
        stepped = {
            id(parameter)
            for part in parts_of(self.subject).values()
            if isinstance(part, torch.optim.Optimizer)
            for group in part.param_groups
            for parameter in group["params"]
        }
        return all(id(self.parameters[index]) in stepped for index in indices)


class RatesOnly(TracedNumbers):
    """Records the rates of optimizers after steps that change them, and nothing else."""

    rates: dict[str, str] | None = None

    def _keep_gradients(self) -> None:
        pass

    def step(self) -> None:
        at = self.at
        Numbers.step(self)
        self._follow_state()
        rates = settings_of(self.subject)
        if rates != self.rates:
            self.driver.recorder.event("rates", at=at, settings=rates)
        self.rates = rates

    def leaving(self) -> None:
        pass

    def left(self) -> None:
        pass


class StateOnly(TracedNumbers):
    """Records the state at the end of the body, and nothing else."""

    def _keep_gradients(self) -> None:
        pass

    def step(self) -> None:
        Numbers.step(self)
        self._keep_moving()
        if self.after_step:
            self.after_step()

    def left(self) -> None:
        pass


def _generators(subject: Any) -> dict[str, str]:
    """Return digests of the states of a joinable's random generators."""
    found: dict[str, str] = {}
    for name, value in generators_of(subject).items():
        if isinstance(value, torch.Generator):
            found[name] = digest_of(value.get_state())
        else:
            found[name] = digest_of_bytes(repr(value.getstate()).encode())
    return found
