"""The reasons for which a rule does not apply, has no evidence, or adds a note."""

from collections.abc import Callable

import expecttest
import pytest

from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.rules import book
from conformance.scenarios.averager_training import RESUMED_EARLY
from conformance.subjects.claims import Claims, parse_claims
from tests.judging.oracles import test_join as joins
from tests.made_runs import event, made_run, refused
from tests.rules.test_messages_of_averagers import LIKE, PERIODIC, averaged, beside
from tests.rules.test_messages_of_collectives import HALF, called
from tests.rules.test_messages_of_optimizers import stepped
from tests.rules.test_messages_of_strategies import synchronised

FUSED = "fused(SGD, lr=0.1)"
SCATTER = "collective(scatter), rounded(float16)"

RUNS: dict[str, Callable[[], Run]] = {
    "hook": made_run,
    "averager": averaged,
    "optimizer": stepped,
    "strategy": synchronised,
    "collective": called,
    "joinable": joins.run,
}


def reasons(number: str, run: Run, claims: str) -> list[str]:
    """Return the reasons of a rule, and its notes."""
    rule = book()[number]
    found = Found()
    parsed = parse_claims(claims, rule.kind) if claims else Claims(kind=rule.kind)
    rule.check({run.name: run} if rule.reads_all_runs else run, parsed, found)
    texts = [found.not_applicable, found.without_evidence, *found.notes]
    return [text for text in texts if text is not None]


@pytest.mark.parametrize(
    ("number", "claims", "reason"),
    [
        (
            "2.1",
            "compressed",
            "replaced by rules 13.1 to 13.5, because the subject claims compressed",
        ),
        (
            "2.3",
            "local",
            "small values beside large ones may be lost, because the subject claims local",
        ),
        (
            "2.3",
            FUSED,
            "gradients of this range would overflow the parameters that a fused hook steps",
        ),
        (
            "2.13",
            "unbiased",
            "values at the ends of a range may be lost, because the subject claims unbiased",
        ),
        ("3.1", "local", "replicas drift apart under local: 13.5 bounds it, and 2.10 requires it"),
        ("3.2", "local", "replicas drift apart under local until their parameters are averaged"),
        ("6.1", FUSED, "the hook steps the parameters, which 13.6 judges"),
        ("6.1", "sum", "the trainer divides the sums of the hook"),
        (
            "6.1",
            "scaled",
            "gradients that are not exact give other parameters; 2.1 and 2.2 judge them",
        ),
        (
            "6.2",
            "local",
            "a rank need not learn of an overflow on another: use no loss scale, or agree on one",
        ),
        ("6.2", FUSED, "the hook has stepped before a scaler can skip the step"),
        ("8.5", "local", "small values may be lost, because the subject claims local"),
        ("8.6", "local", "zeros may come out of a residual, because the subject claims local"),
        (
            "9.2",
            FUSED,
            "a fused hook steps the parameters: 13.6 judges them, also before step 0",
        ),
        (
            "10.1",
            "",
            "the kit saw no collective in values@2: the hook communicates past torch's process "
            "groups, or over a backend whose calls cannot be recorded",
        ),
        ("10.1", "local", "no rank issues a collective in these steps"),
        (
            "11.5",
            "",
            "with find_unused_parameters a part of the residual is lost in a step in which no rank "
            "uses the parameter: keeps_unused is not claimed",
        ),
        (
            "11.6",
            "",
            "under GradScaler its state stays in units of the old loss scale: "
            "rescaled(call=NAME) is not claimed",
        ),
        (
            "12.4",
            "",
            "ranks do not start the same collectives in two steps, so that the last one is not "
            "known",
        ),
        ("13.1", "", "it is not claimed"),
        ("13.14", "", "it takes two world sizes above 1"),
        ("20.1", "", "it cannot be simulated: no ranks were simulated"),
        (
            "20.1",
            "local",
            "no single step is right or wrong, because the subject claims local",
        ),
        ("22.3", "local", "replicas drift apart under local"),
        ("22.4", "local", "local results are judged by 22.1"),
        ("23.2", "local", "replicas differ, because the subject claims local"),
        ("24.3", "local", "replicas drift apart under local: 13.5 bounds it"),
        (
            "24.7",
            "unbiased",
            "an expectation shows over more steps than large buckets are worth",
        ),
        (
            "14.1",
            "",
            "none of its 30 steps averages: certify a shorter period or warm-up",
        ),
        ("14.23", "", "the run is too short for growth to show"),
        ("15.2", "", "it takes no averager"),
        ("15.10", "world_only", "it claims world_only, and was run on WORLD"),
        ("15.15", "", "it has no consolidate_state_dict()"),
        (
            "15.21",
            "",
            "it was given equal gradients on all ranks, and averages none: the certificate covers "
            "its use with gradients that DDP, or another subject, has averaged",
        ),
        ("15.27", "", "the target is one existing object, which cannot be made twice"),
        ("15.28", "world_only", "it claims world_only"),
        ("16.3", "all_used", "the subject claims all_used; 16.16 judges that claim"),
        (
            "16.18",
            "",
            "four micro-batches: 1.00 times the bytes of its gradients, in 1 collectives",
        ),
        ("16.22", "all_used", "under all_used every rank has a backward"),
        ("17.1", "", "judged as a join context"),
        ("17.2", "", "it is a join context: this rule applies to joinables"),
        ("17.17", "", "no rank shadows another"),
        (
            "17.26",
            "",
            "after even inputs it leaves no gradients that are means or sums, and no state that "
            "ranks replicate",
        ),
        ("18.13", HALF, "all_gather has no split sizes"),
    ],
)
def test_the_reason_is_given(number: str, claims: str, reason: str) -> None:
    assert reason in reasons(number, RUNS[book()[number].kind](), claims)


def test_reasons_that_take_another_run() -> None:
    like = f"{LIKE}, world_only"
    joinable = joins.run(is_context=False)
    given = [
        *reasons("14.3", averaged(world=1), ""),
        *reasons("14.6", beside(averaged(), averaged()), like),
        *reasons("15.4", stepped(world=1), ""),
        *reasons("16.6", synchronised(world=1), ""),
        *reasons("17.1", joinable, ""),
        *reasons("17.4", joinable, ""),
        *reasons("17.18", joinable, ""),
        *reasons("17.19", joinable, ""),
        *reasons("18.20", called(claims=SCATTER), SCATTER),
    ]
    expecttest.assert_expected_inline(
        "\n".join(given),
        """\
there is one rank
it claims world_only, and the reference averages over its own group
there is one rank
there is one rank
judged as a joinable, in torch's context
it is a joinable: this rule applies to contexts
the kit finds no parameters in its attributes, or in objects that these hold
it has no parameters, buffers or state_dict() that ranks replicate after even inputs
scatter gives each rank other messages, or 18.34 judges it""",
    )


def test_the_state_of_rank_0_is_refused_by_all_other_ranks_or_by_none() -> None:
    run = averaged(scenario=RESUMED_EARLY, world=3)
    run.ranks[1].events.append(event("refuses_first", 0, error="ValueError: of rank 0"))
    text = refused("14.19", run, PERIODIC)
    assert "Expected: the state of rank 0 is loaded on all ranks, or refused on all others" in text
    assert "Actual: of 3 ranks, 1 refused it; rank 1: ValueError: of rank 0" in text
    run.ranks[2].events.append(event("refuses_first", 0, error="ValueError: of rank 0"))
    assert refused("14.19", run, PERIODIC) == ""
    noted = reasons("14.19", run, PERIODIC)
    assert (
        "other ranks refuse the state of rank 0, and load their own: ValueError: of rank 0" in noted
    )
