"""The optimizer that ``fused(...)`` claims, made by torch.optim, and its parameters' bound.

A hook that steps parameters of float16 or bfloat16 computes in one of four precisions:

    own         the optimizer's state and its operations have the dtype of the parameter, as in
                torch.optim by default
    operations  operations alone are float32, as in torch.optim with fused=True
    state       the state is float32, too; the parameter is widened in each step, and rounded after
    masters     a float32 copy of the parameter is stepped and kept; the parameter is that, rounded

In float16 they differ by far more than roundings: Adam's epsilon of 1e-8 is zero in float16, and so
are squares of gradients below 2**-12. All else is float32 or wider in every precision.
"""

import ast
from collections.abc import Sequence
from typing import Any

import torch

from conformance.subjects.kinds._fused import NO_DECAY

ROUNDINGS_OF_OPTIMIZER = 64
"""The bound on parameters, in epsilons of the sum of all their changes: a hook may take the
operations of its optimizer in another order."""

OWN = "own"
OPERATIONS = "operations"
STATE = "state"
MASTERS = "masters"
# Optimizers that torch.optim makes with fused=True on CPU, too.
_WITH_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def make_optimizer(
    text: str,
    parameters: list[torch.nn.Parameter],
    dimensions: Sequence[int] | None = None,
    **more: Any,
) -> torch.optim.Optimizer:
    """Make the optimizer that a claim names, such as ``SGD(lr=0.1)``.

    With the option ``no_decay='vectors'`` parameters of fewer than two dimensions, such as biases
    and the weights of norms, have no weight decay.

    Args:
        text: the optimizer.
        parameters: the parameters.
        dimensions: the number of dimensions of each in the model; None for their own.
        more: options that the claim does not have.
    """
    name, options = _read(text)
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if options.pop(NO_DECAY, None):
        if dimensions is None:
            dimensions = [parameter.dim() for parameter in parameters]
        pairs = list(zip(parameters, dimensions, strict=True))
        matrices = [parameter for parameter, number in pairs if number >= 2]
        vectors = [parameter for parameter, number in pairs if number < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
    made: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **options | more)
    return made


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of an optimizer."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    return call.func.id, {
        str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords
    }


def at_rate(text: str, rate: float) -> str:
    """Return the text of the same optimizer with another learning rate."""
    name, options = _read(text)
    written = ", ".join(f"{option}={value!r}" for option, value in (options | {"lr": rate}).items())
    return f"{name}({written})"


def has_vectors_apart(text: str) -> bool:
    """Whether vectors have another weight decay than other parameters."""
    return NO_DECAY in _read(text)[1]


def claimed_rate(text: str) -> float:
    """Return the learning rate of the optimizer that a claim names."""
    optimizer = make_optimizer(text, [torch.nn.Parameter(torch.zeros(1, 1))])
    return float(optimizer.defaults["lr"])


def precisions(text: str, dtype: torch.dtype) -> Sequence[str]:
    """Return the precisions in which a hook may step a parameter of a dtype."""
    if torch.promote_types(dtype, torch.float32) == dtype:
        return (OWN,)
    name, options = _read(text)
    has_fused = name in _WITH_FUSED and not {"fused", "foreach"} & options.keys()
    return (OWN, MASTERS, STATE, *([OPERATIONS] if has_fused else []))


class Stepped:
    """A parameter that the claimed optimizer steps, in one of the precisions.

    Attributes:
        parameter: the parameter.
        changes: the sum of its changes so far, without their signs.

    Args:
        text: the optimizer.
        parameter: the parameter; the real and the imaginary parts of a complex one.
        precision: see above.
        dimensions: the number of its dimensions in the model.
    """

    def __init__(
        self, text: str, parameter: torch.nn.Parameter, precision: str, dimensions: int
    ) -> None:
        self.parameter = parameter
        self.changes = torch.zeros(())
        self._precision = precision
        self._wide = parameter
        if precision in (MASTERS, STATE):
            wide = torch.promote_types(parameter.dtype, torch.float32)
            self._wide = torch.nn.Parameter(parameter.detach().to(wide))
        more = {"fused": True} if precision == OPERATIONS else {}
        self._optimizer = make_optimizer(text, [self._wide], [dimensions], **more)

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, rate: float | None = None) -> None:
        """Step the parameter with a gradient of its dtype; at the claimed rate if none is given."""
        if rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
        if self._precision == STATE:
            self._wide.copy_(self.parameter)
        before = self._wide.detach().clone()
        self._wide.grad = gradient.to(self._wide.dtype).reshape(self._wide.shape)
        self._optimizer.step()
        self.changes = self.changes + (self._wide.detach() - before).abs()
        if self._wide is not self.parameter:
            self.parameter.copy_(self._wide)
