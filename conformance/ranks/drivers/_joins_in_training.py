"""The variants for a context that is judged, as in training: long epochs, many, and interrupts."""

from typing import Any

import torch

from conformance.ranks.drivers._contexts import JudgedContext, Steps
from conformance.ranks.drivers._joinables import Model
from conformance.scenarios.interrupts import INTERRUPTS
from conformance.scenarios.join_draws import (
    DIVISOR,
    breaks_off,
    divides_by_all,
    place_of_ddp,
)


class HookFailed(Exception):
    """A hook of the kit's joinables fails."""


class ContextInTraining(JudgedContext):
    """A context that is judged; each public method is a variant of the scenarios."""

    def long(self) -> None:
        """Shadow hundreds of steps of the same joinables, in one epoch after another."""
        self.again()

    def many(self) -> None:
        """Use the same joinables in one context after another; some end with an exception."""
        counters = self.counters()
        for number, inputs in enumerate(self.lengths):
            chosen = self.in_order(counters, number)
            if breaks_off(self.driver.scenario, number):
                self.break_off(chosen, self.own(inputs), [one.step for one in chosen], number)
            else:
                self.count(chosen, self.own(inputs))

    def interrupts(self) -> None:
        """Raise an interrupt in each context; then run one in which no rank raises.

        Rank 0's exception leaves the context before its peers raise theirs.
        """
        counters = self.counters()
        steps: Steps = [counter.step for counter in counters]
        for number, name in enumerate(INTERRUPTS):
            self.break_off(counters, self.own(self.lengths[number]), steps, number, name)
        self.count(counters, self.own(self.lengths[len(INTERRUPTS)]))

    def hooks_raise(self) -> None:
        """Raise in a main hook, and later in a post hook; run a context without it after each.

        The rank that trains raises in its body, as its peer is about to leave: it would wait for
        the peer otherwise. The last joinable raises, so that no other waits for its peer either.
        """
        counters = self.counters()
        steps: Steps = [counter.step for counter in counters]
        error = HookFailed(f"a hook of rank {self.driver.rank} fails")

        def raising() -> None:
            if self.own(self.lengths[0]):
                raise error

        counters[-1].hook_raises = {"main": error}
        self.run_to_its_error(counters, self.own(self.lengths[0]), steps, raising, error)
        counters[-1].hook_raises = {}
        self.count(counters, self.own(self.lengths[1]))
        counters[-1].hook_raises = {"post": error}
        self.run_to_its_error(counters, self.own(self.lengths[2]), steps, raised=error)
        counters[-1].hook_raises = {}
        self.count(counters, self.own(self.lengths[3]))

    def epochs(self) -> None:
        """Train one DDP beside the kit's joinables, from zeros in each context."""
        model = Model(self.driver)
        ddp = self._ddp(model)
        counters = self.counters()
        for number, inputs in enumerate(self.lengths):
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.zero_()
            joinables: list[Any] = [*self.in_order(counters, number)]
            steps: list[Any] = [counter.step for counter in joinables]
            place = place_of_ddp(self.driver.scenario, number)
            joinables.insert(place, ddp)
            steps.insert(place, self._trains(ddp, steps_too=True))
            options: dict[str, Any] = {DIVISOR: divides_by_all(self.driver.scenario, number)}
            self.run(joinables, self.own(inputs), steps, **options)
            self._keep(model)
