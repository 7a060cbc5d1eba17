"""The scenario of impulses: gradients after steps in which a hook has delivered all it held back.

All ranks feed the same gradients in a first step. After a drain of faint gradients comes a step in
which one rank alone feeds each parameter, and the parameters have buckets of their own. What a hook
does with these gradients shows alone: nothing else is left that could be delivered.
"""

from conformance.scenarios.model import DDPOptions, Param, Scenario

SHARED = "alike"  # the same on all ranks
ALONE = "alone"  # on one rank, another one for the next parameter; faint on the others

# Two of a kind, one for each of two ranks. Each has a bucket from the second step on, but for small
# ones: DDP closes a bucket of 64 bytes once it is full.
IMPULSES = Scenario(
    name="impulses",
    summary="gradients that are the same on all ranks, in the first step; after a drain, gradients "
    "on one rank alone, another one for each parameter",
    params=(
        *(Param((64, 48)), Param((37, 53))),
        *(Param((1201,)), Param((1709,))),
        *(Param((size,)) for size in (5, 17, 8, 33, 1, 29, 13, 31)),
    ),
    steps=(SHARED,),
    world_sizes=(2,),
    ddp=DDPOptions(bucket_cap_mb=64 / 2**20),
    prerequisite="values",
)


def feeds_alone(world: int, rank: int, param: int) -> bool:
    """Whether a rank is the one that feeds a parameter in a step of the kind ``ALONE``."""
    return param % world == rank
