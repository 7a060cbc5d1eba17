"""The scenario of impulses: gradients after steps in which a hook has delivered all it held back.

A step whose gradients are the same on all ranks comes first, and again after a drain of faint
gradients. What a hook does with it shows alone: nothing else is left that could be delivered.
"""

from conformance.scenarios.model import Param, Scenario

IMPULSE = "alike"
IMPULSES = Scenario(
    name="impulses",
    summary="gradients that are the same on all ranks, in the first step and after a drain",
    params=(Param((64, 48)), Param((1201,)), Param((37, 27))),
    steps=(IMPULSE,),
    world_sizes=(2,),
    prerequisite="values",
)
