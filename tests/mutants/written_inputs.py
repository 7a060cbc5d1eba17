"""Mutants of section 19 that read an input in the backward, after others have changed it."""

from collections import deque
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, calls


@calls
def hides_inputs_in_a_function(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Give torch's checkpoint a function without arguments: it compares no versions."""
    return checkpoint(lambda: forward(*args, **kwargs), use_reentrant=False)


class _Remembers(torch.autograd.Function):
    """Run a function again in the backward, on an input that is an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, run: Forward, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        ctx.run = run
        ctx.x = x.detach()
        ctx.parameters = parameters
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.run(x)
        of_x, *others = torch.autograd.grad(made, [x, *ctx.parameters], grad)
        return None, of_x, *others


@calls
def keeps_the_input_on_the_context(forward: Forward, x: torch.Tensor) -> Any:
    """Keep the input beside the tensors that torch watches."""
    module = forward.args[0]  # type: ignore[attr-defined]
    return _Remembers.apply(forward, x, *module.parameters())


@calls
def queues_inputs(forward: Forward, x: torch.Tensor) -> Any:
    """Keep the input in a queue of the graph's, and read it at the first saved tensor."""
    inputs = deque([x.detach()])
    made: dict[int, torch.Tensor] = {}

    def again(index: int) -> torch.Tensor:
        if not made:
            seen: list[torch.Tensor] = []

            def note(tensor: torch.Tensor) -> None:
                seen.append(tensor.detach())

            with (
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept),
            ):
                forward(inputs[0].requires_grad_())
            made.update(enumerate(seen))
        return made[index]

    numbers: list[int] = []

    def count(_: torch.Tensor) -> int:
        numbers.append(len(numbers))
        return numbers[-1]

    with torch.autograd.graph.saved_tensors_hooks(count, again):
        return forward(x)


MUTANTS = [
    Mutant("hides_inputs_in_a_function", ("19.36",), kind="wrapper"),
    Mutant("keeps_the_input_on_the_context", ("19.36",), kind="wrapper"),
    Mutant("queues_inputs", ("19.36",), kind="wrapper"),
]
