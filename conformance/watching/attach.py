"""The hooks on a watched model: a forward hook, and a ``join_hook`` around DDP's own.

Both are attributes of the model, and DDP objects can be copied, pickled and loaded. So each of them
removes itself from copies: a copy of the model is not watched.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from conformance.torch_versions.private import without_dynamo


class StepObserver(Protocol):
    """An object that follows the steps of a model."""

    def after_forward(self, ddp: DistributedDataParallel, output: Any) -> None:
        """Called at the end of the model's forward."""

    def after_shadowed_step(self, ddp: DistributedDataParallel) -> None:
        """Called under ``Join`` on a rank that has run out of inputs.

        The rank has just shadowed a step in which other ranks train.
        """


class Attachment:
    """The hooks of one watch on one model. Several watches may share a model."""

    def __init__(self, ddp: DistributedDataParallel, observer: StepObserver) -> None:
        self._observer = observer
        self._handle = ddp.register_forward_hook(_ForwardHook(observer))
        present = ddp.__dict__.get("join_hook")
        if not isinstance(present, _WatchedJoinHook):
            present = _WatchedJoinHook(ddp)
        self._join_hook = present
        self._join_hook.observers.append(observer)
        ddp.join_hook = self._join_hook

    def detach(self) -> None:
        """Remove the hooks. Further calls do nothing."""
        self._handle.remove()
        observers = self._join_hook.observers
        if self._observer in observers:
            observers.remove(self._observer)
            if not observers:
                self._join_hook.ddp.__dict__.pop("join_hook", None)


class _ForwardHook:
    """The forward hook of a watched model."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer

    @without_dynamo
    def __call__(self, ddp: DistributedDataParallel, _: Any, output: Any) -> None:
        self._observer.after_forward(ddp, output)

    def __reduce__(self) -> Any:
        # A copy of the model has a hook that does nothing in this place.
        return _make_empty_hook, ()


def _make_empty_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    return None


class _WatchedJoinHook:
    """``join_hook`` of a watched model: DDP's own, and a call of the observers at each step."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self.observers: list[StepObserver] = []

    def __call__(self, **kwargs: Any) -> JoinHook:
        return _ObservedJoinHook(DistributedDataParallel.join_hook(self.ddp, **kwargs), self)

    def __reduce__(self) -> Any:
        # In a copy of the model this is DDP's own method: the copy has no such attribute yet.
        return getattr, (self.ddp, "join_hook")


class _ObservedJoinHook(JoinHook):
    """DDP's own hook of one ``Join`` context, with a call of the observers after each step."""

    def __init__(self, original: JoinHook, watched: _WatchedJoinHook) -> None:
        self._original = original
        self._watched = watched

    def main_hook(self) -> None:
        self._original.main_hook()
        # A copy of the list: an observer may detach itself.
        for observer in list(self._watched.observers):
            observer.after_shadowed_step(self._watched.ddp)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._original.post_hook(is_last_joiner)
