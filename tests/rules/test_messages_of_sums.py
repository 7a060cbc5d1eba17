"""The messages of rules for quantized collectives that sum, on runs written by hand."""

import expecttest
import torch

from conformance.scenarios import collective as scenarios
from conformance.scenarios.collective_conditions import MIXED_CALLS
from conformance.scenarios.collective_training import DTYPES, LARGE, OPERATED, UNEVEN, VIEWS
from tests.made_runs import event
from tests.rules.test_messages_of_collectives import called, text
from tests.rules.test_more_reasons import reasons

SUM = "collective(all_reduce), rounded(float16)"
PARTS = "collective(reduce_scatter), blocks(int8, size=128)"


def test_right_sums_are_not_refused() -> None:
    for claims in (SUM, PARTS, SUM.replace("all_reduce", "reduce_scatter_tensor")):
        for number in ("18.1", "18.2"):
            assert text(number, claims) == ""
    assert text("18.14", SUM, scenario=scenarios.SPECIAL) == ""


def test_wrong_sums_are_described() -> None:
    expecttest.assert_expected_inline(
        "\n".join(
            (
                text("18.1", SUM, change=lambda values: values / 2),
                text("18.2", PARTS, change=lambda values: values + 100),
                text("18.14", SUM, scenario=scenarios.SPECIAL, change=torch.nan_to_num),
                text("18.33", SUM, scenario=scenarios.CALLED, only=2, change=lambda v: v * 4),
                text("18.33", SUM, scenario=scenarios.CALLED, only=3, change=lambda v: v - 9),
                text("18.11", SUM, scenario=scenarios.SUBGROUPS, change=lambda v: v - 9, world=4),
            )
        ),
        """\
Expected: from -32.0781251 to -31.9218749 (exact: -32)
Actual: rank 0, step 0, p0, the reduced output, index 0: -16.0390625 (14 of 15 elements
    differ)
Likely cause: it is divided by the number of ranks
Expected: from -0.946726027 to -0.918258843 (exact: -0.932492435)
Actual: rank 0, step 1, p0, the reduced output, index 0: 99.053274 (15 of 15 elements
    differ)
Expected: nan (exact: nan)
Actual: rank 0, step 0, p0, the reduced output, index 0: 0 (3 of 30 elements differ)
Likely cause: NaN is lost
Expected: from 25.9746093 to 26.0253907 (exact: 26)
Actual: rank 0, step 0, p2, call form 'average', the reduced output, index 0: 103.898437
    (12 of 12 elements differ)
Likely cause: not the result of op=AVG: another operation, group or divisor, a lost sign,
    or a coarser rounding
Expected: an error: numbers of floating point have no bits to combine
Actual: rank 0, step 0, p6, call form 'bits_and': there was none
Expected: 1080577, or an error
Actual: rank 0, step 0, p9, call form 'maximum_of_integers', the reduced output, index 0:
    63424.748 (12 of 12 elements differ)
Likely cause: not the result of op=MAX: another operation, group or divisor, a lost sign,
    or a coarser rounding
Expected: from 3.98828119 to 4.01171881 (exact: 4)
Actual: rank 0, step 0, p3, call form 'maximum', the reduced output, index 0: -5.01171881
    (12 of 12 elements differ)
Likely cause: not the result of op=MAX: another operation, group or divisor, a lost sign,
    or a coarser rounding
Expected: an error: numbers of floating point have no bits to combine
Actual: rank 0, step 0, p6, call form 'bits_and': there was none
Expected: 1080577, or an error
Actual: rank 0, step 0, p9, call form 'maximum_of_integers', the reduced output, index 0:
    63424.748 (12 of 12 elements differ)
Likely cause: not the result of op=MAX: another operation, group or divisor, a lost sign,
    or a coarser rounding
Expected: from 1.24829096 to 1.25170904 (exact: 1.25)
Actual: rank 0, step 0, p0, the reduced output, index 0: -7.75170904 (15 of 15 elements
    differ)
Likely cause: the group is ignored""",
    )


def test_reasons_name_the_collective() -> None:
    gathers = called(scenarios.CALLED)
    claims = "collective(all_gather), rounded(float16)"
    assert "all_gather has no argument op" in reasons("18.33", gathers, claims)
    assert "all_gather has no stack of messages" in reasons("18.38", gathers, claims)
    assert "all_gather is no all_reduce" in reasons("18.34", called(), claims)
    scatter = "collective(scatter), rounded(float16)"
    scattered = called(claims=scatter)
    assert "torch's scatter takes tensors of one size" in reasons("18.24", scattered, scatter)


def test_reasons_name_refused_uneven_calls() -> None:
    claims = "collective(all_to_all), rounded(float16)"
    for refused, is_noted in (("", True), ("ValueError: even sizes alone", False)):
        uneven = called(UNEVEN, claims, refused=refused)
        uneven.ranks[0].events += [
            event("refuses_waiting", 0, index=index, error="even sizes alone") for index in (0, 1)
        ]
        noted = reasons("18.24", uneven, claims)
        if is_noted:
            assert "async_op=True is refused for uneven sizes: even sizes alone" in noted
        else:
            assert "is refused for uneven sizes" not in noted


def test_reasons_name_refused_large_calls() -> None:
    claims = "collective(all_gather), rounded(float16)"
    large = called(LARGE, claims, steps=1)
    large.ranks[0].events.append(event("refuses_waiting", 0, index=0, error="small ones alone"))
    noted = reasons("18.21", large, claims)
    assert "async_op=True is refused for large messages: small ones alone" in noted
    params = large.scenario.params
    index = next(at for at, spec in enumerate(params) if not spec.is_contiguous)
    large.ranks[0].events.append(event("refuses_calls", 0, index=index, error="no strides"))
    layout = params[index].layout
    noted = reasons("18.21", large, claims)
    assert f"large messages in the layout {layout} are refused: no strides" in noted


def test_reasons_name_refused_calls_on_parts_of_buffers() -> None:
    claims = "collective(all_gather), rounded(float16)"
    parts = called(VIEWS, claims, steps=1)
    parts.ranks[0].events.append(event("refuses_waiting", 0, index=0, error="whole ones alone"))
    noted = reasons("18.23", parts, claims)
    assert "async_op=True is refused for parts of larger buffers: whole ones alone" in noted


def test_reasons_name_refused_calls() -> None:
    of_dtypes = called(DTYPES, SUM, refused="TypeError: float32 alone")
    assert "it refuses messages of other dtypes than float32" in reasons("18.34", of_dtypes, SUM)
    operated = called(OPERATED, SUM, refused="ValueError: SUM alone")
    assert "it refuses other operations than a sum" in reasons("18.34", operated, SUM)
    claims = "collective(all_gather), rounded(float16)"
    mixed = called(MIXED_CALLS, SUM)
    mixed.ranks[0].events.append(event("refuses_calls", 0, index=1, error="no AVG"))
    mixed.ranks[0].events += [
        event("refuses_waiting", 0, index=index, error="not yet") for index in (0, 1)
    ]
    noted = reasons("18.37", mixed, SUM)
    assert "averages of contiguous matrices are refused: no AVG" in noted
    kinds = "sums of contiguous matrices, averages of contiguous matrices"
    assert f"async_op=True is refused for {kinds}: not yet" in noted
    mixed.ranks[0].events.append(event("refuses_others", 0, error="busy"))
    noted = reasons("18.37", mixed, SUM)
    assert "a call is refused while another one is under way: busy" in noted
    asynchronous = called(scenarios.WAITED, claims, refused="TypeError: no async_op")
    assert "it refuses these calls" in reasons("18.15", asynchronous, claims)
