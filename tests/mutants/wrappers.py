"""Mutants of section 19: wrappers of modules.

All but those of names give the module a new class, which keeps every name.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.careful_checkpoint import careful_checkpoint
from tests.mutants import Mutant

Forward = Callable[..., Any]
Wrap = Callable[[torch.nn.Module], torch.nn.Module]
again = careful_checkpoint


def calls(call: Callable[..., Any]) -> Wrap:
    """Return the wrapper with ``call(the module's forward, ...)`` as its forward."""

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        inside = type(module)

        def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return call(partial(inside.forward, self), *args, **kwargs)

        module.__class__ = type(inside.__name__, (inside,), {"forward": forward})
        return module

    return wrap


class Around(torch.nn.Module):
    """A right wrapper module around another, with the inner keys and parameter names."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        own = f"{prefix}module."
        inner = [key for key in state_dict if key.startswith(prefix) and not key.startswith(own)]
        for key in inner:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self.module.named_parameters(*args, **kwargs)


@calls
def saves_in_float16(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Round the tensors that are saved for the backward."""

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.dtype, tensor.half() if tensor.is_floating_point() else tensor

    with saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0])):
        return forward(*args, **kwargs)


@calls
def detaches(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach the inputs, so that they get no gradients."""
    return again(
        forward, *(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs
    )


@calls
def draws_again(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Draw other dropout masks in the second forward, without claiming it."""
    return again(forward, *args, preserve_rng_state=False, **kwargs)


def draws_again_without_dropout_modules(module: torch.nn.Module) -> torch.nn.Module:
    """Restore the generator for blocks with a dropout module alone."""
    dropout = torch.nn.modules.dropout._DropoutNd
    keeps = any(isinstance(part, dropout) for part in module.modules())
    return calls(partial(_draws_again_unless, keeps))(module)


def _draws_again_unless(keeps: bool, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    return again(forward, *args, preserve_rng_state=keeps, **kwargs)


def draws_again_in_eval_mode(module: torch.nn.Module) -> torch.nn.Module:
    """Restore the generator for blocks in training mode alone: there is no dropout in eval()."""
    return calls(partial(_draws_again_if, lambda: not module.training))(module)


def _draws_again_if(draws: Callable[[], bool], forward: Forward, *args: Any, **kwargs: Any) -> Any:
    return again(forward, *args, preserve_rng_state=not draws(), **kwargs)


class _SeesDropout(TorchFunctionMode):
    seen = False

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or "dropout" in function.__name__
        return function(*args, **(kwargs or {}))


@calls
def draws_again_without_calls_of_dropout(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Restore the generator if the first forward has called a dropout function."""
    before = torch.get_rng_state()
    calls_of = _SeesDropout()
    ran = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not ran:
            ran.append(True)
            with calls_of:
                return forward(*args, **kwargs)
        if not calls_of.seen:
            return forward(*args, **kwargs)
        with torch.random.fork_rng([]):
            torch.set_rng_state(before)
            return forward(*args, **kwargs)

    return again(run, *args, preserve_rng_state=False, **kwargs)


@calls
def leaves_the_generator_moved(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Restore the generator for the second forward, and leave it there."""
    before = torch.get_rng_state()
    ran = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if ran:
            torch.set_rng_state(before)
        ran.append(True)
        return forward(*args, **kwargs)

    return again(run, *args, preserve_rng_state=False, **kwargs)


@calls
def detaches_keywords(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach tensors that are passed as keywords."""
    return again(
        forward,
        *args,
        **{
            key: value.detach() if isinstance(value, torch.Tensor) else value
            for key, value in kwargs.items()
        },
    )


@calls
def returns_the_first(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Return the first of several results."""
    made = again(forward, *args, **kwargs)
    return made[0] if isinstance(made, tuple) else made


@calls
def detaches_in_containers(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach tensors in dicts and lists, without claiming it."""

    def detached(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: detached(inside) for key, inside in value.items()}
        if isinstance(value, list):
            return [detached(inside) for inside in value]
        return value.detach() if isinstance(value, torch.Tensor) else value

    return again(
        forward,
        *(arg if isinstance(arg, torch.Tensor) else detached(arg) for arg in args),
        **kwargs,
    )


def _detach_attributes(forward: Forward) -> None:
    module = forward.args[0]  # type: ignore[attr-defined]
    for name, value in list(vars(module).items()):
        if isinstance(value, torch.Tensor):
            setattr(module, name, value.detach())


@calls
def reads_detached_attributes(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach the tensors that a block finds in its attributes."""
    _detach_attributes(forward)
    return again(forward, *args, **kwargs)


@calls
def leaves_detached_attributes(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach the tensors that a block leaves in its attributes."""
    module = forward.args[0]  # type: ignore[attr-defined]
    found = {name: value for name, value in vars(module).items() if torch.is_tensor(value)}
    made = again(forward, *args, **kwargs)
    _detach_attributes(forward)
    for name, value in found.items():
        setattr(module, name, value)
    return made


def _detached_inside(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _detached_inside(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_detached_inside, value))
    return value.detach() if isinstance(value, torch.Tensor) else value


def _detach_inside(module: torch.nn.Module) -> None:
    for name, value in list(vars(module).items()):
        if not name.startswith("_") and not isinstance(value, torch.Tensor):
            setattr(module, name, _detached_inside(value))


@calls
def reads_detached_lists(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach the tensors that a block finds in lists and dicts among its attributes."""
    _detach_inside(forward.args[0])  # type: ignore[attr-defined]
    return again(forward, *args, **kwargs)


@calls
def leaves_detached_lists(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach the tensors that a block leaves in lists and dicts."""
    module = forward.args[0]  # type: ignore[attr-defined]
    before = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    made = again(forward, *args, **kwargs)
    _detach_inside(module)
    vars(module).update({name: before[name] for name in ("conditions",) if name in before})
    return made


@calls
def leaves_detached_layers(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Detach the tensors that layers inside a block leave in their attributes."""
    made = again(forward, *args, **kwargs)
    for layer in list(forward.args[0].modules())[1:]:  # type: ignore[attr-defined]
        if torch.is_tensor(vars(layer).get("balance")):
            layer.balance = layer.balance.detach()
    return made


@calls
def runs_a_copy(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run a copy of the block with the same parameters, whose attributes the trainer never sees."""
    function, module = forward.func, copy.copy(forward.args[0])  # type: ignore[attr-defined]
    return again(partial(function, module), *args, **kwargs)


@calls
def needs_an_input_with_gradient(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Build no graph if no input requires a gradient."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    with torch.set_grad_enabled(
        torch.is_grad_enabled() and (not tensors or any(arg.requires_grad for arg in tensors))
    ):
        return again(forward, *args, **kwargs)


def remembers_one_call(module: torch.nn.Module) -> torch.nn.Module:
    """Keep the inputs of the last call only, for all second forwards."""
    last: dict[str, Any] = {}

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        last["args"] = args
        return again(lambda *_, **kwargs: forward(*last["args"], **kwargs), *args, **kwargs)

    return wrap(module)


@calls
def reentrant_and_says_nothing(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run a backward inside the backward, invisible to DDP, without claiming it."""

    def run(*both: Any) -> Any:
        named = dict(zip(kwargs, both[len(args) :], strict=True))
        return forward(*both[: len(args)], **named)

    return checkpoint(run, *args, *kwargs.values(), use_reentrant=True)


@calls
def leaves_autocast(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run the second forward outside autocast."""
    ran: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not ran):
            ran.append(True)
            return forward(*args, **kwargs)

    return again(run, *args, **kwargs)


@calls
def enters_autocast_only_if_it_was_on(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run the second forward under the autocast of the backward, unless the first one had its own.

    torch's checkpoint leaves that of the backward: it is noted when the gradient arrives.
    """
    ran: list[bool] = []
    in_backward: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        is_on = torch.is_autocast_enabled("cpu") or (bool(ran) and any(in_backward))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            ran.append(True)
            return forward(*args, **kwargs)

    output = again(run, *args, **kwargs)
    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: in_backward.append(torch.is_autocast_enabled("cpu")))
    return output


@calls
def enables_gradients(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Build a graph under no_grad too."""
    with torch.enable_grad():
        return forward(*args, **kwargs)


class KeepsItsPrefix(Around):
    """Add the wrapper's prefix to the keys of the state_dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return torch.nn.Module.state_dict(self, *args, **kwargs)


class LoadsItsOwnOnly(Around):
    """Save the module's keys, and load only keys with the wrapper's prefix."""

    def _load_from_state_dict(self, *args: Any) -> None:
        torch.nn.Module._load_from_state_dict(self, *args)


class NamesItsOwn(Around):
    """Add the wrapper's prefix to parameter names, but not to keys of the state_dict."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return torch.nn.Module.named_parameters(self, *args, **kwargs)


class NamesBuffersItsOwn(Around):
    """Add the wrapper's prefix to buffer names, but not to keys of the state_dict."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]


class HidesAttributes(Around):
    """Hide the attributes of the inner module."""


def copies_go_on_with_the_first(module: torch.nn.Module) -> torch.nn.Module:
    """Close over the module's forward, so that a copy runs the original."""
    inside = module.forward
    module.forward = lambda *args, **kwargs: again(inside, *args, **kwargs)  # type: ignore[method-assign]
    return module


class StaysInTraining(Around):
    """Set the mode of the wrapper only in train() and eval()."""

    def train(self, mode: bool = True) -> "StaysInTraining":
        self.training = mode
        return self


@calls
def leaves_hooks_in_force(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Leave the saved-tensor hooks installed after an error in the forward."""
    hooks = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    hooks.__enter__()
    made = forward(*args, **kwargs)
    hooks.__exit__()
    return made


@calls
def wraps_errors(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Replace errors of the block with another type."""
    try:
        return forward(*args, **kwargs)
    except Exception as error:
        raise RuntimeError(f"checkpointed forward failed: {error}") from error


class CallsForward(Around):
    """Call the inner forward directly, so that the module's hooks do not fire."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return again(self.module.forward, *args, **kwargs)


@calls
def keeps_the_graph(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Claim to recompute, and keep the activations."""
    return forward(*args, **kwargs)


@calls
def runs_again(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Claim limits that it does not have: it is a right checkpoint."""
    return again(forward, *args, **kwargs)


draws_the_same = runs_again
updates_buffers_again = runs_again


@calls
def one_bit_off(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Change the last bits of the result, as another order of summation does."""
    made = forward(*args, **kwargs)
    return made * (1 + 2.0**-50) if isinstance(made, torch.Tensor) else made


def logs_what_is_saved(module: torch.nn.Module) -> torch.nn.Module:
    """Keep all activations of all steps."""
    log: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        log.append(tensor.detach())
        return tensor

    @calls
    def wrap(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **kwargs)

    return wrap(module)


@calls
def runs_again_and_keeps(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run the forward again in the backward, and keep the first graph too."""
    made = forward(*args, **kwargs)
    if torch.is_grad_enabled() and isinstance(made, torch.Tensor):
        state = torch.get_rng_state()
        casts = torch.is_autocast_enabled("cpu")

        def rerun(_: torch.Tensor) -> None:
            with (
                torch.random.fork_rng([]),
                torch.no_grad(),
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts),
            ):
                torch.set_rng_state(state)
                forward(*args, **kwargs)

        made.register_hook(rerun)
    return made


def silences_warnings(module: torch.nn.Module) -> torch.nn.Module:
    """Silence the warnings of the whole process."""
    warnings.simplefilter("ignore")
    return runs_again(module)


def copies(module: torch.nn.Module) -> torch.nn.Module:
    """Wrap a copy, so that the module's own parameters no longer train."""
    return runs_again(copy.deepcopy(module))


_LIMITS = dict.fromkeys(
    ("19.5", "19.6", "19.39"), "the graph ends there too, another limit of reentrant checkpoints"
)
_NO_GRADIENT = {"19.28": "blocks behind a frozen one have no input that requires a gradient"}
MUTANTS = [
    Mutant("saves_in_float16", ("19.1",), kind="wrapper"),
    Mutant("detaches", ("19.1",), kind="wrapper"),
    Mutant("copies", ("19.1",), kind="wrapper"),
    Mutant("draws_again", ("19.2",), kind="wrapper"),
    Mutant("draws_again_without_dropout_modules", ("19.2",), kind="wrapper"),
    Mutant("draws_again_without_calls_of_dropout", ("19.2",), kind="wrapper"),
    Mutant("draws_again_in_eval_mode", ("19.2",), kind="wrapper"),
    Mutant("leaves_the_generator_moved", ("19.3",), kind="wrapper"),
    Mutant("detaches_keywords", ("19.4",), kind="wrapper"),
    Mutant("returns_the_first", ("19.4",), kind="wrapper"),
    Mutant("detaches_in_containers", ("19.5",), kind="wrapper"),
    Mutant("reads_detached_attributes", ("19.39",), kind="wrapper"),
    Mutant("leaves_detached_attributes", ("19.39",), kind="wrapper"),
    Mutant("reads_detached_lists", ("19.39",), kind="wrapper"),
    Mutant("leaves_detached_lists", ("19.39",), kind="wrapper"),
    Mutant("leaves_detached_layers", ("19.39",), kind="wrapper"),
    Mutant("runs_a_copy", ("19.39",), kind="wrapper"),
    Mutant("needs_an_input_with_gradient", ("19.6",), because=_NO_GRADIENT, kind="wrapper"),
    Mutant(
        "remembers_one_call",
        ("19.7", "19.8"),
        because={
            "19.8": "the block is called twice there too",
            "19.25": "several forwards come before the first backward there",
            "19.40": "an evaluation comes between forward and backward there",
        },
        kind="wrapper",
    ),
    Mutant(
        "reentrant_and_says_nothing",
        ("19.8", "19.5", "19.6"),
        because=_LIMITS | _NO_GRADIENT,
        kind="wrapper",
    ),
    Mutant("leaves_autocast", ("19.9",), kind="wrapper"),
    Mutant("enters_autocast_only_if_it_was_on", ("19.9",), kind="wrapper"),
    Mutant("enables_gradients", ("19.9",), kind="wrapper"),
    Mutant("KeepsItsPrefix", ("19.10",), kind="wrapper"),
    Mutant("LoadsItsOwnOnly", ("19.10",), kind="wrapper"),
    Mutant("NamesItsOwn", ("19.11",), kind="wrapper"),
    Mutant("NamesBuffersItsOwn", ("19.12",), kind="wrapper"),
    Mutant("HidesAttributes", ("19.13",), kind="wrapper"),
    Mutant("copies_go_on_with_the_first", ("19.14",), kind="wrapper"),
    Mutant("updates_buffers_again", ("19.20",), claims="recomputes", kind="wrapper"),
    Mutant("one_bit_off", ("19.22",), kind="wrapper"),
    Mutant(
        "StaysInTraining",
        ("19.11",),
        because={"19.40": "the network is in evaluation mode in some step there"},
        kind="wrapper",
    ),
    Mutant("leaves_hooks_in_force", ("19.15",), kind="wrapper"),
    Mutant("wraps_errors", ("19.15",), kind="wrapper"),
    Mutant("CallsForward", ("19.16",), kind="wrapper"),
    Mutant("keeps_the_graph", ("19.17",), claims="recomputes", kind="wrapper"),
    Mutant("runs_again", ("19.18",), claims="recomputes, reentrant", kind="wrapper"),
    Mutant("draws_the_same", ("19.18",), claims="draws_anew", kind="wrapper"),
    Mutant("logs_what_is_saved", ("19.19",), kind="wrapper"),
    Mutant("runs_again_and_keeps", ("19.19",), kind="wrapper"),
    Mutant("silences_warnings", ("19.21",), kind="wrapper"),
]
