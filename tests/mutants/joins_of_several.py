"""Mutants of 17.19: of several joinables of one class in a context, one alone is handed out."""

from typing import Any, ClassVar

from torch.distributed.algorithms.join import JoinHook

from tests.mutants import Mutant
from tests.mutants.joins_in_training import Averages


class _OfTheClass(JoinHook):
    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def main_hook(self) -> None:
        self.kind.active[0].shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.kind.active[0].hand_out(is_last_joiner)


class TheLastOfAContext(Averages):
    """Find the joinable of a hook in the class: it is the last one of the context."""

    active: ClassVar[list[Any]] = []

    def join_hook(self, **kwargs: Any) -> JoinHook:
        super().join_hook(**kwargs)
        self.active[:] = [self]
        return _OfTheClass(type(self))


class TheFirstOfAContext(Averages):
    """Find the joinable of a hook in the class: it is the first one of the context."""

    active: ClassVar[list[Any]] = []
    is_over = True

    def join_hook(self, **kwargs: Any) -> JoinHook:
        super().join_hook(**kwargs)
        if not self.active or self.active[0].is_over:
            self.active[:] = [self]
        self.is_over = False
        return _OfTheClass(type(self))

    def hand_out(self, is_last: bool) -> None:
        super().hand_out(is_last)
        self.is_over = True


MUTANTS = [
    Mutant(name, ("17.19",), kind="joinable")
    for name in ("TheLastOfAContext", "TheFirstOfAContext")
]
