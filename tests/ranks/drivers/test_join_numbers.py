"""Whether a joinable knows the argument that decides the divisor follows from its join hook."""

from typing import Any

import pytest
from torch.distributed.algorithms.join import JoinHook

from conformance.ranks.drivers._join_numbers import _knows_divisor


class Reads:
    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.divides = kwargs.get("divide_by_initial_world_size", True)
        return JoinHook()


class HandsOn(Reads):
    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.hooks = 1
        return super().join_hook(**kwargs)


class Inherits(HandsOn):
    pass


class Replaces(Reads):
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()


@pytest.mark.parametrize(
    ("made", "knows"), [(Reads, True), (HandsOn, True), (Inherits, True), (Replaces, False)]
)
def test_a_joinable_knows_the_divisor_if_its_hook_or_the_one_that_it_calls_does(
    made: type, knows: bool
) -> None:
    assert _knows_divisor(made()) is knows
