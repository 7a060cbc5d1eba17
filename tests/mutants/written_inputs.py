"""Mutants of section 19 that read a tensor in the backward, after others have changed it."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.careful_checkpoint import careful_checkpoint
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


@calls
def leaves_small_tensors_where_they_are(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Copy saved tensors away by hooks, but for small ones: torch compares no versions of these."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.numel() > 2**10 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        return forward(*args, **kwargs)


@calls
def shares_memory_with_numpy(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep saved tensors as arrays, which share their memory on a CPU."""

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if tensor.requires_grad and tensor.is_leaf else tensor.detach().numpy()

    def unpack(kept: Any) -> torch.Tensor:
        return kept if isinstance(kept, torch.Tensor) else torch.from_numpy(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


@calls
def compares_inputs_alone(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Keep saved tensors, and compare the versions of those that are inputs, but of no others."""
    inputs = {arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return tensor, tensor._version if tensor.data_ptr() in inputs else -1

    def unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, version = packed
        if version not in (-1, tensor._version):
            raise RuntimeError("an input was changed in place after the forward")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


@calls
def binds_names_beforehand(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Give torch's checkpoint the inputs by position, and those by keyword with the function."""
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)


class _Unpacks:
    """The saved tensors of a function, which are computed again when the first one is needed."""

    def __init__(self, run: Callable[[], Any], watched: Sequence[torch.Tensor]) -> None:
        self._run = run
        self._watched = [(tensor, tensor._version) for tensor in watched]
        self._count = 0
        self._made: list[torch.Tensor] = []

    def pack(self, _: torch.Tensor) -> int:
        self._count += 1
        return self._count - 1

    def unpack(self, index: int) -> torch.Tensor:
        if any(tensor._version != version for tensor, version in self._watched):
            raise RuntimeError("a tensor was changed in place after the forward")
        if not self._made:
            with (
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(
                    lambda tensor: self._made.append(tensor.detach()), lambda kept: kept
                ),
            ):
                self._run()
        return self._made[index]


@calls
def watches_inputs_of_one_level(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Compare the versions of inputs, by position and by keyword, but of none in a list."""
    given = [*args, *kwargs.values()]
    unpacks = _Unpacks(
        partial(forward, *args, **kwargs), [one for one in given if isinstance(one, torch.Tensor)]
    )
    with torch.autograd.graph.saved_tensors_hooks(unpacks.pack, unpacks.unpack):
        return forward(*args, **kwargs)


@calls
def leaves_leaves_where_they_are(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Copy what the forward computes; parameters and buffers have memory of their own already."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.grad_fn is None else tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        return forward(*args, **kwargs)


@calls
def leaves_buffers_where_they_are(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Copy saved tensors away by hooks, except buffers, which hardly ever change."""
    module = forward.args[0]  # type: ignore[attr-defined]
    stays = {buffer.data_ptr() for buffer in module.buffers()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.data_ptr() in stays else tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        return forward(*args, **kwargs)


@calls
def reads_parameters_again(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run again with the parameters of the backward, as torch's checkpoint does."""
    return careful_checkpoint(forward, *args, **kwargs)


@calls
def watches_weights_alone(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Compare the versions of inputs and weights, and forget biases and buffers."""
    module = forward.args[0]  # type: ignore[attr-defined]
    weights = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    versions = [weight._version for weight in weights]

    def run(*args: Any, **kwargs: Any) -> Any:
        if versions != [weight._version for weight in weights]:
            raise RuntimeError("a weight was changed in place after the forward")
        return forward(*args, **kwargs)

    return careful_checkpoint(run, *args, **kwargs)


@calls
def notes_versions_afterwards(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Note the versions of inputs when the forward is over, which may have changed them itself."""
    noted: list[tuple[torch.Tensor, int]] = []

    def run() -> Any:
        if any(tensor._version != version for tensor, version in noted):
            raise RuntimeError("an input was changed in place after the forward")
        made = forward(*args, **kwargs)
        if not noted:
            leaves = tree_leaves([args, kwargs])
            noted.extend((one, one._version) for one in leaves if isinstance(one, torch.Tensor))
        return made

    return checkpoint(run, use_reentrant=False)


class _SavesLast(torch.autograd.Function):
    """Run a function again in the backward, on an input that is saved when it has run."""

    @staticmethod
    def forward(ctx: Any, run: Forward, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        made = run(x)
        ctx.run = run
        ctx.save_for_backward(x, *parameters)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            # The function may change its input, which a leaf does not allow.
            made = ctx.run(leaf.clone())
        return None, *torch.autograd.grad(made, [leaf, *parameters], grad)


@calls
def saves_the_input_last(forward: Forward, x: torch.Tensor) -> Any:
    """Save the input when the forward is over."""
    module = forward.args[0]  # type: ignore[attr-defined]
    return _SavesLast.apply(forward, x, *module.parameters())


MUTANTS = [
    Mutant("binds_names_beforehand", ("19.36",), kind="wrapper"),
    Mutant("watches_inputs_of_one_level", ("19.36",), kind="wrapper"),
    Mutant("leaves_leaves_where_they_are", ("19.36",), kind="wrapper"),
    Mutant("leaves_buffers_where_they_are", ("19.36",), kind="wrapper"),
    Mutant("reads_parameters_again", ("19.37",), kind="wrapper"),
    Mutant("watches_weights_alone", ("19.37",), kind="wrapper"),
    Mutant("leaves_small_tensors_where_they_are", ("19.36",), kind="wrapper"),
    Mutant("shares_memory_with_numpy", ("19.36",), kind="wrapper"),
    Mutant("compares_inputs_alone", ("19.36",), kind="wrapper"),
    Mutant("hides_inputs_in_a_function", ("19.36",), kind="wrapper"),
    Mutant("keeps_the_input_on_the_context", ("19.36",), kind="wrapper"),
    Mutant("queues_inputs", ("19.36",), kind="wrapper"),
    Mutant("notes_versions_afterwards", ("19.36",), kind="wrapper"),
    Mutant("saves_the_input_last", ("19.36",), kind="wrapper"),
]
