"""What a watch puts on a model for as long as it lasts: a forward hook, and a ``join_hook`` around DDP's own.

Both are among the model's attributes, and go where these go: a copy of the model, or one that was saved and loaded, has neither.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel


class Counts(Protocol):
    """Who is told of a model's steps."""

    def forward_ended(self, ddp: DistributedDataParallel, output: Any) -> None:
        """A forward of the model is over."""

    def shadowed(self, ddp: DistributedDataParallel) -> None:
        """Under ``Join``, this rank has run out of inputs, and has followed a step in which others train."""


class Attached:
    """What stands on one model for one watch. Several may watch the same model."""

    def __init__(self, ddp: DistributedDataParallel, counts: Counts) -> None:
        self._counts = counts
        self._handle = ddp.register_forward_hook(_OnForward(counts))
        own = ddp.__dict__.get("join_hook")
        self._joining = own if isinstance(own, _Joining) else _Joining(ddp)
        self._joining.told.append(counts)
        ddp.join_hook = self._joining

    def detach(self) -> None:
        """Take it off; may be called again."""
        self._handle.remove()
        if self._counts in self._joining.told:
            self._joining.told.remove(self._counts)
            if not self._joining.told:
                self._joining.ddp.__dict__.pop("join_hook", None)


class _OnForward:
    """What the model calls when its forward ends."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    @torch._disable_dynamo
    def __call__(self, ddp: DistributedDataParallel, _: Any, output: Any) -> None:
        self._counts.forward_ended(ddp, output)

    def __reduce__(self) -> Any:
        return _unwatched, ()


def _unwatched() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    return None


class _Joining:
    """``join_hook`` of a watched model: DDP's own, and word of every step that it shadows. A copy of the model has DDP's own."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp, self.told = ddp, list[Counts]()

    def __call__(self, **kwargs: Any) -> JoinHook:
        return _Shadow(DistributedDataParallel.join_hook(self.ddp, **kwargs), self)

    def __reduce__(self) -> Any:
        return getattr, (self.ddp, "join_hook")  # of the copy, which has no such attribute yet


class _Shadow(JoinHook):
    def __init__(self, theirs: JoinHook, joining: _Joining) -> None:
        self._theirs, self._joining = theirs, joining

    def main_hook(self) -> None:
        self._theirs.main_hook()
        for counts in list(self._joining.told):
            counts.shadowed(self._joining.ddp)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._theirs.post_hook(is_last_joiner)
