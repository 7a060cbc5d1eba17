"""Gradients that a joinable clips by their norm.

A joinable may clip mean gradients by their norm: then each gradient of the step is the right one
times one factor c, between 0 and 1, and the same for all parameters and on all ranks. A wrong
divisor is such a factor, too: D / D', with a whole number D'. And a factor that some steps have and
others have not may be that of joined ranks alone. So a factor is taken for that of clipping if
steps in which all ranks train show it:

    one of them at least has a factor for which D / c is no whole number up to 64
    not all of them have the same factor, if there are two or more

Factor. Let g be the gradients of a step, r the right ones, and b the bounds of their errors. Then
g = c r + e with |e| <= c b + eps |g|, for one more rounding of a product. The estimate
<g, r> / <r, r>, over the elements of all parameters on one rank, is off by ||e|| / ||r|| at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conformance.judging.verdict import Failure, Found

LARGEST_DIVISOR = 64
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
    """Steps whose gradients have a common factor below 1, and the failures that these would be."""

    def __init__(self) -> None:
        self.shown: list[Factor] = []
        self.failures: list[Failure] = []

    def note(self, factor: Factor, failures: list[Failure], all_train: bool) -> None:
        """Add a step."""
        self.failures += failures
        if all_train:
            self.shown.append(factor)

    @property
    def is_shown(self) -> bool:
        """Whether steps in which all ranks train show that the joinable clips."""
        values = [factor.value for factor in self.shown]
        is_constant = len(values) > 1 and max(values) - min(values) <= _APART * max(values)
        return not is_constant and any(not factor.is_of_divisor for factor in self.shown)

    def settle(self, found: Found) -> None:
        """Add the failures, unless the joinable clips."""
        if not self.is_shown:
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
