"""A scenario for a joinable that trains the same steps in one context and in two.

The contexts are drawn (``join_part_draws.py``).
"""

from dataclasses import replace

from conformance.scenarios.joinable import PLAIN

IN_PARTS = replace(
    PLAIN,
    name="joinable_in_parts",
    summary="the same steps in one context and in two, and uneven inputs of each rank, once with "
    "values on the rank that has joined that are out of date; the numbers are drawn",
    variant="in_parts",
    world_sizes=(2,),
)

ALL = (IN_PARTS,)
