"""Steps of the trainer's optimizer after which the parameters of a probe are as before.

Rules compare parameters that nobody but a fused hook steps. So a step with the gradients of DDP is
taken back, bit for bit and in place. That takes several copies of a model: many steps, and those of
large models, are made with gradients so small that they change no bit. They are not zeros: code
that divides by the norm of the gradients works in training.

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
    optimizer: torch.optim.SGD, names: Mapping[torch.nn.Parameter, str], ranks: int
) -> dict[str, bool]:
    """Make a step with the gradients as they are, and put the parameters back.

    A gradient with NaN or infinities is a faint one during the step: a GradScaler would make no
    step, while a subject may count the steps of the optimizer. So are those of a large model, and
    those of a step without any value but zeros.

    Args:
        optimizer: without momentum, weight decay and other options but the rate.
        names: of the parameters.
        ranks: the number of ranks whose gradients were averaged, or summed.

    Returns:
        The names of the parameters that the step has left with other values than SGD would, and
        whether it has divided their gradients by the number of ranks, as it may if they are sums.
    """
    parameters = list(names)
    is_large = sum(one.numel() for one in parameters) > _ELEMENTS
    if is_large or not any(_has_values(one.grad) for one in parameters):
        step_faintly(optimizer, parameters)
        return {}
    others = [one for one in parameters if not _is_finite(one.grad)]
    with _faint_in_place_of(others), _values_put_back(parameters) as before:
        right = _values_of_sgd(optimizer, before)
        optimizer.step()
        return {
            names[one]: _is_share(one.detach(), before[one], values, ranks)
            for one, values in right.items()
            if not torch.equal(one.detach(), values)
        }


def step_faintly(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> None:
    """Make a step with gradients that change no bit in place of all gradients."""
    with _faint_in_place_of(parameters):
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
def _faint_in_place_of(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Give parameters other gradients, since a hook may have kept theirs.

    DDP leaves a result in another dtype than the parameter's if the rank has not used it. No one
    else can assign such a gradient, so its values are exchanged.
    """
    gradients = {one: one.grad for one in parameters if one.grad is not None}
    values = {}
    for parameter, gradient in gradients.items():
        if gradient.dtype == parameter.dtype:
            parameter.grad = _faint(parameter, gradient)
        else:
            values[parameter] = gradient.clone()
            gradient.copy_(_faint(parameter, gradient))
    try:
        yield
    finally:
        # The gradient may be a view of DDP's bucket, which has to stay the parameter's gradient.
        for parameter, gradient in gradients.items():
            if parameter in values:
                gradient.copy_(values[parameter])
            else:
                parameter.grad = gradient


@torch.no_grad()
def _faint(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that changes no bit at rates up to 8, in the memory format of
    another; zeros if that is sparse.
    """
    faint = torch.zeros_like(gradient)
    if not gradient.is_sparse:
        # A change of less than a quarter of eps is rounded away.
        torch.mul(parameter, torch.finfo(parameter.dtype).eps ** 2, out=faint)
        faint.add_(0.0)  # -0.0 becomes 0.0: a step with -0.0 would change the sign of -0.0
    return faint


def _is_finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or bool(_values(gradient).isfinite().all())


def _has_values(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(_values(gradient).any())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _is_share(got: torch.Tensor, before: torch.Tensor, after: torch.Tensor, ranks: int) -> bool:
    """Whether values have moved by the share of one rank, up to a few roundings of each."""
    error = 4 * torch.finfo(got.dtype).eps * (before.abs() + after.abs() + got.abs())
    return bool(((got - before - (after - before) / ranks).abs() <= error).all())
