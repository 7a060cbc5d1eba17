"""Ranks are less alike than their forks would be."""

import itertools

import pytest

from conformance.ranks.models.probe import parameters_apart


@pytest.mark.parametrize("count", [2, 3, 4, 9, 33])
def test_ranks_disagree_on_every_order_that_comes_from_memory(count: int) -> None:
    """Such as that of addresses, and that of a set of parameters, in whichever order it was made; two alone are in that one."""
    orders = []
    for rank in (0, 1, 2):
        parameters = parameters_apart(count, rank)
        places = {parameter: place for place, parameter in enumerate(parameters)}
        assert len(places) == count
        in_sets = [[places[one] for one in set(made)] for made in (parameters, parameters[::-1]) if count > 2]
        orders.append([[places[one] for one in sorted(parameters, key=id)], *in_sets])
    for here, there in itertools.pairwise(orders):
        assert all(one != other for one, other in zip(here, there, strict=True))
