"""One rank's optimizer as it is defined, in float64, with a bound for the roundings of others.

With x a parameter, g its gradient, and the options of its parameter group, a step is

    SGD     g <- +-g + weight_decay x;  m <- g in the first step with momentum, later momentum m +
            (1 - dampening) g;  x <- x - lr m, or x - lr (g + momentum m) with nesterov; without
            momentum m stays, and x <- x - lr g
    Adam    g <- +-g + weight_decay x;  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g**2;
            x <- x - lr (m / (1 - b1**t)) / (sqrt(w / (1 - b2**t)) + eps)  in its t-th step, with
            w = v, or the largest v so far with amsgrad (Kingma, Ba, ICLR 2015, algorithm 1)
    AdamW   x <- x - lr weight_decay x;  then as Adam, whose g has no decay (Loshchilov, Hutter,
            ICLR 2019, algorithm 2)
    Adagrad g <- +-g + weight_decay x;  s <- s + g**2;
            x <- x - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)  in its t-th step (Duchi,
            Hazan, Singer, JMLR 12, 2011)

    User    s <- s + g;  x <- x - lr (s + (t mod 5) share p);  p <- g  in its t-th step, with the
            previous gradient p: the optimizer of the user's own (``drivers/_user_optimizer.py``)

where the sign is - with maximize (torch documentation, torch.optim.SGD, Adam, AdamW and Adagrad).

Bounds: a running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 3.3). Each
quantity q has an error E(q) of a right computation in the parameter's dtype. An operation rounds by
half an epsilon of its result; the formulas below take a whole one, and so leave room for second
order terms. Products with an option take another one, since the option is rounded too. To each
result the smallest subnormal number is added, for results that underflow. The formulas are

    E(a + b) = E(a) + E(b) + eps |a + b|                E(c a) = c E(a) + 2 eps |c a|
    E(sqrt v) = min(E(v) / sqrt v, sqrt E(v)) + eps sqrt v
    E(a / b) = (E(a) + |a / b| E(b)) / (|b| - E(b)) + eps |a / b|
    E(max(a, b)) = max(E(a), E(b)), without a rounding: of the largest v so far, the largest error

The bias corrections are computed in float64 by torch. A mean over W ranks is off by W + 2 epsilons
of the mean magnitude, if its values are random; see ``oracles/averager.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Values = list[torch.Tensor]


@dataclass
class LocalOptimizer:
    """The optimizer of one rank, on all parameters.

    No tensor is ever changed in place, so that a copy of a list is a copy of its values.

    Attributes:
        values: the parameters, flat in float64.
        dtypes: their dtypes.
        name: of its class: SGD, Adam, AdamW, Adagrad or UserOptimizer.
        momenta, squares, largest: the moments, and the largest second moment so far.
        previous: the previous gradients of the user's own optimizer.
        errors: the bounds of the errors of ``values``; those of the moments are kept likewise.
        counts: how often each parameter was stepped.
        momentum_counts: how often each parameter was stepped with momentum, by SGD.
    """

    values: Values
    dtypes: list[torch.dtype]
    name: str = "SGD"
    momenta: Values = field(init=False)
    squares: Values = field(init=False)
    largest: Values = field(init=False)
    previous: Values = field(init=False)
    errors: Values = field(init=False)
    counts: list[int] = field(init=False)
    momentum_counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        zeros = [torch.zeros_like(value) for value in self.values]
        self.momenta = list(zeros)
        self.squares = list(zeros)
        self.largest = list(zeros)
        self.previous = list(zeros)
        self.errors = list(zeros)
        self._momentum_errors = list(zeros)
        self._square_errors = list(zeros)
        self._largest_errors = list(zeros)
        self.counts = [0] * len(zeros)
        self.momentum_counts = [0] * len(zeros)

    def saved(self) -> tuple[Any, ...]:
        """Return the state, for :meth:`restore`."""
        return tuple(list(part) for part in self._parts)

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Go back to a saved state."""
        for part, values in zip(self._parts, saved, strict=True):
            part[:] = values

    def exchange_states(self, sources: Mapping[int, int]) -> None:
        """Give each parameter the state of another one, and keep the parameters' values.

        Args:
            sources: the parameter whose state a parameter receives.
        """
        for part in self._states:
            part[:] = [part[sources.get(index, index)] for index in range(len(part))]

    def write(self, index: int, values: torch.Tensor, is_written: torch.Tensor) -> None:
        """Write some elements of a parameter; they have no error then."""
        self.values[index] = torch.where(is_written, values, self.values[index])
        self.errors[index] = self.errors[index].masked_fill(is_written, 0.0)

    def forget(self, index: int) -> None:
        """Drop the state of a parameter."""
        zeros = torch.zeros_like(self.values[index])
        for part in self._states:
            part[index] = 0 if isinstance(part[index], int) else zeros

    @property
    def _parts(self) -> tuple[list[Any], ...]:
        return (self.values, self.errors, *self._states)

    @property
    def _states(self) -> tuple[list[Any], ...]:
        return (
            *(self.momenta, self.squares, self.largest, self.previous),
            *(self.counts, self.momentum_counts),
            *(self._momentum_errors, self._square_errors, self._largest_errors),
        )

    def step(
        self,
        index: int,
        grad: torch.Tensor,
        grad_error: torch.Tensor,
        options: Mapping[str, Any],
    ) -> None:
        """Step one parameter.

        Args:
            index: the number of the parameter.
            grad: its gradient, flat in float64.
            grad_error: the bound of the gradient's error.
            options: those of its parameter group.
        """
        value = self.values[index]
        eps = torch.finfo(self.dtypes[index]).eps
        decay = options.get("weight_decay", 0.0)
        if options.get("maximize"):
            grad = -grad
        rate = options["lr"]
        if decay and self.name == "AdamW":
            value = value - rate * decay * value
            self.errors[index] = self.errors[index] + 4 * eps * value.abs()
        elif decay:
            decayed = decay * value
            grad_error = grad_error + decay * self.errors[index] + 2 * eps * decayed.abs()
            grad = grad + decayed
            grad_error = grad_error + eps * grad.abs()
        self.counts[index] += 1
        others = {"SGD": self._sgd, "Adagrad": self._adagrad, "UserOptimizer": self._users}
        take = others.get(self.name, self._adam)
        update, error = take(index, grad, grad_error, options, eps)
        self.values[index] = value - rate * update
        tiny = 16 * torch.finfo(self.dtypes[index]).smallest_normal * eps
        self.errors[index] = (
            self.errors[index]
            + rate * error
            + eps * (2 * rate * update.abs() + self.values[index].abs())
            + tiny
        )

    def _sgd(
        self,
        index: int,
        grad: torch.Tensor,
        error: torch.Tensor,
        options: Mapping[str, Any],
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the update before the learning rate, and the bound of its error."""
        momentum = options.get("momentum", 0.0)
        if not momentum:
            return grad, error
        self.momentum_counts[index] += 1
        if self.momentum_counts[index] == 1:
            moment = grad
            moment_error = error
        else:
            share = 1 - options.get("dampening", 0.0)
            kept = momentum * self.momenta[index]
            moment = kept + share * grad
            moment_error = momentum * self._momentum_errors[index] + share * error
            moment_error = moment_error + eps * (
                2 * kept.abs() + 2 * share * grad.abs() + moment.abs()
            )
        self.momenta[index] = moment
        self._momentum_errors[index] = moment_error
        if not options.get("nesterov"):
            return moment, moment_error
        ahead = grad + momentum * moment
        roundings = eps * (2 * momentum * moment.abs() + ahead.abs())
        return ahead, error + momentum * moment_error + roundings

    def _adam(
        self,
        index: int,
        grad: torch.Tensor,
        error: torch.Tensor,
        options: Mapping[str, Any],
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the update before the learning rate, and the bound of its error."""
        first, second = options.get("betas", (0.9, 0.999))
        count = self.counts[index]
        old = self.momenta[index]
        moment = first * old + (1 - first) * grad
        self.momenta[index] = moment
        # torch takes old + (1 - first) (grad - old): a difference, a product and a sum.
        self._momentum_errors[index] = (
            first * self._momentum_errors[index]
            + (1 - first) * error
            + eps * (3 * (1 - first) * (grad.abs() + old.abs()) + moment.abs())
        )
        square = second * self.squares[index] + (1 - second) * grad**2
        self.squares[index] = square
        self._square_errors[index] = (
            second * self._square_errors[index]
            + (1 - second) * (2 * grad.abs() * error + error**2)
            + 5 * eps * square
        )
        used = square
        square_error = self._square_errors[index]
        if options.get("amsgrad"):
            used = torch.maximum(self.largest[index], square)
            square_error = torch.maximum(self._largest_errors[index], square_error)
            self.largest[index] = used
            self._largest_errors[index] = square_error
        correction = 1 - second**count
        root = (used / correction).sqrt()
        square_error = square_error / correction
        divisor = root + options.get("eps", 1e-8)
        divisor_error = _error_of_root(root, square_error) + 3 * eps * divisor
        numerator = moment / (1 - first**count)
        numerator_error = self._momentum_errors[index] / (1 - first**count)
        update = numerator / divisor
        update_error = numerator_error + update.abs() * divisor_error
        update_error = update_error / (divisor - divisor_error).clamp(min=1e-300)
        return update, update_error + 4 * eps * update.abs()

    def _adagrad(
        self,
        index: int,
        grad: torch.Tensor,
        error: torch.Tensor,
        options: Mapping[str, Any],
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the update before the learning rate, and the bound of its error."""
        square = self.squares[index] + grad**2
        self.squares[index] = square
        self._square_errors[index] = (
            self._square_errors[index] + 2 * grad.abs() * error + error**2 + 3 * eps * square
        )
        root = square.sqrt()
        divisor = root + options.get("eps", 1e-10)
        divisor_error = _error_of_root(root, self._square_errors[index]) + 3 * eps * divisor
        slower = 1 + (self.counts[index] - 1) * options.get("lr_decay", 0.0)
        update = grad / divisor
        update_error = (error + update.abs() * divisor_error) / (divisor - divisor_error).clamp(
            min=1e-300
        )
        return update / slower, (update_error + 4 * eps * update.abs()) / slower

    def _users(
        self,
        index: int,
        grad: torch.Tensor,
        error: torch.Tensor,
        options: Mapping[str, Any],
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the update before the learning rate, which is exact."""
        self.momenta[index] = self.momenta[index] + grad
        turns = self.counts[index] % 5 * self.previous[index] + 2 * options["turns"] % 5 * grad
        update = self.momenta[index] + options["share"] * turns
        self.previous[index] = grad
        return update, error

    def average_with(self, others: "list[LocalOptimizer]", index: int) -> tuple[torch.Tensor, ...]:
        """Return the mean of a parameter over optimizers, and the bound of its error."""
        mean = torch.stack([other.values[index] for other in others]).sum(0) / len(others)
        errors = torch.stack([other.errors[index] for other in others])
        eps = torch.finfo(self.dtypes[index]).eps
        return mean, errors.sum(0) / len(others) + eps * mean.abs()


def _error_of_root(root: torch.Tensor, square_error: torch.Tensor) -> torch.Tensor:
    """Return the bound of the error of a square root, without its own rounding."""
    ratio = torch.where(root > 0, square_error / root, square_error.sqrt())
    return torch.minimum(ratio, square_error.sqrt())
