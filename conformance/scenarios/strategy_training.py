"""The scenarios for sync strategies as training uses them: sizes, values, models and breaks.

Their numbers are drawn from the session's seed, in ``scenarios/strategy.py`` and in
``subjects/kinds/strategy.py``.
"""

from dataclasses import replace

from conformance.scenarios import strategy_breaks
from conformance.scenarios.model import DDPOptions, Observation, Param
from conformance.scenarios.strategy import _PARAMS, COMBINED, PLAIN, SUBGROUPS
from conformance.scenarios.strategy_uses import TWO_MODELS

LARGE = replace(
    PLAIN,
    name="strategy_large",
    summary="two micro-batches of some hundred parameters, one of them of a million elements and "
    "more; drawn sizes, and DDP's default buckets; another rank leaves out each of two large "
    "parameters of one size",
    steps=("crafted", "normal"),
    ddp=DDPOptions(),
    world_sizes=(2,),
    variant="two",
    prerequisite="strategy_ranks",
)

# As a GradScaler does, two parameters have gradients that are scaled by powers of two. One more, of
# float16, has a drawn size: 2**16 to 2**17 elements.
SPECIAL = replace(
    PLAIN,
    name="strategy_special",
    summary="NaN and infinities on any rank, small and large gradients of float16 whose sum "
    "overflows, scaled ones, and zeros on one rank or on all, in a drawn order",
    params=(
        *_PARAMS,
        Param((13,), "float64"),
        Param((31,), "float16"),
        Param((17,), "bfloat16"),
        Param((19,), exponent=16),
        Param((23,), exponent=-24),
    ),
    steps=("limit", "nan", "inf", "zero_one", "zero_all", "crafted"),
    world_sizes=(2, 3),
    variant="special",
    prerequisite="strategy_accumulated",
)

EMPTY = replace(
    PLAIN,
    name="strategy_empty",
    summary="some ranks have nothing to do in some micro-batches: empty batches; in one drawn step "
    "no rank has a backward in the last one, and in another one in an earlier one",
    steps=("crafted",) * 6,
    world_sizes=(2, 3),
    variant="empty",
    prerequisite="strategy_ranks",
)

TWO = replace(
    PLAIN,
    name="strategy_two",
    summary="two models with buffers, whose micro-batches come in a drawn order, and use different "
    "parameters; a drawn one fails, and comes again; at last the contexts of both are nested in "
    "each other",
    steps=("crafted",) * 12,
    world_sizes=(2,),
    variant=TWO_MODELS,
    prerequisite="strategy_ranks",
)

AFTER_WORLD = replace(
    SUBGROUPS,
    name="strategy_after_world",
    summary="a model on WORLD is trained first; then one on two disjoint subgroups",
    variant="after_world",
    observe=PLAIN.observe,
)

# The groups of twins are those of the network before: as large as its last ones.
REWRAPPED = replace(
    AFTER_WORLD,
    name="strategy_rewrapped",
    summary="a network is trained on WORLD, and on two subgroups; then DDP wraps it anew on two "
    "other ones",
    twin_groups=((0, 1), (2, 3)),
    variant="rewrapped",
)

# Parameters without a gradient need DDP's search for unused parameters.
ADDED = replace(
    COMBINED,
    name="strategy_added",
    summary="some parameters are used, and given to the optimizer, from a drawn step on",
    steps=("crafted",) * 6,
    variant="added",
)

TURNS = replace(
    COMBINED,
    name="strategy_turns",
    summary="two optimizers, of drawn parts of the model, step in turn or together, by a drawn "
    "schedule; a step uses the parameters of its optimizers, and the strategy is given these",
    steps=("crafted",) * 7,
    world_sizes=(2,),
    variant="turns",
)

SWAPPED = replace(
    COMBINED,
    name="strategy_swapped",
    summary="before a drawn step the optimizer is given other parameters in place of as many; "
    "later all layers are replaced by new ones of the same shapes",
    steps=("crafted",) * 6,
    world_sizes=(2,),
    variant="swapped",
)

FREEZING = replace(
    COMBINED,
    name="strategy_freezing",
    summary="each micro-batch freezes other parameters, which have gradients of earlier "
    "micro-batches; they are drawn",
    steps=("crafted",) * 5,
    world_sizes=(2,),
    variant="freezing",
)

# If gradients are views of buckets, they are where DDP puts them in any case.
UNFROZEN = replace(
    COMBINED,
    name="strategy_unfrozen",
    summary="zero_grad(set_to_none=False) clears gradients, all of them or a drawn part, in drawn "
    "steps within the first context; drawn parameters are frozen until one of two drawn steps",
    steps=("crafted",) * 8,
    ddp=replace(COMBINED.ddp, gradient_as_bucket_view=False),
    world_sizes=(2,),
    variant="unfrozen",
)

BUFFERS = replace(
    PLAIN,
    name="strategy_buffers",
    summary="a model with buffers of ten dtypes in drawn memory layouts, such as the running "
    "statistics of a BatchNorm, counts, sums in float64 and a mask, in steps of 2, 4 and 1 "
    "micro-batches, twice; in three drawn ones the modes of the model and of its layers "
    "differ; before two drawn ones a drawn rank evaluates the module alone; one drawn one goes on "
    "after an exception, and one is given up",
    steps=("crafted",) * 6,
    world_sizes=(2, 3),
    variant="buffers",
    prerequisite="strategy_accumulated",
)

OWN_BUFFERS = replace(
    BUFFERS,
    name="strategy_own_buffers",
    summary="the scenario `strategy_buffers` under DDP with broadcast_buffers=False, in four whole "
    "steps",
    steps=BUFFERS.steps[:4],
    ddp=replace(BUFFERS.ddp, broadcast_buffers=False),
)

# Groups without the global rank 0 have a first rank of their own.
GROUP_BUFFERS = replace(
    BUFFERS,
    name="strategy_group_buffers",
    summary="the scenario `strategy_buffers` on two disjoint subgroups of WORLD, in four whole "
    "steps",
    steps=BUFFERS.steps[:4],
    groups=SUBGROUPS.groups,
    prerequisite="strategy_subgroups",
)

REWRAPPED_BUFFERS = replace(
    BUFFERS,
    name="strategy_rewrapped_buffers",
    summary="a network with the buffers of `strategy_buffers` is trained on WORLD, and on two "
    "subgroups; then its buffers are cleared, and DDP wraps it anew on two other ones",
    steps=BUFFERS.steps[:4],
    groups=REWRAPPED.twin_groups,
    twin_groups=SUBGROUPS.groups,
    prerequisite="strategy_rewrapped",
)

ABANDONED = replace(
    PLAIN,
    name="strategy_abandoned",
    summary="two drawn steps of three micro-batches are given up before their last one",
    steps=("crafted",) * 5,
    world_sizes=(2,),
    variant="abandoned",
    prerequisite="strategy_accumulated",
)

RECOVERED = replace(
    PLAIN,
    name="strategy_recovered",
    summary="in each step of 3 or 4 micro-batches an exception is raised in a drawn one, before "
    "its backward or after some of its gradients have been made, and the step goes on with the "
    "next one; in two drawn steps it is the last one, which comes again; micro-batches use "
    "different parameters",
    steps=("crafted",) * 10,
    world_sizes=(2,),
    variant=strategy_breaks.RECOVERED,
    prerequisite="strategy_raises",
)

SECOND = replace(
    PLAIN,
    name="strategy_second",
    summary="each micro-batch has two forwards and backwards in one context",
    world_sizes=(2,),
    variant="second",
    prerequisite="strategy_accumulated",
)

PASSES = replace(
    SECOND,
    name="strategy_passes",
    summary="each micro-batch has two backward passes through the output of one forward, or two "
    "forwards before two backwards",
    steps=("crafted",) * 4,
    variant="passes",
)

PARTS = replace(
    SECOND,
    name="strategy_parts",
    summary="each micro-batch has one backward in two passes, of drawn parameters each, or "
    "torch.autograd.grad() before its backward",
    steps=("crafted",) * 4,
    variant="parts",
)

# The number of steps is drawn.
PENALTIES = replace(
    SECOND,
    name="strategy_penalties",
    summary="each micro-batch has one backward pass, until in drawn steps drawn ones have one or "
    "two more, of all parameters or of some: at first the last micro-batch of a step alone",
    steps=("crafted",) * 10,
    variant="penalties",
)

# The dtypes are those of gradients; ``held_in`` has those of the parameters.
GRADIENT_DTYPES = replace(
    PLAIN,
    name="strategy_gradient_dtypes",
    summary="parameters of float16, bfloat16 and float32, most of them with gradients of a wider "
    "dtype, by grad_dtype; which, is drawn, and so are the steps in which they have it",
    params=(*_PARAMS, Param((13,), "float64"), Param((3, 5), "float64")),
    steps=("normal", "crafted") * 4,
    world_sizes=(2,),
    variant="gradient_dtypes",
    prerequisite="strategy_accumulated",
)

LARGE_DTYPES = replace(
    GRADIENT_DTYPES,
    name="strategy_large_gradient_dtypes",
    summary="two large parameters of float16 or bfloat16, with gradients of float32 or float64; "
    "drawn sizes and dtypes, and whether the first step has gradients of their own dtype",
    params=_PARAMS[:2],
    steps=("normal", "crafted", "normal"),
)

COMPLEX = replace(
    PLAIN,
    name="strategy_complex",
    summary="complex gradients beside real ones",
    params=(
        Param((5, 3), "complex64"),
        Param((7,)),
        Param((11,), "complex128"),
    ),
    world_sizes=(2,),
    variant="two",
    prerequisite="strategy_accumulated",
)

AUTOCAST = replace(
    PLAIN,
    name="strategy_autocast",
    summary="two micro-batches of random values, in two large parameters too, under autocast to "
    "bfloat16; drawn sizes",
    steps=("normal",) * 2,
    world_sizes=(2,),
    variant="autocast",
    prerequisite="strategy_accumulated",
)

AUTOCAST_HALF = replace(
    AUTOCAST,
    name="strategy_autocast_half",
    summary="the scenario `strategy_autocast` under autocast to float16",
    options=("autocast=float16",),
)

# The least and the largest number of steps of a long run.
LONG_STEPS = (120, 240)

LONG = replace(
    PLAIN,
    name="strategy_long",
    summary=f"a small model in {LONG_STEPS[0]} to {LONG_STEPS[1]} steps of two micro-batches; one "
    "step of five, drawn, has an exception in the first; the model is evaluated before some steps, "
    "and within others; every other rank has another hash seed",
    params=(Param((3,)), Param((2, 2)), Param((5,)), Param((2, 3))),
    world_sizes=(2,),
    hash_seeds_differ=True,
    variant="long",
    prerequisite="strategy_accumulated",
    observe=Observation(growth=True),
)

MANY = replace(
    PLAIN,
    name="strategy_many_micro_batches",
    summary="steps of 5 to 40 micro-batches; their numbers are drawn",
    steps=("normal",) * 3,
    world_sizes=(2,),
    variant="many",
    prerequisite="strategy_accumulated",
)

ALL = (
    *(LARGE, SPECIAL, EMPTY, TWO, BUFFERS, ABANDONED, RECOVERED, SECOND, COMPLEX, LONG),
    *(MANY, AFTER_WORLD, ADDED, TURNS, SWAPPED, FREEZING, OWN_BUFFERS),
    *(AUTOCAST, AUTOCAST_HALF, REWRAPPED, UNFROZEN, PASSES, PARTS, GRADIENT_DTYPES),
    *(PENALTIES, GROUP_BUFFERS, REWRAPPED_BUFFERS, LARGE_DTYPES),
)
