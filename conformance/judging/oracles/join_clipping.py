"""Gradients that a joinable clips by their norm.

A joinable may clip mean gradients by their norm: then each gradient of the step is the right one
times one factor c, between 0 and 1, and the same for all parameters and on all ranks. A wrong
divisor is such a factor, too: D / D', with a whole number D'. And a factor may be that of steps
with joined ranks alone. So factors are taken for those of clipping if

    D / c is no whole number up to 64 for one factor at least
    not all factors are the same, if there are two or more
    steps in which all ranks train have some, too, or are so few that chance may leave them out

Chance. If n of N steps beside joined ranks are clipped, then p = (n + 1) / (N + 2) is an estimate
of the share of such steps, and the probability that none of m others is clipped is (1 - p)^m. It
has to be above one in a million: a hundred contexts have enough steps to tell.

Factor. Let g be the gradients of a step, r the right ones, and b the bounds of their errors. Then
g = c r + e with |e| <= c b + eps |g|, for one more rounding of a product. The estimate
<g, r> / <r, r>, over the elements of all parameters on one rank, is off by ||e|| / ||r|| at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conformance.judging.verdict import Failure, Found

LARGEST_DIVISOR = 64
_BY_CHANCE = 1e-6
_APART = 1e-4  # factors of two steps; those of norms of random gradients are further apart

Gradient = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""One parameter's gradient on a rank, the right one, and the bound of its error."""


@dataclass(frozen=True)
class Factor:
    """The common factor of the gradients of a step.

    Attributes:
        value: the factor.
        is_of_divisor: it is also that of another divisor.
    """

    value: float
    is_of_divisor: bool


class Clipping:
    """Steps whose gradients have a common factor below 1, and the failures that these would be.

    Attributes:
        steps: the numbers of steps by whether all ranks train in them.
        factors: of steps that have one, likewise.
        failures: the failures of these.
    """

    def __init__(self) -> None:
        self.steps = {True: 0, False: 0}
        self.factors: dict[bool, list[Factor]] = {True: [], False: []}
        self.failures: list[Failure] = []

    def note(self, factor: Factor, failures: list[Failure], all_train: bool) -> None:
        """Add the factor of a step."""
        self.failures += failures
        self.factors[all_train].append(factor)

    @property
    def is_clipping(self) -> bool:
        """Whether the factors are those of a joinable that clips."""
        factors = [*self.factors[True], *self.factors[False]]
        values = [factor.value for factor in factors]
        if len(values) > 1 and max(values) - min(values) <= _APART * max(values):
            return False
        return any(not factor.is_of_divisor for factor in factors) and not self._is_of_joined_alone

    @property
    def _is_of_joined_alone(self) -> bool:
        if self.factors[True]:
            return False
        share = (len(self.factors[False]) + 1) / (self.steps[False] + 2)
        return (1 - share) ** self.steps[True] < _BY_CHANCE

    def settle(self, found: Found) -> None:
        """Add the failures, unless the joinable clips."""
        if not self.is_clipping:
            found.failures += self.failures


def common_factor(ranks: Sequence[Sequence[Gradient]], divisor: int) -> Factor | None:
    """Return the common factor of the gradients of a step, or None if there is none below 1.

    Args:
        ranks: for each rank, the gradients of all parameters.
        divisor: of the right gradients.
    """
    rights = torch.cat([right.reshape(-1) for _, right, _ in ranks[0]])
    square = rights.square().sum()
    if not square.isfinite() or square == 0:
        return None
    got = torch.cat([gradient.reshape(-1).double() for gradient, _, _ in ranks[0]])
    value = float((got * rights).sum() / square)
    errors = torch.cat([_error(gradient).reshape(-1) for gradient in ranks[0]])
    error_of_value = float(errors.norm() / rights.norm())
    if not error_of_value < value < 1 - error_of_value:
        return None
    for gradients in ranks:
        for gradient in gradients:
            given, right, _ = gradient
            error = (given.double() - value * right).abs()
            if not bool((error <= _error(gradient) + error_of_value * right.abs()).all()):
                return None
    other = divisor / value
    is_whole = abs(other - round(other)) <= 2 * other * error_of_value / value
    return Factor(value, is_whole and round(other) <= LARGEST_DIVISOR)


def _error(gradient: Gradient) -> torch.Tensor:
    given, _, bound = gradient
    return bound + torch.finfo(given.dtype).eps * given.double().abs()
