"""Scenarios for wrappers of modules as training uses them (section 19, continued).

Networks compute in float32 on random values, in one process each: nothing averages gradients.
``variant`` selects the work of a step (``ranks/drivers/_wrapper_training.py``). These numbers are
drawn from the session's seed:

wrapper_single   the order of rows of 3 to 7 layers, and of one of 8 to 16; the batches and sizes
                 of signals, images and volumes for convolutions; the sizes of the dimensions that
                 tensors are expanded to, the rows, and the first column of a view; the number of
                 parts of a linear layer, 2 to 4, and how it is cut
wrapper_large    three blocks of 2**17 to 2**21 elements, one in each third of the range of
                 logarithms, and a power of two from 2**-20 to 2**20 that multiplies the inputs
wrapper_ranges   for each of four dtypes one block of 2**4 to 2**10 elements and one of 2**10 to
                 2**17; in some steps the one element that is not plain
wrapper_complex  for each of two dtypes a block of each of these sizes
wrapper_graphs   see ``scenarios/wrapper_graphs.py``
wrapper_many     a block of 4,100 to 5,000 layers, and 520 to 700 graphs at once of two blocks; the
                 order of backwards
wrapper_inputs   the order of three ways to ask for single gradients, with and without gradients
                 of parameters that are there before
wrapper_indices  a table of 70,000 to 200,000 rows, of which the last ones are read too
wrapper_written  the order of the ways to change a tensor of a block that has run, or runs; the
                 product of each block that changes its own, the columns, and the constant
wrapper_half     the blocks that get their input by keyword; the order of forwards under several
                 settings of autocast, and of their backwards
wrapper_retained the share of dropout; the numbers of backwards of three graphs, and their order
wrapper_long     300 to 380 steps, with batches of 0 to 12 rows; for each block the step from which
                 on it draws random numbers; the steps before which the network is evaluated
"""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from conformance.scenarios.model import Observation, Param, Scenario
from conformance.scenarios.seeds import generator
from conformance.scenarios.training_sizes import sizes_between
from conformance.scenarios.wrapper import PLAIN
from conformance.scenarios.wrapper_graphs import GRAPHS, MOST_ROWS, draw_graphs

SMALLEST = 2**17
LARGEST = 2**21

TRAINING = "training_"
"""The beginning of the variants of scenarios that ``drivers/_wrapper_training.py`` runs."""

SINGLE = replace(
    PLAIN,
    name="wrapper_single",
    summary="a residual network in float32, with linear attention, a linear layer that is cut into "
    "parts, and rows of layers, and convolutions of one to three dimensions and expanded tensors, "
    "on random values",
    world_sizes=(2,),
    variant="training_single",
)

# The first step is small: a library that is loaded in it takes no memory in the others.
LARGE = replace(
    PLAIN,
    name="wrapper_large",
    summary="activations of 2**17 to 2**21 elements in float32; in the last step those of one "
    "block are zeros in all places but one",
    steps=("normal",) * 5,
    world_sizes=(2,),
    variant="training_large",
)

RANGES = replace(
    PLAIN,
    name="wrapper_ranges",
    summary="activations of bfloat16, float16, float32 and float64, with drawn exponents of any "
    "normal number of the dtype; then with zeros, or small whole numbers, in all places but one; "
    "all results are exact",
    steps=("normal",) * 5,
    world_sizes=(2,),
    variant="training_ranges",
)

# A wrapper may raise an error, as ``Tensor.numpy()`` does for conjugated tensors.
COMPLEX = replace(
    PLAIN,
    name="wrapper_complex",
    summary="activations of complex64 and complex128, conjugated and negated without a copy; all "
    "results are exact",
    steps=("normal",) * 2,
    world_sizes=(2,),
    variant="training_complex",
)

# Steps of ``RANGES``. In those after the step of SPECIAL_VALUES all elements but one are plain.
SPECIAL_VALUES = 1

# The first step runs the block with many layers, the second one the others.
MANY_LAYERS = (4100, 5000)
MANY_GRAPHS = (520, 700)
MANY = replace(
    PLAIN,
    name="wrapper_many",
    summary=f"a block of {MANY_LAYERS[0]} to {MANY_LAYERS[1]} layers that save their "
    f"inputs; {MANY_GRAPHS[0]} to {MANY_GRAPHS[1]} forwards of two small blocks before their "
    "backwards",
    steps=("normal",) * 2,
    world_sizes=(2,),
    variant="training_many",
)

RETAINED = replace(
    PLAIN,
    name="wrapper_retained",
    summary="two backwards of one graph, with retain_graph=True, and three if blocks have dropout; "
    "two graphs at once, and three, with several backwards each",
    steps=("normal",) * 6,
    world_sizes=(2,),
    variant="training_retained",
)

# The first steps of ``wrapper_retained`` with dropout, and with several graphs.
RETAINS_MASKS = 2
RETAINS_GRAPHS = 4


def retained_share(scenario: Scenario, step: int) -> float:
    """Return the share of dropout in a step of ``wrapper_retained``: 0, and later 0.1 to 0.5."""
    if step < RETAINS_MASKS:
        return 0.0
    return generator(scenario, f"share/{step}").uniform(0.1, 0.5)


def order_of_backwards(scenario: Scenario, step: int) -> tuple[int, ...]:
    """Return the number of the graph of each backward in a step of ``wrapper_retained``.

    One graph has two backwards, and with dropout three. Then two graphs have three, in turns, and
    three graphs have two or three in a drawn order.
    """
    if step < RETAINS_GRAPHS:
        return (0,) * (2 if step < RETAINS_MASKS else 3)
    draw = generator(scenario, f"backwards/{step}")
    if step == RETAINS_GRAPHS:
        return tuple(draw.sample((0, 1), 2)) * 3
    order = [graph for graph in range(3) for _ in range(draw.randint(2, 3))]
    return tuple(draw.sample(order, len(order)))


PENALTY = replace(
    PLAIN,
    name="wrapper_penalty",
    summary="the loss has the norm of the input's gradient, which is differentiated again",
    steps=("normal",) * 2,
    world_sizes=(2,),
    variant="training_penalty",
)

INPUTS = replace(
    PLAIN,
    name="wrapper_inputs",
    summary="before a step's own backward, gradients of the input or of one parameter alone are "
    "asked for, as for adversarial examples; parameters have gradients before, or none",
    steps=("normal",) * 6,
    world_sizes=(2,),
    variant="training_inputs",
)

IN_CONTAINERS = ("list", "mapping", "nested")
_OF_INPUTS = ("residual", "columns", "staged", "keyword", *IN_CONTAINERS)
OF_FLOATS = ("weights", "biases", "buffers")
OF_MODULES = (*OF_FLOATS, "ids_buffer", "mask_buffer")
BY_BLOCKS = ("first", "first_by_name")
OF_INTEGERS = {
    "ids": "position",
    "short": "position",
    "mask": "position",
    "levels": "position",
    "ids by name": "keyword",
    "mask by name": "keyword",
    "ids in a mapping": "mapping",
    "mask in a mapping": "mapping",
}
"""The integers or the mask that a trainer overwrites, as the first word of each way, and how blocks
get them: by position, by keyword, or in a dict.
"""
BY_PRODUCTS = ("branch", "columns of a branch", "activation", "fill", "division")
WAYS_OF_WRITING = (
    *((way, False) for way in (*_OF_INPUTS, *BY_BLOCKS, *BY_PRODUCTS)),
    *((way, True) for way in (*_OF_INPUTS, "output", *OF_MODULES, *OF_INTEGERS)),
)
"""How a tensor is changed in place, and whether blocks save it for the backward.

The output of a block is added to its input, or to some columns there; or the input of the network
gets the values of the next batch; or something is added to the output of a block. A sum into the
input comes once more for inputs that are given by keyword, in a list, in a dict, and by keyword in
a list of a dict. In the ways ``BY_BLOCKS`` the first operation of a block changes its own input, as
``nn.SiLU(inplace=True)`` does; the input comes by position or by keyword. In the ways
``BY_PRODUCTS`` a block changes the result of its own linear layer, matrix product or convolution:
another branch is added to it or to some of its columns, as LoRA does, it gets an activation or a
value in some places, or it is divided by a constant. ``OF_MODULES`` are
changed in the blocks themselves, as by an optimizer; blocks do not save biases, but read them.
``OF_INTEGERS`` are inputs that blocks save, as a trainer overwrites its static buffers of token ids
and masks by those of the next batch.
"""

WRITTEN = replace(
    PLAIN,
    name="wrapper_written",
    summary="the input of a block, its output, indices, a mask, or a parameter or buffer is "
    "changed in place between its forward and the backward, as by a residual sum, or in the "
    "forward itself; so is the result of a product inside a block; in some steps blocks save these "
    "tensors",
    steps=("normal",) * len(WAYS_OF_WRITING),
    world_sizes=(2,),
    variant="training_written",
)


def order_of_writing(scenario: Scenario) -> list[tuple[str, bool]]:
    """Return the ways to change tensors, in the order of the scenario's steps."""
    key = f"{scenario.session_seed}/{scenario.name}/order"
    return random.Random(key).sample(WAYS_OF_WRITING, len(WAYS_OF_WRITING))


FROZEN = replace(
    PLAIN,
    name="wrapper_frozen",
    summary="frozen blocks, and frozen layers beside trained ones of low rank; blocks are frozen "
    "and unfrozen between steps; before the last two a weight is replaced, and a layer added",
    steps=("normal",) * 6,
    world_sizes=(2,),
    variant="training_frozen",
)
REPLACES = 4
ADDS = 5


def has_trained_input(step: int) -> bool:
    """Return whether the input of the network requires a gradient in a step of ``FROZEN``."""
    return step % 2 == 1 or has_replaced(step)


def has_replaced(step: int) -> bool:
    """Return whether blocks have other parameters in a step of ``FROZEN`` than when they were
    wrapped.
    """
    return step in (REPLACES, ADDS)


INDICES = replace(
    PLAIN,
    name="wrapper_indices",
    summary="embedding, gather, maximum, masks and dropout; the first step has no dropout",
    world_sizes=(2,),
    variant="training_indices",
)

HALF = replace(
    PLAIN,
    name="wrapper_half",
    summary="the forward runs in float16 by autocast, the backward outside of autocast; in two of "
    "three steps a forward without gradients comes between them, under another autocast or none; "
    "in two more steps forwards with gradients, without autocast and in two dtypes, come before "
    "their backwards; some blocks get their input by keyword alone",
    steps=("normal",) * 5,
    world_sizes=(2,),
    variant="training_half",
)

# The phase of a forward between another forward and its backward.
OTHER_FORWARD = "other"

# The phases of a forward and its backward, if forwards under other settings have graphs, too.
FORWARD_UNDER = "forward under "
BACKWARD_UNDER = "backward under "

# float32 is that without autocast.
SETTINGS = ("float32", "float16", "bfloat16")
_FIRST_WITH_SETTINGS = 3


def has_settings(step: int) -> bool:
    """Whether a step of ``wrapper_half`` has a forward under each of ``SETTINGS``."""
    return step >= _FIRST_WITH_SETTINGS


def has_one_backward(step: int) -> bool:
    """Whether the forwards of such a step have one backward together."""
    return step > _FIRST_WITH_SETTINGS


def orders_of_settings(scenario: Scenario, step: int) -> tuple[list[str], list[str]]:
    """Return the orders of forwards, and of backwards, in such a step.

    The last forward is another one in each of two steps, and one of them has autocast.
    """
    numbers = generator(scenario, "settings")
    last = numbers.sample(SETTINGS, 2)[step % 2]
    of_step = generator(scenario, f"settings/{step}")
    others = [name for name in SETTINGS if name != last]
    forwards = [*of_step.sample(others, len(others)), last]
    # Neither in the order of a queue nor in that of a stack.
    orders = [
        list(order)
        for order in itertools.permutations(forwards)
        if list(order) not in (forwards, forwards[::-1])
    ]
    return forwards, of_step.choice(orders)


LONG_STEPS = (300, 380)

WAYS_OF_DRAWING = ("module", "settings", "argument", "global", "buffer")
"""Where blocks of a long run find their share of dropout: in an attribute of nn.Dropout, in a dict
that all blocks share, in an argument of the forward, in an attribute of a class of the trainer's,
or in a buffer.
"""

LONG = replace(
    PLAIN,
    name="wrapper_long",
    summary=f"a small network in float32 in {LONG_STEPS[0]} to {LONG_STEPS[1]} steps, with batches "
    "of drawn sizes, some without rows; every third step has one more graph, without a backward; "
    "dropout begins at drawn steps, in each block by another way; every 8 to 24 steps the network "
    "is evaluated",
    world_sizes=(2,),
    variant="training_long",
    observe=Observation(growth=True),
)

SCENARIOS = (
    *(
        SINGLE,
        LARGE,
        RANGES,
        COMPLEX,
        GRAPHS,
        MANY,
        RETAINED,
        PENALTY,
        INPUTS,
        WRITTEN,
        FROZEN,
        INDICES,
    ),
    *(HALF, LONG),
)


def draw_large(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the sizes of three blocks, and the scale of the inputs."""
    exponent = numbers.randint(-20, 20)
    sizes = sizes_between(SMALLEST, LARGEST, 3, 3, numbers)
    numbers.shuffle(sizes)
    return replace(scenario, params=tuple(Param((size,), exponent=exponent) for size in sizes))


def draw_ranges(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the sizes of two blocks of each dtype, and the order of all blocks."""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32", "float64")
    if scenario.variant == COMPLEX.variant:
        dtypes = ("complex64", "complex128")
    params = [
        Param((round(2 ** numbers.uniform(least, most)),), dtype)
        for dtype in dtypes
        for least, most in ((4, 10), (10, 17))
    ]
    numbers.shuffle(params)
    return replace(scenario, params=tuple(params))


def draw_many(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the number of layers, which is the first parameter's size, and that of graphs."""
    layers = numbers.randint(*MANY_LAYERS)
    return replace(scenario, params=(Param((layers,)), Param((numbers.randint(*MANY_GRAPHS),))))


def draw_indices(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the number of rows of the table."""
    return replace(scenario, params=(Param((numbers.randint(70_000, 200_000), 4)),))


def first_with_dropout(scenario: Scenario) -> int:
    """Return the first step of a long run in which dropout of some block draws."""
    return min(_steps_with_dropout(scenario))


def ways_of_drawing(scenario: Scenario, step: int) -> tuple[str, ...]:
    """Return those of ``WAYS_OF_DRAWING`` in which blocks draw in a step of a long run."""
    firsts = zip(WAYS_OF_DRAWING, _steps_with_dropout(scenario), strict=True)
    return tuple(way for way, first in firsts if step >= first)


def _steps_with_dropout(scenario: Scenario) -> tuple[int, ...]:
    """Return for each of ``WAYS_OF_DRAWING`` the step from which on a block draws.

    In a run made for a number in a subject's code they all begin at one step.
    """
    firsts = scenario.params[1].shape if len(scenario.params) > 1 else (len(scenario.steps),)
    return firsts if len(firsts) > 1 else firsts * len(WAYS_OF_DRAWING)


def evaluates_before(scenario: Scenario, step: int) -> bool:
    """Return whether the network of a long run is evaluated before a step: by eval(), a forward
    under no_grad, and train(), every 8 to 24 steps.
    """
    numbers = random.Random(f"{scenario.session_seed}/{scenario.name}/evaluations")
    last = 0
    while last < step:
        last += numbers.randint(8, 24)
    return last == step > 0


def draw_long(scenario: Scenario, numbers: random.Random) -> Scenario:
    """Draw the number of steps; the first parameter's shape has the rows of the batch of each step,
    and the second one's the steps from which on blocks have dropout.
    A batch without rows is that of an expert to which a router sends no token.

    All have it before the second half, so that a pool which grows with what is saved is filled
    before growth is judged.
    """
    count = numbers.randint(*LONG_STEPS)
    rows = tuple(numbers.randint(0, MOST_ROWS) for _ in range(count))
    ends = (LONG_STEPS[0] // 5, LONG_STEPS[0] // 2)
    late = Param(tuple(numbers.randint(*ends) for _ in WAYS_OF_DRAWING))
    return replace(scenario, steps=("normal",) * count, params=(Param(rows), late))


DRAWS: Mapping[str, Callable[[Scenario, random.Random], Scenario]] = {
    LARGE.name: draw_large,
    RANGES.name: draw_ranges,
    COMPLEX.name: draw_ranges,
    GRAPHS.name: draw_graphs,
    MANY.name: draw_many,
    INDICES.name: draw_indices,
    LONG.name: draw_long,
}
