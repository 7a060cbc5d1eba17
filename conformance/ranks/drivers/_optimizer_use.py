"""The use of an optimizer wrapper as a ``torch.optim.Optimizer``."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import torch

from conformance.ranks.drivers._kit_averager import Averager
from conformance.scenarios.optimizer import AFTER_LOAD, Setting

# Options that a consolidated state has to keep, beside the numbers of parameters.
_KEPT_OPTIONS = ("lr", "momentum", "betas", "weight_decay", "dampening", "nesterov", "maximize")


def takes(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
    """Whether the signature of a method takes these arguments."""
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function without a signature may take anything
        return True
    return True


def takes_closure(optimizer: Any) -> bool:
    """Whether ``step()`` has a parameter for a closure."""
    return takes(optimizer.step, None)


def has_added_groups(optimizer: Any) -> bool:
    """Whether it has ``add_param_group()``."""
    return callable(getattr(optimizer, "add_param_group", None))


def takes_set_to_none(optimizer: Any) -> bool:
    """Whether ``zero_grad()`` has a parameter ``set_to_none``."""
    return takes(optimizer.zero_grad, set_to_none=False)


def errors_as_optimizer(optimizer: Any, averager: Averager | None) -> dict[str, Any]:
    """Use the optimizer as programs use optimizers, and return the errors that they would get.

    ``hook_calls`` is how often hooks of a step ran, by their kinds and by the step: without a
    closure, with one, and after the optimizer has loaded its own state. Steps that raise are left
    out.

    Args:
        optimizer: the subject's; it is stepped three times, the second time with a closure.
        averager: the kit's, if the optimizer was given it.
    """
    errors = {"isinstance": "", "hook": "", "pre_hook": "", "scheduler": ""}
    calls: list[int] = []
    pre_calls: list[bool] = []

    def calls_of_averager() -> int:
        return averager.step if averager else 0

    if not isinstance(optimizer, torch.optim.Optimizer):
        errors["isinstance"] = f"{type(optimizer).__name__} is no torch.optim.Optimizer"
    with _noting(errors, "hook"):
        optimizer.register_step_post_hook(lambda *_: calls.append(calls_of_averager()))
    with _noting(errors, "pre_hook"):
        optimizer.register_step_pre_hook(lambda *_: pre_calls.append(True))
    before = calls_of_averager()
    with _noting(errors, "scheduler"):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    optimizer.step()
    if not errors["scheduler"]:
        with _noting(errors, "scheduler"):
            scheduler.step()
    if not errors["hook"]:
        # The hook has to be called once, after the averager.
        if len(calls) != 1:
            errors["hook"] = f"called {len(calls)} times in a step"
        elif calls != [before + bool(averager)]:
            errors["hook"] = "called before the averager"
    if not errors["pre_hook"] and len(pre_calls) != 1:
        errors["pre_hook"] = f"called {len(pre_calls)} times in a step"
    counts = {"pre-step": len(pre_calls), "post-step": len(calls)}
    with_closure = partial(optimizer.step, lambda: torch.tensor(1.0))
    counts |= _hook_calls_in(with_closure, " (with a closure)", pre_calls, calls)
    counts |= _hook_calls_in(partial(_step_loaded, optimizer), AFTER_LOAD, pre_calls, calls)
    return {**errors, "hook_calls": counts}


def _step_loaded(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()


def _hook_calls_in(
    step: Callable[[], Any], name: str, pre_calls: Sized, post_calls: Sized
) -> dict[str, int]:
    """Step; return how many hooks this step has added to the calls, by their kinds and its name.

    The gradients are there already.
    """
    before = len(pre_calls), len(post_calls)
    try:
        step()
    except Exception:  # it may take no closures, or have no state here: 15.7 and 15.14 judge that
        return {}
    return {
        f"pre-step{name}": len(pre_calls) - before[0],
        f"post-step{name}": len(post_calls) - before[1],
    }


def written_and_read(
    groups: Sequence[dict[str, Any]], plan: Setting, step: int
) -> dict[str, list[Any]]:
    """Write a step's own entries to parameter groups, and return the texts of all of them.

    The learning rates of all groups come beside them.

    Args:
        groups: the optimizer's ``param_groups``.
        plan: the scenario's, with entries.
        step: the step that comes next.
    """
    for place, written in plan.written_entries.get(step, {}).items():
        groups[place].update(copy.deepcopy(dict(written)))
    every = [*plan.entries, *(new for of in plan.written_entries.values() for new in of.values())]
    names = sorted({name for entries in every for name in entries})
    return {
        "groups": [
            {name: repr(group[name]) for name in names if name in group} for group in groups
        ],
        "rates": [float(group["lr"]) for group in groups],
    }


def gradients_left(params: Sequence[torch.Tensor]) -> dict[str, list[int]]:
    """Return the parameters with a gradient other than zeros, and those without a gradient."""
    grads = [parameter.grad for parameter in params]
    return {
        "left": [i for i, g in enumerate(grads) if g is not None and bool(g.count_nonzero())],
        "none": [i for i, g in enumerate(grads) if g is None],
    }


def read_consolidated(state: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a consolidated state by parameter, and a description of the others.

    The description has the parameter groups; or ``form`` is false, and there is nothing else.
    """
    is_mapping = isinstance(state, Mapping)
    by_index = state.get("state") if is_mapping else None
    groups = state.get("param_groups") if is_mapping else None
    if not isinstance(by_index, Mapping) or not isinstance(groups, list):
        return {}, {"form": False}
    tensors = {
        f"state/{index}/{name}": value
        for index, entries in by_index.items()
        if isinstance(entries, Mapping)
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    names = (*_KEPT_OPTIONS, "params")
    options = [
        {name: group.get(name) for name in names} for group in groups if isinstance(group, Mapping)
    ]
    return tensors, {"form": True, "groups": options}


@contextlib.contextmanager
def _noting(errors: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        errors[name] = f"{type(error).__name__}: {error}"[:300]
