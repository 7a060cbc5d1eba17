"""TODO: conformance/scenarios/wrapper.py."""

from dataclasses import replace

from conformance.scenarios.model import Scenario

PLAIN = Scenario(
    "wrapper",
    "a residual network trains, every block of it wrapped",
    (),
    ("normal",) * 3,
    kind="wrapper",
    after="wrapper",
)


RANDOM = replace(
    PLAIN, name="wrapper_random", what="blocks with dropout and batch norm; the generator is seeded before each step", world_sizes=(2,),
    case="random",
)  # fmt: skip


CALLS = replace(
    PLAIN,
    name="wrapper_calls",
    what="a block with several inputs, keywords, other things than tensors, a tuple as its output and a frozen part; a block in a block",
    world_sizes=(2,),
    case="calls",
)


CONTAINERS = replace(
    PLAIN, name="wrapper_containers", what="tensors go in and come out in dicts and lists", world_sizes=(2,), case="containers"
)


FIRST = replace(
    PLAIN, name="wrapper_first", what="the first block gets the network's input, which asks for no gradient", world_sizes=(2,), case="first"
)


STATIC = replace(
    PLAIN,
    name="wrapper_static",
    what="static_graph=True; a block is used twice, and shares a weight with a layer outside",
    world_sizes=(2,),
    case="twice",
    static_graph=True,
)


ACCUMULATED = replace(
    PLAIN,
    name="wrapper_accumulated",
    what="three micro-batches a step, the first two under no_sync",
    world_sizes=(2,),
    shares=(2, -3, 2),
)


SUBGROUPS = replace(
    PLAIN,
    name="wrapper_subgroups",
    what="two networks on two disjoint subgroups of WORLD; places in the group are not global ranks",
    groups=((1, 3), (0, 2)),
)


TWICE = replace(STATIC, name="wrapper_twice", what="the same without a static graph", static_graph=False)


UNUSED = replace(
    PLAIN,
    name="wrapper_unused",
    what="find_unused_parameters=True; some ranks, or all, leave some blocks out, other ones in every step",
    world_sizes=(2,),
    case="unused",
    find_unused=True,
)


MODES = replace(
    PLAIN,
    name="wrapper_modes",
    what="between the steps, in evaluation mode and under no_grad",
    world_sizes=(2,),
    case="modes",
)


AUTOCAST = replace(
    PLAIN, name="wrapper_autocast", what="the forward is in bfloat16 by autocast, the backward is outside of it", world_sizes=(2,),
    case="autocast",
)  # fmt: skip


RAISES = replace(PLAIN, name="wrapper_raises", what="a block raises an error in the second forward", world_sizes=(2,), case="raises")


HOOKED = replace(
    PLAIN, name="wrapper_hooked", what="hooks on the wrapper, and on modules inside", steps=("normal",) * 2, world_sizes=(2,), case="hooked"
)


MODULE = replace(
    PLAIN, name="wrapper_module", what="without a step: names, states, attributes, modes and copies", steps=(), world_sizes=(2,),
    case="module",
)  # fmt: skip


# Where a reentrant checkpoint has its limits: an error there is an answer, and ends the run's steps.
LIMITED = (CONTAINERS, FIRST, TWICE, UNUSED)
