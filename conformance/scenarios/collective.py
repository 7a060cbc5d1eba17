"""The scenarios for quantized collectives (section 18).

``params`` are the shapes of the messages here, one call for each; ``collective_messages`` has their
values.
"""

from collections.abc import Mapping
from dataclasses import replace

from conformance.scenarios.model import Observation, Param, Scenario

# Collectives whose outputs are sums of messages, one from each rank.
SUMMING = ("reduce_scatter", "reduce_scatter_tensor", "all_reduce")

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "scatter"),
    *SUMMING,
)

# Collectives in which a rank sends one message, to all ranks.
TO_ALL = ("all_gather", "all_gather_into_tensor", "all_reduce")

# Collectives that take messages of different sizes: tensors of a list, or parts of one tensor.
OF_UNEVEN_SIZES = ("all_to_all", "all_to_all_single", "all_gather")

# Collectives whose messages to all ranks, or from all ranks, are parts of one tensor.
ONE_INPUT = ("all_to_all_single", "reduce_scatter_tensor")
ONE_OUTPUT = ("all_to_all_single", "all_gather_into_tensor")
# Their tensors have at least one dimension: torch cannot cut a number, and refuses one.
WITHOUT_NUMBERS = (*ONE_INPUT, *ONE_OUTPUT)


def operation_of(form: str) -> str:
    """Return the operation of a form of ``OPERATIONS`` or ``OF_INTEGERS``, as a key of the first.

    The result is empty for other forms, which have none: they ask for a sum.
    """
    name = form.removesuffix(_OF_INTEGERS)
    return name if name in OPERATIONS else ""


# Collectives whose input may be the rank's own part of the outputs, and those whose output may be
# its part of the inputs. Gloo and NCCL allow both; an exchange needs memory of its own.
IN_OUTPUTS = ("all_gather", "all_gather_into_tensor")
IN_INPUTS = ("scatter", "reduce_scatter", "reduce_scatter_tensor")

# The block size of a claim that names none. The magnitudes of an ``uneven`` message change after as
# many elements.
BLOCK = 128

# The forms of calls with an operation, and the names of torch's ``ReduceOp``. Averages of integers
# are rounded in some way or other, and bits of floating-point numbers mean nothing.
OPERATIONS = {
    "average": "AVG",
    "maximum": "MAX",
    "minimum": "MIN",
    "product": "PRODUCT",
    "bits_and": "BAND",
    "bits_or": "BOR",
    "bits_xor": "BXOR",
}
OF_BITS = ("bits_and", "bits_or", "bits_xor")
_OF_INTEGERS = "_of_integers"
OF_INTEGERS = tuple(form + _OF_INTEGERS for form in OPERATIONS if form != "average")

# The form of ordinary calls with integers.
INTEGERS = "integers"

# The form of calls with a stack of messages, which has one more dimension than their concatenation.
STACK = "stack"

_OF_SUMS = ("positional", "keywords", *OPERATIONS, *OF_INTEGERS, INTEGERS)

# The forms of the calls of CALLED, one for each parameter in order. All collectives have the first
# two forms, and the last.
CALLS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(COLLECTIVES, ("positional", "keywords", INTEGERS)),
    "all_to_all_single": ("positional", "keywords", "splits", "positional_splits", INTEGERS),
    "scatter": ("positional", "keywords", "group_src", INTEGERS),
    "all_gather_into_tensor": ("positional", "keywords", STACK, INTEGERS),
    **dict.fromkeys(SUMMING, _OF_SUMS),
    "reduce_scatter_tensor": (*_OF_SUMS[:2], STACK, *_OF_SUMS[2:]),
}

# The second message has 660 elements: more than five blocks of 128, the last one incomplete.
PLAIN = Scenario(
    name="collective",
    summary="matrices of float32; each rank sends a different message to each rank",
    params=(
        Param((5, 3)),
        Param((20, 33)),
    ),
    steps=("crafted", "normal", "uneven"),
    kind="collective",
    prerequisite="collective",
)

SUBGROUPS = replace(
    PLAIN,
    name="collective_subgroups",
    summary="on disjoint subgroups of WORLD, one of a single rank, whose last calls have "
    "async_op=True; group ranks are not global ranks; each group makes one call more than the "
    "one before it; one message of the last step is large",
    groups=((1, 3), (0, 2), (4,)),
    observe=Observation(bytes_sent=True),
)

# If a rank refuses a call, its peers do not make the call: they would wait for that rank.
ORDERED = replace(
    PLAIN,
    name="collective_ordered",
    summary="peers enter each call after rank 0 has left it or waits for them; the sizes of the "
    "messages are recorded",
    world_sizes=(2,),
    order="rank0_first",
)

# The kinds of steps in which float64 alone is sent: its numbers are beyond the range of float32.
VAST = "vast"
MINUTE = "minute"
SPREAD = "spread"
OF_FLOAT64 = (VAST, MINUTE, SPREAD)

FORMS = replace(
    ORDERED,
    name="collective_forms",
    summary="tensors of one to four dimensions, numbers if a collective takes them, empty, of one "
    "element, not contiguous on both sides or on one, of other dtypes, also complex ones; float64 "
    "beyond the range of float32",
    params=(
        *(
            Param(shape)
            for shape in ((7,), (131,), (1,), (0,), (0, 3), (1, 1), (2, 3, 4), (2, 3, 2, 5))
        ),
        Param((6, 5), layout="transposed"),
        Param((4, 3, 2, 5), layout="channels_last"),
        *(Param((5, 3), dtype) for dtype in ("float64", "float16", "bfloat16", "int32", "int64")),
        *(Param((), dtype) for dtype in ("float32", "float64", "int64")),
        Param((6, 5), layout="columns"),
        # What takes elements in the order of memory on both sides is right if both have one order.
        Param((6, 5), layout="transposed", output_layout="contiguous"),
        Param((5, 6), output_layout="transposed"),
        Param((4, 3, 2, 5), layout="channels_last", output_layout="contiguous"),
        Param((3, 4, 5, 2), output_layout="channels_last"),
        Param((5, 3), "complex64"),
        Param((7, 2), "complex128"),
        Param((131,), "complex64"),
    ),
    steps=("crafted", *OF_FLOAT64),
    world_sizes=(2, 3),
)

CALLED = replace(
    ORDERED,
    name="collective_calls",
    summary="on subgroups, with arguments by position and by keyword, and with rarely used "
    "arguments",
    params=(Param((4, 3)),),  # ``with_forms`` has one for each form
    steps=("crafted",),
    groups=((1, 3), (0, 2)),
)


def with_forms(scenario: Scenario, collective: str) -> Scenario:
    """Return ``CALLED`` with a parameter for each form of a collective's calls."""
    (spec,) = scenario.params
    of_integers = replace(spec, dtype="int64")
    params = (
        of_integers if form in (INTEGERS, *OF_INTEGERS) else spec for form in CALLS[collective]
    )
    return replace(scenario, params=tuple(params))


# The handles of asynchronous calls are asked about the calls. In the step of AT_REST they are asked
# when all collectives are over; in that of FUTURE_FIRST futures are waited for, and then the calls.
HANDLES = "handles"
AT_REST = "normal"
FUTURE_FIRST = "uneven"

WAITED = replace(
    ORDERED,
    name="collective_waited",
    summary="async_op=True, four calls at a time; each rank waits for them, or for their futures, "
    "in an order of its own, which is drawn; is_completed() and the like are asked; one message "
    "has one element, and one is empty",
    params=(*PLAIN.params, Param((1, 1)), Param((0, 3))),
    steps=("crafted", AT_REST, FUTURE_FIRST),
    world_sizes=(2, 3),
    variant=HANDLES,
)

# 30 elements: as many as ``collective_messages`` has special values.
SPECIAL = replace(
    PLAIN,
    name="collective_special",
    summary="NaN, infinities, zeros, ties, subnormals, the largest values",
    params=(Param((5, 6)),),
    steps=("special",),
    world_sizes=(2,),
)

# With error feedback, the mean of many calls comes closer to the message than one call does.
REPEATED = replace(
    PLAIN,
    name="collective_repeated",
    summary="the same values in every call, of float32 and of half precision; of three ranks each "
    "may send two messages of one shape to others",
    params=(Param((20, 33)), Param((20, 33), "bfloat16"), Param((11, 29), "float16")),
    steps=("constant",) * 24,
    world_sizes=(2, 3),
)
