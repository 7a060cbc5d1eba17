"""The scenarios for wrappers of modules (section 19).

A residual network trains twice in each scenario: with its blocks wrapped, and in other processes
without the subject. ``variant`` selects the network's blocks (``ranks/drivers/_blocks.py``).
"""

import random
from dataclasses import replace

from conformance.scenarios.model import Scenario

PLAIN = Scenario(
    name="wrapper",
    summary="a residual network trains, with every block wrapped",
    params=(),
    steps=("normal",) * 3,
    kind="wrapper",
    prerequisite="wrapper",
)

# A block that is run again in the backward draws the same random numbers only if the wrapper
# restores the generator. Batch norm counts a second forward in its running statistics.
RANDOM = replace(
    PLAIN,
    name="wrapper_random",
    summary="blocks with dropout and batch norm, and blocks that draw without a module for it, "
    "once or several times, some in wrapped blocks; the generator is seeded before each step; the "
    "first one trains in eval mode",
    world_sizes=(2,),
    variant="random",
)

CALLS = replace(
    PLAIN,
    name="wrapper_calls",
    summary="a block with several inputs, keywords, arguments that are no tensors, a tuple as its "
    "output and a frozen part; a block in a block; one tensor as several arguments; arguments and "
    "results with and without a gradient, indices and masks in any order; a tuple of one result",
    world_sizes=(2,),
    variant="calls",
)

CONTAINERS = replace(
    PLAIN,
    name="wrapper_containers",
    summary="inputs and outputs are tensors in dicts and lists, one of them in both; a list of one",
    world_sizes=(2,),
    variant="containers",
)

ATTRIBUTES = replace(
    PLAIN,
    name="wrapper_attributes",
    summary="a block, and a layer in it, read tensors from attributes, such as a list and a dict, "
    "and leave some in others",
    world_sizes=(2,),
    variant="attributes",
)

FIRST = replace(
    PLAIN,
    name="wrapper_first",
    summary="the input of the first block is the network's, which requires no gradient",
    world_sizes=(2,),
    variant="first",
)

STATIC = replace(
    PLAIN,
    name="wrapper_static",
    summary="static_graph=True; a block is used twice, and shares a weight with a layer outside",
    world_sizes=(2,),
    variant="twice",
    ddp=replace(PLAIN.ddp, static_graph=True),
)

ACCUMULATED = replace(
    PLAIN,
    name="wrapper_accumulated",
    summary="three micro-batches a step, the first two under no_sync",
    world_sizes=(2,),
    microbatch_weights=(2, -3, 2),
)

SUBGROUPS = replace(
    PLAIN,
    name="wrapper_subgroups",
    summary="two networks on two disjoint subgroups of WORLD; group ranks are not global ranks",
    groups=((1, 3), (0, 2)),
)

TWICE = replace(
    STATIC,
    name="wrapper_twice",
    summary="the scenario `wrapper_static` without a static graph",
    ddp=replace(STATIC.ddp, static_graph=False),
)

UNUSED = replace(
    PLAIN,
    name="wrapper_unused",
    summary="find_unused_parameters=True; some ranks, or all, leave some blocks out, different "
    "ones in every step",
    world_sizes=(2,),
    variant="unused",
    ddp=replace(PLAIN.ddp, find_unused_parameters=True),
)

MODES = replace(
    PLAIN,
    name="wrapper_modes",
    summary="between the steps, forwards in evaluation mode and under no_grad",
    world_sizes=(2,),
    variant="modes",
)

# The block's second forward, inside the backward, has to run under the autocast of the first one.
AUTOCAST = replace(
    PLAIN,
    name="wrapper_autocast",
    summary="autocast to bfloat16 in the forward alone, in the backward alone, and around both, "
    "with the forward in a context that disables it; some blocks get their input by keyword alone",
    world_sizes=(2,),
    variant="autocast",
)

# Of the networks that run under autocast.
_BLOCKS = 3


def blocks_by_name(scenario: Scenario, step: int) -> frozenset[int]:
    """Return the numbers of the blocks that get their input by keyword alone, in networks under
    autocast: one or two of three. They are drawn, and each block is among them in some step.
    """
    key = f"{scenario.session_seed}/{scenario.name}/by name"
    order = random.Random(key).sample(range(_BLOCKS), _BLOCKS)
    count = random.Random(f"{key}/{step}").randint(1, 2)
    return frozenset(order[(step + place) % _BLOCKS] for place in range(count))


RAISES = replace(
    PLAIN,
    name="wrapper_raises",
    summary="a block raises an exception in a forward before each step but the first: an error, "
    "KeyboardInterrupt, SystemExit, GeneratorExit and BaseException",
    steps=("normal",) * 6,
    world_sizes=(2,),
    variant="raises",
)

HOOKED = replace(
    PLAIN,
    name="wrapper_hooked",
    summary="hooks on the wrapper, and on modules inside, which count, and change inputs, outputs "
    "and gradients",
    steps=("normal",) * 2,
    world_sizes=(2,),
    variant="hooked",
)

MODULE = replace(
    PLAIN,
    name="wrapper_module",
    summary="names, states, attributes, modes and copies of wrapped modules, without a step",
    steps=(),
    world_sizes=(2,),
    variant="module",
)

# A reentrant checkpoint may raise an error in these scenarios, since torch documents that it cannot
# run them. The error is an answer, and ends the run's steps.
LIMITED = (CONTAINERS, ATTRIBUTES, FIRST, TWICE, UNUSED)
