"""Scenarios for a joinable that trains the same steps in one context and in several.

The contexts are drawn (``join_part_draws.py``).
"""

from dataclasses import replace

from conformance.scenarios.joinable import PLAIN

IN_PARTS = replace(
    PLAIN,
    name="joinable_in_parts",
    summary="the same steps in one context and in several; one is broken off, one is disabled, "
    "two have no inputs, and two throw as a rank runs out; a hundred steps after two joins; uneven "
    "inputs of each rank, few and then more than sixty, once with other values on the rank that "
    "has joined; a state that is saved and loaded after a join; the numbers are drawn",
    variant="in_parts",
    world_sizes=(2,),
    most_inputs=1300,
)

TWO_JOINED = replace(
    IN_PARTS,
    name="joinable_two_joined",
    summary="uneven inputs of three ranks, which train longest in turn, once with other values "
    "on the two that have joined; the numbers are drawn",
    world_sizes=(),
    size=3,
    most_inputs=120,
)

ALL = (IN_PARTS, TWO_JOINED)
