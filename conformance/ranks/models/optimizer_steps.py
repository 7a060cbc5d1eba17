"""Steps of the trainer's optimizer after which the parameters of a probe are as before.

Rules compare parameters that nobody but a fused hook steps. So a step with the gradients of DDP is
taken back, bit for bit and in place. That takes several copies of a model: many steps, and those of
large models, are made with gradients of zeros, which change no bit.

A subject may have changed the optimizer, or have registered a hook of its steps. So the kit makes
each step that is taken back twice: by itself, in the same memory and by the operation of torch's
SGD, and by the optimizer. The bits are the same unless somebody else has changed the gradients, the
parameters or the options of the optimizer. Its learning rate is read from its groups: a subject may
have a schedule.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

_ELEMENTS = 2**18  # of the largest model whose steps are taken back


def step_and_put_back(
    optimizer: torch.optim.SGD, names: Mapping[torch.nn.Parameter, str]
) -> list[str]:
    """Make a step with the gradients as they are, and put the parameters back.

    A gradient with NaN or infinities is a gradient of zeros during the step: a GradScaler would
    make no step, while a subject may count the steps of the optimizer. Those of a large model are.

    Args:
        optimizer: without momentum, weight decay and other options but the rate.
        names: of the parameters.

    Returns:
        The names of the parameters that the step has left with other values than SGD would.
    """
    parameters = list(names)
    if sum(one.numel() for one in parameters) > _ELEMENTS:
        step_with_zeros(optimizer, parameters)
        return []
    others = [one for one in parameters if not _is_finite(one.grad)]
    with _zeros_in_place_of(others), _values_put_back(parameters) as before:
        right = _values_of_sgd(optimizer, before)
        optimizer.step()
        return [
            names[one] for one, values in right.items() if not torch.equal(one.detach(), values)
        ]


def step_with_zeros(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> None:
    """Make a step with zeros in place of all gradients."""
    with _zeros_in_place_of(parameters):
        optimizer.step()


Values = dict[torch.nn.Parameter, torch.Tensor]


@contextmanager
def _values_put_back(parameters: Sequence[torch.nn.Parameter]) -> Iterator[Values]:
    before = {one: one.detach().clone() for one in parameters}
    try:
        yield before
    finally:
        _put_back(before)


@torch.no_grad()
def _put_back(before: Values) -> None:
    for parameter, values in before.items():
        parameter.copy_(values)


@torch.no_grad()
def _values_of_sgd(optimizer: torch.optim.SGD, before: Values) -> Values:
    """Return the values after a step of SGD, and put the parameters back."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-group["lr"])
    right = {one: one.detach().clone() for one in before}
    _put_back(before)
    return right


@contextmanager
def _zeros_in_place_of(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Give parameters other gradients, since a hook may have kept theirs."""
    gradients = {one: one.grad for one in parameters if one.grad is not None}
    for parameter, gradient in gradients.items():
        parameter.grad = torch.zeros_like(gradient)
    try:
        yield
    finally:
        # The gradient may be a view of DDP's bucket, which has to stay the parameter's gradient.
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _is_finite(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return True
    values = gradient._values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())
