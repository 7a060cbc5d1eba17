"""Moves the parameters of a long run after each step, and finds other changes of them."""

from collections.abc import Iterator, Mapping

import torch

from conformance.scenarios.model import Scenario
from conformance.scenarios.parameter_moves import deviation, has_own_amounts, seed_of_amounts


class MovingParameters:
    """Parameters that nobody but the kit may change.

    The kit changes them by drawn amounts (``scenarios/parameter_moves.py``).

    Args:
        scenario: the long run.
        rank: the rank in the group that trains.
        parameters: the parameters by name.
    """

    def __init__(
        self, scenario: Scenario, rank: int, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._scenario = scenario
        self._rank = rank
        self._parameters = parameters
        self._deviation = deviation(scenario)
        # Of the kit: the global generators are the subject's, which must leave them alone.
        self._of_all = torch.Generator().manual_seed(seed_of_amounts(scenario, None))
        self._own = torch.Generator().manual_seed(seed_of_amounts(scenario, rank))
        # The same amounts are added to copies: so a change shows whenever it has been made.
        self._expected = {name: one.detach().clone() for name, one in parameters.items()}

    def changed(self) -> Iterator[str]:
        """Find the parameters that others have changed, each of them once."""
        for name, expected in list(self._expected.items()):
            if not torch.equal(self._parameters[name].detach(), expected):
                del self._expected[name]
                yield name

    def move(self, step: int) -> None:
        """Change all parameters after a step, in place, as an optimizer does."""
        is_own = has_own_amounts(self._scenario, step)
        numbers = self._own if is_own else self._of_all
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                amount = torch.randn(parameter.shape, generator=numbers).mul_(self._deviation)
                amount = amount.to(parameter.device, parameter.dtype)
                parameter.add_(amount)
                if name in self._expected:
                    self._expected[name].add_(amount)
