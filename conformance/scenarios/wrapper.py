"""TODO: conformance/scenarios/wrapper.py."""

from dataclasses import replace

from conformance.scenarios.model import Scenario

PLAIN = Scenario(
    "wrapper",
    "a residual network trains, every block of it wrapped",
    (),
    ("normal",) * 3,
    kind="wrapper",
    prerequisite="wrapper",
)


RANDOM = replace(
    PLAIN,
    name="wrapper_random",
    summary="blocks with dropout and batch norm; the generator is seeded before each step",
    world_sizes=(2,),
    variant="random",
)


CALLS = replace(
    PLAIN,
    name="wrapper_calls",
    summary="a block with several inputs, keywords, other things than tensors, a tuple as its output and a frozen part; a block in a block",
    world_sizes=(2,),
    variant="calls",
)


CONTAINERS = replace(
    PLAIN,
    name="wrapper_containers",
    summary="tensors go in and come out in dicts and lists",
    world_sizes=(2,),
    variant="containers",
)


FIRST = replace(
    PLAIN,
    name="wrapper_first",
    summary="the first block gets the network's input, which asks for no gradient",
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
    summary="two networks on two disjoint subgroups of WORLD; places in the group are not global ranks",
    groups=((1, 3), (0, 2)),
)


TWICE = replace(
    STATIC,
    name="wrapper_twice",
    summary="the same without a static graph",
    ddp=replace(STATIC.ddp, static_graph=False),
)


UNUSED = replace(
    PLAIN,
    name="wrapper_unused",
    summary="find_unused_parameters=True; some ranks, or all, leave some blocks out, other ones in every step",
    world_sizes=(2,),
    variant="unused",
    ddp=replace(PLAIN.ddp, find_unused_parameters=True),
)


MODES = replace(
    PLAIN,
    name="wrapper_modes",
    summary="between the steps, in evaluation mode and under no_grad",
    world_sizes=(2,),
    variant="modes",
)


AUTOCAST = replace(
    PLAIN,
    name="wrapper_autocast",
    summary="the forward is in bfloat16 by autocast, the backward is outside of it",
    world_sizes=(2,),
    variant="autocast",
)


RAISES = replace(
    PLAIN,
    name="wrapper_raises",
    summary="a block raises an error in the second forward",
    world_sizes=(2,),
    variant="raises",
)


HOOKED = replace(
    PLAIN,
    name="wrapper_hooked",
    summary="hooks on the wrapper, and on modules inside",
    steps=("normal",) * 2,
    world_sizes=(2,),
    variant="hooked",
)


MODULE = replace(
    PLAIN,
    name="wrapper_module",
    summary="without a step: names, states, attributes, modes and copies",
    steps=(),
    world_sizes=(2,),
    variant="module",
)


# Where a reentrant checkpoint has its limits: an error there is an answer, and ends the run's steps.
LIMITED = (CONTAINERS, FIRST, TWICE, UNUSED)
