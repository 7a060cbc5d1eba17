"""Mutants of section 19 that are right in float64, on small blocks, and wrong in training."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from tests.mutants import Mutant
from tests.mutants.wrappers import Forward, again, calls

Pack = Callable[[torch.Tensor], Any]


def packs(pack: Pack, unpack: Callable[[Any], torch.Tensor] = lambda packed: packed) -> Any:
    """Return a wrapper that packs the saved tensors, except parameters."""

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        own = {parameter.data_ptr() for parameter in module.parameters()}

        def pack_activation(tensor: torch.Tensor) -> tuple[bool, Any]:
            stays = tensor.data_ptr() in own
            return stays, tensor if stays else pack(tensor)

        @calls
        def call(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(
                pack_activation,
                lambda packed: packed[1] if packed[0] else unpack(packed[1]),
            ):
                return forward(*args, **kwargs)

        return call(module)

    return wrap


def _is_single(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")


def keeps_bfloat16(module: torch.nn.Module) -> torch.nn.Module:
    """Keep float32 activations in bfloat16."""

    def pack(tensor: torch.Tensor) -> Any:
        is_single = _is_single(tensor)
        return is_single, tensor.bfloat16() if is_single else tensor

    return packs(pack, lambda packed: packed[1].float() if packed[0] else packed[1])(module)


def keeps_float16(module: torch.nn.Module) -> torch.nn.Module:
    """Keep float32 activations in float16, each scaled by its largest magnitude."""

    def pack(tensor: torch.Tensor) -> Any:
        if not _is_single(tensor) or not tensor.numel():
            return tensor, None
        largest = tensor.abs().max().clamp(min=1e-30)
        return (tensor / largest).half(), largest

    def unpack(packed: Any) -> torch.Tensor:
        small, largest = packed
        return small if largest is None else small.float() * largest

    return packs(pack, unpack)(module)


def rounds_large_ones(module: torch.nn.Module) -> torch.nn.Module:
    """Keep 14 bits of the significand of activations with more than 50,000 elements."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32 or tensor.numel() <= 50_000:
            return tensor
        return (tensor.view(torch.int32) + 256 & ~511).view(torch.float32)

    return packs(pack)(module)


def copies_a_part(module: torch.nn.Module) -> torch.nn.Module:
    """Copy the first 65,536 elements to a buffer, and leave zeros in the others."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() <= 65_536:
            return tensor.clone()
        kept = torch.zeros_like(tensor)
        kept.view(-1)[:65_536] = tensor.reshape(-1)[:65_536]
        return kept

    return packs(pack)(module)


@calls
def forgets_the_last_ones(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Pass the gradients of outputs of more than 2 MiB on in parts, and forget the last few
    elements."""
    made = again(forward, *args, **kwargs)
    if isinstance(made, torch.Tensor) and made.numel() * made.element_size() > 2**21:
        made.register_hook(lambda grad: torch.cat([grad[:-7], torch.zeros_like(grad[-7:])]))
    return made


def first_in_first_out(module: torch.nn.Module) -> torch.nn.Module:
    """Keep inputs in a queue: backwards have to come in the reverse order of forwards."""
    inputs: deque[Any] = deque()

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        ran: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not ran:
                ran.append(True)
                inputs.append(args)
                return forward(*args, **kwargs)
            return forward(*inputs.pop(), **kwargs)

        return again(run, *args, **kwargs)

    return wrap(module)


def one_slot(module: torch.nn.Module) -> torch.nn.Module:
    """Keep saved tensors by their place in the forward and by the grad mode, in one table: the next
    forward with gradients of the same shapes overwrites them."""
    slots: dict[Any, torch.Tensor] = {}

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        shapes = tuple(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
        place = iter(range(1000))

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.dtype is not torch.float32:
                return tensor
            key = shapes, next(place)
            slots[key] = tensor.detach()
            return key

        with saved_tensors_hooks(
            pack, lambda packed: packed if isinstance(packed, torch.Tensor) else slots[packed]
        ):
            return forward(*args, **kwargs)

    return wrap(module)


def frees_in_the_backward(module: torch.nn.Module) -> torch.nn.Module:
    """Overwrite a kept copy once it was used, as a pool of buffers does."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if tensor.is_floating_point() else tensor

    def unpack(kept: torch.Tensor) -> torch.Tensor:
        made = kept.clone()
        if kept.is_floating_point():
            kept.zero_()
        return made

    return packs(pack, unpack)(module)


class _Once(torch.autograd.Function):
    """Recompute in a backward whose own graph is lost, and say nothing."""

    @staticmethod
    def forward(ctx: Any, run: Forward, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        ctx.run = run
        ctx.parameters = parameters
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        trained = [parameter for parameter in ctx.parameters if parameter.requires_grad]
        with torch.random.fork_rng([]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            made = ctx.run(x)
        grads = iter(torch.autograd.grad(made, [x, *trained], grad.detach()))
        of_x = next(grads)
        return None, of_x, *(next(grads) if p.requires_grad else None for p in ctx.parameters)


def loses_second_derivatives(module: torch.nn.Module) -> torch.nn.Module:
    """Recompute by a custom Function that is not once_differentiable, and gives second derivatives
    that lack its block."""
    inside = type(module)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(inside.forward, self)
        is_plain = len(args) == 1 and isinstance(args[0], torch.Tensor) and not kwargs
        if not is_plain or torch.is_autocast_enabled("cpu"):
            return again(run, *args, **kwargs)
        return _Once.apply(run, args[0], *self.parameters())

    module.__class__ = type(inside.__name__, (inside,), {"forward": forward})
    return module


def asks_the_first_parameter(module: torch.nn.Module) -> torch.nn.Module:
    """Build no graph if the first parameter is frozen."""

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        first = next(module.parameters())
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        needs = first.requires_grad or not tensors or any(arg.requires_grad for arg in tensors)
        with torch.set_grad_enabled(torch.is_grad_enabled() and needs):
            return again(forward, *args, **kwargs)

    return wrap(module)


def freezes_for_ever(module: torch.nn.Module) -> torch.nn.Module:
    """Decide in the first forward whether the block is frozen, and leave frozen ones without a
    graph of their parameters from then on."""
    frozen: list[set[str]] = []

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not frozen:
            frozen.append({n for n, p in module.named_parameters() if not p.requires_grad})
        if frozen[0] != {n for n, _ in module.named_parameters()}:
            return again(forward, *args, **kwargs)
        constants = {name: p.detach() for name, p in module.named_parameters()}
        unwrapped = type(module).__mro__[1]

        def run(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(module, constants, args, kwargs)

        own = type(module)
        module.__class__ = unwrapped
        try:
            return run(*args, **kwargs)
        finally:
            module.__class__ = own

    return wrap(module)


def indices_in_16_bits(module: torch.nn.Module) -> torch.nn.Module:
    """Keep integers in 16 bits."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.int16) if tensor.dtype is torch.int64 else tensor

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        return packed.long() & 0xFFFF if packed.dtype is torch.int16 else packed

    return packs(pack, unpack)(module)


def masks_as_signs(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the rows of a mask in bytes of eight bits, of which the last incomplete one is lost."""

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.dtype is not torch.bool or not tensor.dim():
            return tensor
        return tensor.shape, tensor[..., : tensor.shape[-1] // 8 * 8]

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        shape, bits = packed
        made = torch.zeros(shape, dtype=torch.bool)
        made[..., : bits.shape[-1]] = bits
        return made

    return packs(pack, unpack)(module)


def bytes_as_masks(module: torch.nn.Module) -> torch.nn.Module:
    """Keep bytes as if they were masks, which they were in old versions of torch."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor != 0).to(tensor.dtype) if tensor.dtype is torch.uint8 else tensor

    return packs(pack)(module)


@calls
def always_bfloat16(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run the second forward in bfloat16 if the first one was under autocast."""
    ran: list[bool] = []
    casts = torch.is_autocast_enabled("cpu")

    def run(*args: Any, **kwargs: Any) -> Any:
        if not ran:
            ran.append(True)
            return forward(*args, **kwargs)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            return forward(*args, **kwargs)

    return again(run, *args, **kwargs)


class Remembers:
    """Keep copies of activations of all steps in a table of the process."""

    table: ClassVar[list[torch.Tensor]] = []


def keeps_copies(module: torch.nn.Module) -> torch.nn.Module:
    """Keep copies of all saved activations, after the backward too."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        Remembers.table.append(tensor.detach().clone())
        return tensor

    return packs(pack)(module)


def keeps_the_last_copies(module: torch.nn.Module) -> torch.nn.Module:
    """Claim to recompute, and keep copies of the last inputs and outputs."""
    last: dict[str, Any] = {}

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        made = again(forward, *args, **kwargs)
        last["kept"] = [x.detach().clone() for x in (*args, made) if isinstance(x, torch.Tensor)]
        return made

    return wrap(module)


def _clear(workspace: torch.Tensor, _: torch.Tensor) -> None:
    workspace.zero_()


@calls
def holds_a_workspace(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Claim to recompute, and allocate the memory of the second forward in the first one."""
    made = again(forward, *args, **kwargs)
    if isinstance(made, torch.Tensor) and made.requires_grad:
        workspace = torch.zeros(4 * made.numel())
        made.register_hook(partial(_clear, workspace))
    return made


def _set_back(module: torch.nn.Module, kept: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(module.buffers(), kept, strict=True):
            buffer.copy_(value)


def _values(module: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer.detach().clone() for buffer in module.buffers()]


@calls
def restores_buffers(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Set buffers back to those after the first forward when it has run again."""
    module = forward.args[0]  # type: ignore[attr-defined]
    kept: list[torch.Tensor] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            made = forward(*args, **kwargs)
            kept.extend(_values(module))
            return made
        try:
            return forward(*args, **kwargs)
        finally:
            _set_back(module, kept)

    return again(run, *args, **kwargs)


@calls
def starts_from_old_buffers(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run again from the buffers before the first forward, so that one batch counts once."""
    module = forward.args[0]  # type: ignore[attr-defined]
    kept: list[torch.Tensor] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if kept:
            _set_back(module, kept)
        kept[:] = _values(module)
        return forward(*args, **kwargs)

    return again(run, *args, **kwargs)


class _Reentrant(torch.autograd.Function):
    """A checkpoint with a backward inside the backward, without torch's check of the outer one."""

    @staticmethod
    def forward(ctx: Any, run: Forward, after: Forward, x: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.after = run, after
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            made: torch.Tensor = run(x)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng([]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            made = ctx.run(x)
        undo = ctx.after()
        torch.autograd.backward(made, grad)
        undo()
        return None, None, x.grad


def _nothing() -> Callable[[], None]:
    return lambda: None


@calls
def adds_under_grad(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Add to .grad of parameters if torch.autograd.grad asks for the input's gradient alone."""
    return _Reentrant.apply(forward, _nothing, *args)


@calls
def adds_to_gradients_that_are_there(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Take gradients away again that nobody has asked for, if there were none before."""
    module = forward.args[0]  # type: ignore[attr-defined]

    def after() -> Callable[[], None]:
        lacking = [parameter for parameter in module.parameters() if parameter.grad is None]
        if torch.autograd._is_checkpoint_valid():
            lacking = []

        def undo() -> None:
            for parameter in lacking:
                parameter.grad = None

        return undo

    return _Reentrant.apply(forward, after, *args)


_IDLE = {"19.41": "its Function takes one input, and all parameters have to be used"}
MUTANTS = [
    Mutant("keeps_bfloat16", ("19.23",), kind="wrapper"),
    Mutant("keeps_float16", ("19.23",), kind="wrapper"),
    Mutant("rounds_large_ones", ("19.24",), kind="wrapper"),
    Mutant("copies_a_part", ("19.24",), kind="wrapper"),
    Mutant("forgets_the_last_ones", ("19.24",), kind="wrapper"),
    Mutant("first_in_first_out", ("19.25",), kind="wrapper"),
    Mutant("one_slot", ("19.25",), kind="wrapper"),
    Mutant("restores_buffers", ("19.25",), kind="wrapper"),
    Mutant("starts_from_old_buffers", ("19.25",), kind="wrapper"),
    Mutant(
        "frees_in_the_backward",
        ("19.26",),
        because={"19.27": "a gradient penalty uses the saved tensors twice too"},
        kind="wrapper",
    ),
    Mutant("loses_second_derivatives", ("19.27",), because=_IDLE, kind="wrapper"),
    Mutant("adds_under_grad", ("19.27",), because=_IDLE, kind="wrapper"),
    Mutant("adds_to_gradients_that_are_there", ("19.27",), because=_IDLE, kind="wrapper"),
    Mutant("asks_the_first_parameter", ("19.28",), kind="wrapper"),
    Mutant("freezes_for_ever", ("19.28",), kind="wrapper"),
    Mutant("indices_in_16_bits", ("19.29",), kind="wrapper"),
    Mutant("masks_as_signs", ("19.29",), kind="wrapper"),
    Mutant("bytes_as_masks", ("19.29",), kind="wrapper"),
    Mutant("always_bfloat16", ("19.30",), kind="wrapper"),
    Mutant("keeps_copies", ("19.31",), kind="wrapper"),
    Mutant("keeps_the_last_copies", ("19.31",), claims="recomputes", kind="wrapper"),
    Mutant("holds_a_workspace", ("19.31",), claims="recomputes", kind="wrapper"),
]
