"""Models whose gradients are known: the probe, and a small real network.

The probe's parameters receive, through a real backward, exactly the gradients they are given. Its
node in the graph returns the scripted gradient, so that NaN, infinities and overflow in the
forward do not matter.
"""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.ranks.models.reused_memory import ReusedMemory
from conformance.scenarios.gradients import gradient, lay_out, sparse_rows, uses
from conformance.scenarios.model import Param
from conformance.scenarios.optimizer_checkpoints import Checkpointed
from conformance.scenarios.still_tensors import still_tensors
from conformance.torch_versions.faults import faults_of

TRAINING_BATCH = 6
TRAINING_WIDTHS = (9, 17, 5)


def _split_evenly(order: Sequence[int], count: int) -> list[Sequence[int]]:
    """Return an order in so many parts, or fewer, none of which is empty."""
    bounds = [len(order) * part // count for part in range(count + 1)]
    return [order[a:b] for a, b in itertools.pairwise(bounds) if a < b]


class _Scripted(torch.autograd.Function):
    """A scalar zero whose gradient with respect to ``parameter`` is ``grad``."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: torch.Tensor,
        grad: torch.Tensor,
        memory: ReusedMemory | None,
        index: int,
    ) -> torch.Tensor:
        ctx.grad, ctx.memory, ctx.index = grad, memory, index
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = ctx.memory.copy_of(ctx.grad, ctx.index) if ctx.memory else ctx.grad
        return grad, None, None, None


# Of frozen parameters, where others begin at zero: a decay shows, and so does a cast to bfloat16.
_FROZEN = 1 + 2**-20


class Probe(nn.Module):
    """Parameters in the shapes, dtypes and layouts of a scenario; ``forward`` scripts gradients.

    The parameters lie in another order in memory on each rank than on the next.

    Args:
        params: the parameters.
        level: the first value of all elements.
        rank: global rank.

    Attributes:
        memory: where gradients lie from the next forward on; None leaves that to torch's allocator.
        arrival: the parameters in the order in which gradients arrive from the next forward on;
            None for the last one first.
        checkpoints: the number of reentrant checkpoints that the next forwards have; 0 for none.
        checkpointed: the parameters that a reentrant checkpoint of the next forward has, beside
            others that are in none.
    """

    def __init__(self, params: tuple[Param, ...], level: float, rank: int) -> None:
        super().__init__()
        self.memory: ReusedMemory | None = None
        self.arrival: Sequence[int] | None = None
        self.checkpoints = 0
        self.checkpointed: Checkpointed | None = None
        self.params = params
        made = parameters_apart(sum(spec.version_of < 0 for spec in params), rank)
        # A later version of a parameter is not there yet.
        self.tensors: list[Any] = [None] * len(params)
        self.tensors[: len(made)] = made
        for index, (spec, parameter) in enumerate(zip(params, made, strict=False)):
            if spec.layout == "sparse":
                weight = torch.full(spec.shape, level, dtype=getattr(torch, spec.dtype))
                module = nn.Embedding(*spec.shape, sparse=True, _weight=weight)
                parameter.data = module.weight.data
                module.weight = parameter
                self.add_module(f"p{index}", module)
            else:
                value = level or _FROZEN if spec.frozen else level
                values = torch.full(spec.shape, value, dtype=getattr(torch, spec.dtype))
                # Integers are refused by a tensor that requires grad.
                parameter.requires_grad_(not (spec.frozen or 0 in spec.frozen_under))
                parameter.data = lay_out(values, spec.layout)
                self.register_parameter(f"p{index}", parameter)

    def change(self, number: int) -> dict[str, torch.nn.Parameter]:
        """Give parameters the dtypes and shapes of their versions under a DDP.

        A new dtype leaves the parameter as it is, as ``model.to(dtype)`` does; a new shape makes
        another one with the same name.

        Args:
            number: of the DDP.

        Returns:
            The parameters by the names of their versions.
        """
        versions: list[Any] = [None] * len(self.params)
        for index, spec in enumerate(self.params):
            if number in spec.frozen_under:
                continue
            name = f"p{index if spec.version_of < 0 else spec.version_of}"
            parameter = getattr(self, name)
            dtype = getattr(torch, spec.dtype)
            if parameter.shape == spec.shape:
                parameter.data = parameter.data.to(dtype)
            else:
                level = float(parameter.data.flatten()[0])
                values = torch.full(spec.shape, level, dtype=dtype, device=parameter.device)
                parameter = torch.nn.Parameter(values)
                self.register_parameter(name, parameter)
            versions[index] = parameter
        self.tensors = versions
        return {f"p{index}": one for index, one in enumerate(versions) if one is not None}

    def forward(self, grads: list[torch.Tensor | None]) -> torch.Tensor:
        """Return a loss with these gradients; a parameter with None takes no part in it."""
        # A backward begins with the nodes that were made last.
        order = range(len(grads)) if self.arrival is None else self.arrival[::-1]
        if self.checkpointed:
            inside = set(self.checkpointed.indices)
            # The part that is made first arrives last.
            parts = [
                self._checkpointed_loss_of(part, grads) if is_inside else self._loss_of(part, grads)
                for is_inside, part in itertools.groupby(order, inside.__contains__)
            ]
            return torch.stack(parts).sum()
        if not self.checkpoints:
            return self._loss_of(order, grads)
        parts = [
            self._checkpointed_loss_of(part, grads)
            for part in _split_evenly(order, self.checkpoints)
        ]
        return torch.stack(parts).sum()

    def _checkpointed_loss_of(
        self, order: Iterable[int], grads: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return the loss of some parameters, which are in a reentrant checkpoint.

        Its backward is a graph task within the one of the whole model.
        """
        loss: torch.Tensor = checkpoint(
            lambda zero, part: zero + self._loss_of(part, grads),
            torch.zeros((), requires_grad=True),
            list(order),
            use_reentrant=True,
            preserve_rng_state=False,
        )
        return loss

    def _loss_of(self, order: Iterable[int], grads: list[torch.Tensor | None]) -> torch.Tensor:
        """Return the loss of some parameters, whose nodes are made in this order."""
        losses = []
        scripted = list(zip(self.params, self.tensors, grads, strict=True))
        for index in order:
            spec, parameter, grad = scripted[index]
            if grad is None or parameter is None:
                continue
            if parameter.requires_grad and not spec.frozen:
                part = grad / spec.uses if spec.uses > 1 else grad
                losses += [
                    _Scripted.apply(parameter, part, self.memory, index) for _ in range(spec.uses)
                ]
        return torch.stack(losses).sum()


def scripted_gradients(
    params: tuple[Param, ...],
    kind: str,
    world: int,
    rank: int,
    step: int,
    device: torch.device,
    *,
    leaves_out_as: int | None = None,
    period: int = 0,
) -> list[torch.Tensor | None]:
    """Return the gradients that ``rank`` feeds at ``step``, each in its parameter's layout.

    Args:
        leaves_out_as: the number of the rank within its group, which decides the parameters that
            its forward leaves out; None is returned for each of them. None if it uses all.
        period: the length of the table that gradients repeat, or 0.
    """
    grads: list[torch.Tensor | None] = []
    for index, spec in enumerate(params):
        if leaves_out_as is not None and not uses(world, leaves_out_as, step, index, kind):
            grads.append(None)
            continue
        dtype = getattr(torch, spec.dtype)
        grad = gradient(
            kind,
            spec.shape,
            dtype,
            world=world,
            rank=rank,
            step=step,
            param=index,
            exponent=spec.exponent_at(step),
            period=period,
        )
        if spec.layout == "sparse":
            rows = sparse_rows(spec, rank, step)
            grads.append(_looked_up(rows, grad, rank + step).to(device))
        else:
            grads.append(lay_out(grad, spec.layout).to(device))
    return grads


def _looked_up(rows: torch.Tensor, grad: torch.Tensor, place: int) -> torch.Tensor:
    """Return rows of a gradient as a sparse tensor, as an embedding's backward gives it: one row
    has been looked up twice, so that it comes twice, with a half of its values each.

    Args:
        rows: the numbers of the rows, each once.
        grad: the whole gradient.
        place: of the row that is looked up twice, among ``rows``; it wraps around.
    """
    values = grad[rows]
    if len(rows):
        twice = place % len(rows)
        # Halves are exact.
        values[twice] /= 2
        rows = torch.cat([rows, rows[twice : twice + 1]])
        values = torch.cat([values, values[twice : twice + 1]])
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, grad.shape)


def training_network(session_seed: int) -> nn.Module:
    """Return a network with batch norm, its weights fixed without any random state.

    It has a causal mask, and the buffers of ``scenarios/still_tensors.py``.

    Args:
        session_seed: the session's seed.
    """
    first, hidden, last = TRAINING_WIDTHS
    model = nn.Sequential(
        nn.Linear(first, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, last)
    )
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if index in (2, 3):
                continue  # batch norm keeps its ones and zeros
            shape = tuple(parameter.shape)
            values = gradient("normal", shape, torch.float32, world=1, rank=99, step=0, param=index)
            parameter.copy_(values / math.sqrt(first))
    model[0].register_buffer("mask", torch.full((hidden, hidden), -math.inf).triu(1))
    # With a fault, DDP sends no complex tensors.
    takes_complex = not faults_of(torch.__version__)
    for still in still_tensors(session_seed):
        dtype = getattr(torch, still.dtype)
        if takes_complex or not dtype.is_complex:
            model[0].register_buffer(still.name, torch.tensor(still.values, dtype=dtype))
    return model


def training_loss(
    model: nn.Module, rank: int, step: int, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Return the loss of one batch on a device, different for each rank and step."""
    first, _, last = TRAINING_WIDTHS

    def draw(width: int, param: int) -> torch.Tensor:
        shape = (TRAINING_BATCH, width)
        values = gradient(
            "normal", shape, torch.float32, world=1, rank=rank, step=step, param=param
        )
        return values.to(device)

    # The numbers 77 and 78 belong to no parameter.
    inputs = draw(first, 77)
    targets = draw(last, 78)
    return ((model(inputs) - targets) ** 2).mean()


def parameters_apart(count: int, rank: int) -> list[torch.nn.Parameter]:
    """Return empty parameters on whose order in memory ranks r and r + 1 disagree.

    On odd ranks their addresses descend. If there are three or more, a set of them, made forwards
    or backwards, has its second and third parameter the other way round. So any two neighbours
    expose code that takes parameters in such an order, and not by chance.
    """
    draw = random.Random(rank)
    is_odd = rank % 2 == 1
    made = [torch.nn.Parameter(torch.empty(0)) for _ in range(count + _SPARE)]
    for _ in range(min(_MOST_TRIES, _PARAMETERS_DRAWN // max(count, 1) + 1)):
        chosen = sorted(draw.sample(made, count), key=id, reverse=is_odd)
        if count < 3 or all(_is_turned(some) == is_odd for some in (chosen, chosen[::-1])):
            break
    return chosen


def _is_turned(parameters: list[torch.nn.Parameter]) -> bool:
    """Whether a set of them has the third before the second; the first is where it begins."""
    order = [id(parameter) for parameter in set(parameters)]
    return order.index(id(parameters[2])) < order.index(id(parameters[1]))


_SPARE = 64
# Of four parameters one draw in 25 fits, of 400 parameters none may. A draw takes the longer the
# more parameters there are.
_PARAMETERS_DRAWN = 5_000
_MOST_TRIES = 1000
