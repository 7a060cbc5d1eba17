"""The values that may arrive of a message, or of a sum of messages."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Allowed:
    """The values that may arrive of a message, flat in float64.

    Attributes:
        exact: the sent values, divided by the loss factor.
        low, high: with ``two_values`` the two right values, otherwise the ends of an interval.
        two_values: whether only ``low`` and ``high`` are right, and nothing between them.
        bound: the largest error.
        relative_rounding: the relative error of a few operations in the dtype of the output.
        smallest_rounding: their absolute error, the smallest subnormal of that dtype.
        is_free: the elements about which nothing is promised; None if there are none.
        not_fed_back: the part of the bound that error feedback does not make up for.
        may_overflow: the elements that may also be NaN or infinite; None if there are none.
    """

    exact: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    two_values: bool
    bound: torch.Tensor
    relative_rounding: float
    smallest_rounding: float
    is_free: torch.Tensor | None = None
    not_fed_back: torch.Tensor | float = 0.0
    may_overflow: torch.Tensor | None = None

    def wrong(self, got: torch.Tensor, is_own: bool = False) -> torch.Tensor:
        """Return which elements are wrong; a rank's own part may also be exact."""
        if self.two_values:
            right = self._near(got, self.low) | self._near(got, self.high)
        else:
            lowest = self.low - self.tolerance(self.low)
            highest = self.high + self.tolerance(self.high)
            right = (got >= lowest) & (got <= highest)
            right |= got.isnan() & self.exact.isnan()
            if self.may_overflow is not None:
                right |= ~got.isfinite() & self.may_overflow
        if self.is_free is not None:
            right |= self.is_free
        if is_own:
            right |= self._near(got, self.exact)
        return ~right

    def tolerance(self, value: torch.Tensor) -> torch.Tensor:
        """Return how far roundings of the output's dtype may move a value; 0 for infinities."""
        tolerance = self.relative_rounding * value.abs() + self.smallest_rounding
        return tolerance.nan_to_num(0.0, 0.0, 0.0)

    @property
    def has_rounding(self) -> bool:
        return self.relative_rounding > 0 or self.smallest_rounding > 0

    def _near(self, got: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Infinities are equal, but their difference is NaN.
        is_same = (got == value) | (got.isnan() & value.isnan())
        return is_same | ((got - value).abs() <= self.tolerance(value))
