"""Mutants of section 23 that take each forward with gradients, or each graph task, for a step."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, is_dense, kept, pieces_of


class Forwards:
    """Counts the forwards of DDP whose gradients will be averaged.

    Args:
        model: the model under DDP.
        group: the group to average over.
    """

    def __init__(self, model: Any, group: Any) -> None:
        self.group = group
        self.number = 0
        model.register_forward_pre_hook(self.count)

    def count(self, ddp: Any, _: Any) -> None:
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self.number += 1


def _send(bucket: Bucket, group: Any, masks: list[torch.Tensor]) -> Result:
    """Average the elements in the masks of the parameters, and keep the others for later."""
    for parameter, piece, mask in zip(bucket.parameters(), pieces_of(bucket), masks, strict=True):
        total = piece + kept.get(parameter, torch.zeros_like(piece))
        kept[parameter] = total.masked_fill(mask, 0).nan_to_num(posinf=0, neginf=0)
        piece.copy_(total.masked_fill(~mask & total.isfinite(), 0))
    return average(bucket, group)


def _in_turn(parts: int, model: Any, process_group: Any) -> tuple[Forwards, Any]:
    """Return a hook that sends every n-th element, and the others after the next forwards."""

    def hook(state: Forwards, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            return average(bucket, state.group)
        turn = state.number % parts
        places = [torch.arange(piece.numel()) % parts == turn for piece in pieces_of(bucket)]
        return _send(bucket, state.group, places)

    return Forwards(model, process_group), hook


def sends_halves_in_turn(model: Any, process_group: Any) -> tuple[Forwards, Any]:
    """Send every second element, and the others after the next forward."""
    return _in_turn(2, model, process_group)


def sends_thirds_in_turn(model: Any, process_group: Any) -> tuple[Forwards, Any]:
    """Send every third element, and the others after the next forwards."""
    return _in_turn(3, model, process_group)


def sends_parameters_in_turn(model: Any, process_group: Any) -> tuple[Forwards, Any]:
    """Send every second parameter of a bucket, and the others after the next forward."""

    def hook(state: Forwards, bucket: Bucket) -> Result:
        if not is_dense(bucket):
            return average(bucket, state.group)
        masks = [
            torch.full(piece.shape, (number + state.number) % 2 == 0)
            for number, piece in enumerate(pieces_of(bucket))
        ]
        return _send(bucket, state.group, masks)

    return Forwards(model, process_group), hook


def compares_replicas_by_forwards(model: Any, process_group: Any) -> tuple[Forwards, Any]:
    """Compare replicas, by a collective, at every fiftieth forward of the rank."""
    compared = [0]

    def hook(state: Forwards, bucket: Bucket) -> Result:
        due = state.number // 50
        if due > compared[0] and bucket.index() == 0:
            compared[0] = due
            norms = torch.stack([one.detach().abs().sum().double() for one in bucket.parameters()])
            dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=state.group)
        return average(bucket, state.group)

    return Forwards(model, process_group), hook


class Epilogue:
    """SGD in a callback of the autograd engine, which it runs at the end of a graph task: each
    reentrant checkpoint has one of its own.

    Args:
        model: the model under DDP.
        process_group: the group to average over.
    """

    def __init__(self, model: Any, process_group: Any) -> None:
        self.group = process_group
        parameters = [one for one in model.parameters() if one.requires_grad]
        self.momenta = {one: torch.zeros_like(one) for one in parameters}
        self.sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.futures: list[Any] = []

    @torch.no_grad()
    def step(self) -> None:
        """Step all parameters, those without a gradient by their momentum."""
        for future in self.futures:
            future.wait()
        for parameter, momentum in self.momenta.items():
            momentum.mul_(0.5)
            if parameter in self.sums:
                momentum.add_(self.sums[parameter])
            parameter.sub_(momentum, alpha=0.1)
        self.futures.clear()
        self.sums.clear()


def steps_at_the_end_of_a_task(state: Epilogue, bucket: Bucket) -> Result:
    """Average, and step when the graph task of the first bucket is over."""
    if not is_dense(bucket) or any(one.is_complex() for one in bucket.parameters()):
        raise TypeError("dense real gradients only")
    is_backward = torch._C._current_graph_task_id() != -1
    if is_backward and not state.futures:
        Variable._execution_engine.queue_callback(state.step)
    begin = 0
    for parameter in bucket.parameters():
        place = bucket.buffer().as_strided(parameter.shape, parameter.stride(), begin)
        state.sums[parameter] = place
        begin += parameter.numel()
    future = average(bucket, state.group)
    state.futures.append(future)
    if not is_backward and bucket.is_last():
        state.step()
    return future


MUTANTS = [
    Mutant("compares_replicas_by_forwards", ("23.1",), setup=True, hangs=True),
    Mutant(
        "steps_at_the_end_of_a_task",
        ("23.6",),
        "fused(SGD, lr=0.1, momentum=0.5)",
        f"{__name__}:Epilogue",
    ),
    *(
        Mutant(name, ("23.1",), "compressed(delta=0.25)", setup=True)
        for name in (
            "sends_halves_in_turn",
            "sends_thirds_in_turn",
            "sends_parameters_in_turn",
        )
    ),
]
