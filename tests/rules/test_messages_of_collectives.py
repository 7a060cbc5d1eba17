"""The messages of rules for quantized collectives, on runs written by hand."""

from collections.abc import Callable
from typing import Any

import expecttest
import torch

from conformance.judging.oracles.collective import arrivals, calls
from conformance.records.rank_record import Event, RankRecord, Tensors
from conformance.records.run import Run
from conformance.scenarios import collective as scenarios
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective_training import RECOVERING, VIEWS
from conformance.scenarios.model import Scenario
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims
from tests.made_runs import event, refused

HALF = "collective(all_gather), rounded(float16)"
BLOCKS = "collective(all_gather), blocks(int8, size=128)"
CALLED = {
    "refused": "",
    "goes_on_alone": False,
    "early": [],
    "late": False,
    "value_differs": False,
    "untrue": [],
    "raised_in_wait": False,
    "waits": True,
    "returned": "Work",
    "inputs_changed": [],
    "replaced": [],
    "dtypes": [],
    "sent": [["allgather", 64]],
    "changed_around": 0,
}

Change = Callable[[torch.Tensor], torch.Tensor]


def same(values: torch.Tensor) -> torch.Tensor:
    return values


def called(
    scenario: Scenario = scenarios.PLAIN,
    claims: str = HALF,
    change: Change = same,
    steps: int = 3,
    world: int = 2,
    only: int | None = None,
    **fields: Any,
) -> Run:
    """Return a run in which a function of the right values arrives.

    Args:
        scenario: the scenario, before it is adapted to the claims.
        claims: the claims.
        change: the function.
        steps: the number of steps.
        world: the number of ranks.
        only: the number of the parameter whose values are changed; None changes all.
        fields: those of the events of calls.
    """
    parsed = parse_claims(claims, "collective")
    adapted = adapt_scenario(scenario, parsed)
    run = Run(adapted, world, [RankRecord(rank, [], Tensors(rank)) for rank in range(world)])
    for rank in run.ranks:
        for step in range(min(steps, len(adapted.steps))):
            for index in messages.indices(adapted, step):
                one = event("called", step, index=index, **(CALLED | fields))
                rank.events.append(Event(one))
    for call in calls(run):
        for output, arrival in enumerate(arrivals(run, parsed, call)):
            is_changed = only in (None, call.index)
            values = change(arrival.allowed.low) if is_changed else arrival.allowed.low
            if values.numel():
                run.ranks[call.rank].tensors[f"{call.step}/arrived/p{call.index}/{output}"] = values
    return run


def text(number: str, claims: str = HALF, *args: Any, **options: Any) -> str:
    """Return the first failure of a rule on a run with these options."""
    return refused(number, called(*args, claims=claims, **options), claims)


def test_a_right_collective_is_not_refused() -> None:
    for number in ("18.1", "18.2", "18.7", "18.8"):
        assert text(number) == ""


def test_messages_that_arrive_wrong_are_described() -> None:
    expecttest.assert_expected_inline(
        "\n".join(
            (
                text("18.1", change=lambda values: values[:0]),
                text("18.1", change=lambda values: values[:2]),
                text("18.2", change=lambda values: values * 1.5),
                text("18.2", BLOCKS, change=lambda values: values * 2),
                text("18.5", scenario=scenarios.FORMS, change=lambda values: values * 1.25 + 1),
                text("18.6", scenario=scenarios.FORMS, change=lambda values: values + 1),
                text("18.14", scenario=scenarios.SPECIAL, change=lambda values: values.abs()),
                text("18.16", BLOCKS, scenario=scenarios.REPEATED, steps=24),
            )
        ),
        """\
Expected: 15 elements
Actual: rank 0, step 0, p0, the message from rank 0: no tensor
Expected: 15 elements
Actual: rank 0, step 0, p0, the message from rank 0: 2 elements
Expected: 0.934082031 (exact: 0.934078038)
Actual: rank 0, step 1, p0, the message from rank 0, index 0: 1.40112305 (15 of 15
    elements differ)
Expected: from 0.927193929 to 0.940962147 (exact: 0.934078038)
Actual: rank 0, step 1, p0, the message from rank 0, index 0: 1.85438786 (15 of 15
    elements differ)
Expected: -0.625 (exact: -0.625)
Actual: rank 0, step 0, p8, the message from rank 0, index 0: 0.21875 (30 of 30 elements
    differ)
Expected: 1048577, or an error
Actual: rank 0, step 0, p13, the message from rank 0, index 0: 65505 (15 of 15 elements
    differ)
Likely cause: integers are rounded
Expected: 65504 or inf (exact: 1.34578709e+156)
Actual: rank 0, step 1, p10, the message from rank 0, index 1: 65505 (3 of 15 elements
    differ)
Expected: -8 (exact: -8)
Actual: rank 0, step 0, p10, the message from rank 0, index 0: -7 (15 of 15 elements
    differ)
Expected: -inf or -65504 (exact: -inf)
Actual: rank 0, step 0, p0, the message from rank 0, index 2: inf (6 of 30 elements
    differ)
Likely cause: an infinity is lost
Expected: a mean within 0.00048
Actual: rank 0, step 0, p0, the message from rank 0, index 154: off by 0.0105 over 24
    calls; one call's bound is 0.0105
Likely cause: nothing is fed back: each call loses the same again""",
    )


def test_calls_are_described() -> None:
    divided = f"{HALF}, divided(loss=8)"
    expecttest.assert_expected_inline(
        "\n".join(
            (
                text("18.3", divided, change=lambda values: values * 8),
                text("18.4", f"{HALF}, dimensions(2)", scenario=scenarios.FORMS),
                text("18.6", scenario=scenarios.FORMS, dtypes=["float32"]),
                text("18.7", replaced=[0, 1]),
                text("18.8", inputs_changed=[0]),
                text("18.10", scenario=scenarios.WAITED, waits=False, returned="NoneType"),
                text(
                    "18.10",
                    scenario=scenarios.WAITED,
                    refused="TypeError: no",
                    raised_in_wait=True,
                ),
                text("18.15", sent=[["allgather", 10**6]]),
                text("18.19", scenario=scenarios.WAITED, refused="TypeError: no"),
                text("18.23", scenario=VIEWS, changed_around=3),
            )
        ),
        """\
Expected: the sent values, divided by 8
Actual: the sent values, not divided
Likely cause: the factor is ignored
Expected: 0 elements
Actual: rank 0, step 0, p4, the message from rank 0: no tensor
Expected: an error: dimensions(2) is claimed
Actual: rank 0, step 0, p0, of shape (7,): there was none
Expected: tensors of float16
Actual: rank 0, step 0, p11: float32 in their place
Expected: tensors of bfloat16
Actual: rank 0, step 0, p12: float32 in their place
Expected: tensors of int32
Actual: rank 0, step 0, p13: float32 in their place
Expected: tensors of int64
Actual: rank 0, step 0, p14: float32 in their place
Expected: tensors of complex128
Actual: rank 0, step 0, p24: float32 in their place
Expected: tensors of complex64
Actual: rank 0, step 0, p23: float32 in their place
Expected: tensors of float64
Actual: rank 0, step 0, p10: float32 in their place
Expected: messages in the given tensors
Actual: rank 0, step 0, p0: outputs 0, 1 are other tensors; the given ones were not
    written
Likely cause: other tensors are put into the list
Expected: unchanged inputs
Actual: rank 0, step 0, p0: inputs 0 changed
Expected: an object with wait()
Actual: rank 0, step 0, p0: returned NoneType
Likely cause: async_op=True is ignored
Expected: a wait() that returns, or an error of the call itself
Actual: rank 0, step 0, p0: wait() raised TypeError: no
Likely cause: a wait() that raises
Expected: at most 286 bytes for each message, as collective(all_gather), rounded(float16)
    allows
Actual: rank 0, step 0, p0: 1000000 bytes for 15 elements
Likely cause: as many bytes as in float32: rounded values are sent in a wide dtype
Expected: an object with wait()
Actual: rank 0, step 0, p0: TypeError: no
Expected: elements around the outputs as they were
Actual: rank 0, step 0, p0: 3 elements of the buffer around the outputs have changed
Likely cause: more is written than the message has""",
    )


def test_answers_of_handles_are_described() -> None:
    wrong = ["result() gives other tensors than the outputs", "is_success() is false"]
    expecttest.assert_expected_inline(
        "\n".join(
            (
                text("18.10", scenario=scenarios.WAITED, untrue=wrong),
                text("18.10", scenario=scenarios.WAITED, late=True),
            )
        ),
        """\
Expected: 0 elements
Actual: rank 0, step 0, p3, the message from rank 0: no tensor
Expected: answers after wait() that fit a call which has ended well
Actual: rank 0, step 0, p0: result() gives other tensors than the outputs
Likely cause: the answer of the collective's own Work, or of an earlier moment
Expected: 0 elements
Actual: rank 0, step 0, p3, the message from rank 0: no tensor
Expected: is_completed() true after wait()
Actual: rank 0, step 0, p0: is_completed() is false after wait()""",
    )


def test_what_follows_nan_and_zeros_is_described() -> None:
    expecttest.assert_expected_inline(
        "\n".join(
            (
                text("18.22", scenario=RECOVERING, steps=9, change=lambda values: values / 0),
                text("18.22", scenario=RECOVERING, steps=9, change=torch.nan_to_num),
                text("18.22", BLOCKS, scenario=RECOVERING, steps=9, change=torch.zeros_like),
            )
        ),
        """\
Expected: 0 (exact: 0)
Actual: rank 0, step 0, p0, the message from rank 0, index 0: nan (896 of 896 elements
    differ)
Likely cause: nothing is written
Expected: nan (exact: nan)
Actual: rank 0, step 5, p0, the message from rank 0, index 738: 0 (1 of 896 elements
    differ)
Expected: -inf or -65504 (exact: -inf)
Actual: rank 0, step 7, p0, the message from rank 1, index 430: -1.79769313e+308 (1 of 896
    elements differ)
Expected: 1.37828988e-08 to 1.4054796e-08
Actual: rank 0, step 1, p0, the message from rank 0, index 0: 0 (893 of 896 elements)
Likely cause: tiny values are lost: a scale has a least value, or is sent in too few bits
Expected: NaN or an infinity, for nan
Actual: rank 0, step 5, p0, the message from rank 0, index 738: 0
Likely cause: a NaN or an infinity is lost
Expected: NaN or an infinity, for -inf
Actual: rank 0, step 7, p0, the message from rank 1, index 430: 0
Likely cause: a NaN or an infinity is lost
Expected: from 43.826769 to 44.173231 (exact: 44)
Actual: rank 0, step 2, p0, the message from rank 0, index 0: 0 (896 of 896 elements
    differ)
Likely cause: only zeros arrive: zeros are sent, the output is cleared, or the receive
    buffer is read before the message is there""",
    )


def other_zeros(values: torch.Tensor) -> torch.Tensor:
    """Give zeros the other sign."""
    return torch.where(values == 0, -values, values)


def test_forms_of_calls_and_signs_are_described() -> None:
    scatter = "collective(scatter), rounded(float16)"
    double = lambda values: values * 3.5  # noqa: E731
    finite = text("18.22", BLOCKS, scenario=RECOVERING, steps=9, change=lambda some: some / 0)
    expecttest.assert_expected_inline(
        "\n".join(
            (
                text("18.12", scenario=scenarios.CALLED, world=4, change=double, only=0),
                text("18.12", scenario=scenarios.CALLED, world=4, change=double, only=1),
                text("18.12", scatter, scenario=scenarios.CALLED, world=4, change=double, only=2),
                text("18.14", scenario=scenarios.SPECIAL, change=other_zeros),
                finite,
            )
        ),
        """\
Expected: -56 (exact: -56)
Actual: rank 0, step 0, p0, call form 'positional', the message from rank 0, index 0: -196
    (12 of 12 elements differ)
Likely cause: an argument is not seen if it is given by position
Expected: -1.5 (exact: -1.5)
Actual: rank 0, step 0, p1, call form 'keywords', the message from rank 0, index 0: -5.25
    (12 of 12 elements differ)
Likely cause: an argument is not seen if it is given by keyword
Expected: 24 (exact: 24)
Actual: rank 0, step 0, p2, call form 'group_src', the message from rank 0, index 0: 84
    (12 of 12 elements differ)
Likely cause: group_src is ignored
Expected: zeros with the signs that were sent
Actual: rank 0, step 0, p0, the message from rank 0: a zero with another sign, index 3
Expected: a finite number, for 0
Actual: rank 0, step 0, p0, the message from rank 0, index 0: nan (896 of 896 elements)
Likely cause: zeros are divided by their scale, which is 0""",
    )
