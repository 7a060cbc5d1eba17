"""Mutants that are wrong once a step has ended early: by an error, Ctrl-C or an exit that the
trainer catches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.mutants import Mutant
from tests.mutants.optimizer_wrappers import PostLocal
from tests.mutants.strategies import _average
from tests.mutants.wrappers import Forward, calls

Closure = Callable[[], Any]
Known = tuple[type[BaseException], ...]
# An interrupt of another library, such as asyncio.CancelledError, is none of them.
_KNOWN = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)

# ---- Strategies


@contextmanager
def _put_back_after(known: Known, model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Put DDP's setting back at the end of a step and after the exceptions that are known."""
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    try:
        yield
    except known:
        model.require_backward_grad_sync = before
        raise
    model.require_backward_grad_sync = before
    if is_final_microbatch:
        _average(model)


def put_back_after_errors(model: Any, is_final_microbatch: bool) -> Any:
    """Put DDP's setting back after an error, and not after Ctrl-C."""
    return _put_back_after((Exception,), model, is_final_microbatch)


def put_back_after_what_it_knows(model: Any, is_final_microbatch: bool) -> Any:
    """Put DDP's setting back after errors and Python's own interrupts."""
    return _put_back_after(_KNOWN, model, is_final_microbatch)


class StaysOnExit:
    """Leave the context at once, with nothing put back, if the process is about to exit."""

    def __init__(self, model: Any, is_final_microbatch: bool) -> None:
        self._model = model
        self._is_final = is_final_microbatch

    def __enter__(self) -> None:
        self._before = self._model.require_backward_grad_sync
        self._model.require_backward_grad_sync = False

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind in (SystemExit, GeneratorExit):
            return
        self._model.require_backward_grad_sync = self._before
        if self._is_final and kind is None:
            _average(self._model)


# ---- Optimizers


class GuardsItsStep(PostLocal):
    """Average only in the outermost step, by a flag that an exception leaves set."""

    _is_stepping = False

    def step(self, closure: Closure | None = None) -> Any:
        is_outermost = not self._is_stepping
        self._is_stepping = True
        loss = self.optim.step(closure)
        if is_outermost:
            self.averager.average_parameters(self.optim.param_groups)
            self._is_stepping = False
        return loss


class AveragesInFinally(PostLocal):
    """Call the averager after a step that has failed, too: its count runs ahead."""

    def step(self, closure: Closure | None = None) -> Any:
        try:
            return self.optim.step(closure)
        finally:
            self.averager.average_parameters(self.optim.param_groups)


class LooksAhead(PostLocal):
    """Compute gradients at parameters a little ahead, and go back after an error, not Ctrl-C."""

    _undoes: Known = (Exception,)

    def step(self, closure: Closure | None = None) -> Any:
        if closure is None:
            return super().step()
        self._move(2.0)
        try:
            loss = self._called(closure)
        except self._undoes:
            self._move(0.5)
            raise
        self._move(0.5)
        self.optim.step()
        self.averager.average_parameters(self.optim.param_groups)
        return loss

    def _called(self, closure: Closure) -> Any:
        with torch.enable_grad():
            return closure()

    @torch.no_grad()
    def _move(self, factor: float) -> None:
        for parameter in self.parameters():
            parameter.mul_(factor)


class LooksAheadOfWhatItKnows(LooksAhead):
    """Go back after errors and Python's own interrupts."""

    _undoes = _KNOWN


# ---- Wrappers


def _hooked(known: Known, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Take hooks on saved tensors off after the forward and the exceptions that are known."""
    hooks = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    hooks.__enter__()
    try:
        made = forward(*args, **kwargs)
    except known:
        hooks.__exit__()
        raise
    hooks.__exit__()
    return made


@calls
def takes_hooks_off_after_errors(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Take hooks on saved tensors off after an error, and not after Ctrl-C."""
    return _hooked((Exception,), forward, *args, **kwargs)


@calls
def takes_hooks_off_after_what_it_knows(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Take hooks on saved tensors off after errors and Python's own interrupts."""
    return _hooked(_KNOWN, forward, *args, **kwargs)


@calls
def exits_as_an_error(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Make an error of an exit, as the entry of a worker does."""
    try:
        return forward(*args, **kwargs)
    except SystemExit as error:
        raise RuntimeError(f"a block has ended with {error}") from error


MUTANTS = [
    Mutant("put_back_after_errors", ("16.14",), kind="strategy"),
    Mutant("put_back_after_what_it_knows", ("16.14",), kind="strategy"),
    Mutant("StaysOnExit", ("16.14",), kind="strategy"),
    Mutant("GuardsItsStep", ("15.7",), kind="optimizer"),
    Mutant("AveragesInFinally", ("15.7",), kind="optimizer"),
    Mutant("LooksAhead", ("15.7",), kind="optimizer"),
    Mutant("LooksAheadOfWhatItKnows", ("15.7",), kind="optimizer"),
    Mutant("takes_hooks_off_after_what_it_knows", ("19.15",), kind="wrapper"),
    Mutant("takes_hooks_off_after_errors", ("19.15",), kind="wrapper"),
    Mutant("exits_as_an_error", ("19.15",), kind="wrapper"),
]
