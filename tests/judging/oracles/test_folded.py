"""Folded results and moments are judged as the results themselves would be."""

from dataclasses import replace

import expecttest
import pytest
import torch

from conformance.judging.oracles import folded, vast
from conformance.judging.verdict import Found
from conformance.ranks.instruments.folding import fold
from conformance.ranks.instruments.moments import Moments
from conformance.records.rank_record import RankRecord
from conformance.records.run import Run, fed
from conformance.scenarios.model import Param, Scenario
from conformance.subjects.claims import parse_claims
from tests.made_runs import read_failures

PARAMS = (Param((40,)), Param((7, 50)), Param((3,)))
SCENARIO = Scenario(
    "made", "", PARAMS, ("crafted", "normal", "crafted"), period=101, folded="model"
)
NAMES = [f"p{index}" for index in range(len(PARAMS))]


def of(run, rank, step, index):
    spec = run.scenario.params[index]
    kind = run.scenario.steps[step]
    return fed(kind, spec, run.world, rank, step, index, run.scenario.period)


def mean(run, rank, step, index):
    values = torch.stack([of(run, other, step, index) for other in range(run.world)])
    return values.float().sum(0) / run.world


def made(result=mean, scenario=SCENARIO, world=2):
    """Return a run whose results are ``result(run, rank, step, index)``, folded."""
    run = Run(scenario, world, [RankRecord(rank, exit=0) for rank in range(world)])
    for record in run.ranks:
        moments = Moments(scenario)
        for step in range(len(scenario.steps)):
            same = {"step": step, "time": 0.0}
            call = {"event": "call", "call": step, "index": 0, "numel": 393, "parameters": NAMES}
            record.events += [{"event": "folded", "missing": [], **same}, {**call, **same}]
            flats = {i: result(run, record.rank, step, i) for i in range(len(PARAMS))}
            if scenario.folded == "moments":
                parts = moments.of(flats, world, step)
                prefix = f"{step}/moments"
            else:
                parts = fold(flats, scenario.period)
                name = "bucket0" if scenario.folded == "bucket" else "grad"
                prefix = f"{step}/fold/{name}"
            record.tensors |= {f"{prefix}/{part}": values for part, values in parts.items()}
    return run


def judged(run, claims="exact"):
    found = Found()
    folded.require_right(run, parse_claims(claims), found, run.steps("crafted", "normal"))
    return found.failures


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_mean_is_right(world):
    assert judged(made(world=world)) == []


def test_a_sum_needs_its_claim():
    run = made(lambda *place: mean(*place) * 2)
    assert "world_size times the mean" in judged(run)[0].cause
    assert judged(run, "sum") == []


def test_a_rounded_mean_needs_its_claim():
    run = made(lambda *place: mean(*place).bfloat16().float())
    (failure,) = judged(run)
    assert "step 1" in failure.actual
    assert "rounded to bfloat16" in failure.cause
    assert judged(run, "rounded(bfloat16)") == []


@pytest.mark.parametrize(("index", "element"), [(0, 39), (1, 0), (1, 349), (2, 1)])
@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf")])
def test_one_wrong_element_is_found_at_its_place(index, element, wrong):
    def result(run, rank, step, which):
        right = mean(run, rank, step, which)
        if (rank, step, which) == (1, 2, index):
            right[element] = wrong
        return right

    (failure,) = judged(made(result))
    assert f"rank 1, step 2, bucket 0 of 393 elements, parameter p{index}" in failure.actual
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(element), PARAMS[index].shape))
    assert f"index {at}" in failure.actual


def test_own_gradients_are_named():
    run = made(lambda run, rank, step, index: of(run, rank, step, index).float())
    assert "nothing was communicated" in judged(run)[0].cause


def test_a_missing_gradient_is_refused():
    run = made()
    run.ranks[0].events[0]["missing"] = ["p1"]
    assert "p1" in judged(run)[0].actual


def weights(claims, result, scenario=SCENARIO):
    run = made(result, replace(scenario, folded="bucket"))
    found = Found()
    folded.require_weights(run, parse_claims(claims), found, [0, 1, 2])
    return found.failures


def mixed(share, shift=0.0):
    def result(run, rank, step, index):
        own = of(run, rank, step, index).float()
        value = own * share + of(run, 1 - rank, step, index).float() * (1 - share)
        if index == 1:
            value[200:] += own[200:] * shift
        return value

    return result


def test_weighted_means_are_right():
    assert weights("local", mixed(0.75)) == []


def test_weights_differ_within_a_bucket():
    assert "do not fit" in weights("local", mixed(0.75, 0.01))[0].actual


def test_the_warm_up_is_the_mean():
    assert weights("local, warmup(3)", mixed(0.5)) == []
    assert weights("local, warmup(3)", mixed(0.75))[0].expected == "the mean in the warm-up"


def optimized(lr):
    run = made()
    for record in run.ranks:
        parameters = [torch.zeros(torch.Size(spec.shape).numel()) for spec in PARAMS]
        for step in range(3):
            for index, parameter in enumerate(parameters):
                parameter -= lr * mean(run, record.rank, step, index)
            for part, values in fold(dict(enumerate(parameters)), 101).items():
                record.tensors[f"{step}/fold/parameter/{part}"] = values
    found = Found()
    folded.require_optimizer(run, parse_claims("fused(SGD, lr=0.1)"), found)
    return found.failures


def test_an_optimizer_is_followed():
    assert optimized(0.1) == []
    assert "instead of" in optimized(0.2)[0].actual
    assert "not stepped" in optimized(0.0)[0].cause


FEEDBACK = "compressed(delta=0.25)"
VAST = replace(SCENARIO, steps=("heavy_first", "zero_all"), folded="moments")


def contracted(claims, result, scenario=VAST):
    found = Found()
    vast.require_contracted(made(result, scenario), parse_claims(claims), found)
    return found.failures


def test_moments_hold_compression_to_its_delta():
    assert contracted(FEEDBACK, mean) == []
    assert contracted(FEEDBACK, lambda *place: mean(*place) * 0.3) == []
    for factor in (0.0, 2.0, 15.0):
        (failure,) = contracted(FEEDBACK, lambda *place, f=factor: mean(*place) * f)
        assert f"{factor:.3g} times the mean" in failure.cause


@pytest.mark.parametrize("kind", ["heavy_first", "heavy_last"])
def test_moments_show_own_gradients(kind):
    scenario = replace(VAST, steps=(kind, "zero_all"))
    assert contracted(FEEDBACK, lambda *place: of(*place).float(), scenario) != []


def test_moments_show_a_value_that_is_not_finite():
    (failure,) = contracted(FEEDBACK, lambda *place: mean(*place) / 0)
    assert "some are not" in failure.actual


def test_each_step_without_feedback_keeps_the_bound():
    scenario = replace(VAST, steps=("heavy_last",) * 2)
    claims = "compressed(feedback=False, delta=0.99)"
    assert contracted(claims, lambda *place: mean(*place) * 1.05, scenario) == []
    assert contracted(claims, lambda *place: mean(*place) * 1.2, scenario) != []


def test_the_messages_on_folded_results():
    own = lambda run, rank, step, index: of(run, rank, step, index).float()  # noqa: E731
    missing = made()
    missing.ranks[0].events[0]["missing"] = ["p1"]
    signs = made(lambda *place: -mean(*place))
    failures = [
        *judged(missing)[:1],
        *judged(made(own))[:1],
        *judged(made(lambda *place: mean(*place) * 1.5))[:1],
        *judged(signs)[:1],
        *judged(made(lambda *place: mean(*place) + 1))[:1],
        *weights("local", lambda run, rank, step, index: own(run, 0, step, index))[:1],
        *weights("local", mixed(0.75, 0.01))[:1],
        *weights("local", mixed(1.5))[:1],
        *weights("local, warmup(3)", mixed(0.75))[:1],
        *optimized(0.2)[:1],
        *optimized(0.0)[:1],
    ]
    expecttest.assert_expected_inline(
        read_failures(failures),
        """\
Expected: a gradient of every parameter
Actual: rank 0, step 0: 1 parameters have none: p1
Expected: mean -1.75, bit for bit (both values are shown without the sign that this
    element has in the model)
Actual: -3 on rank 0, step 0, bucket 0 of 393 elements, parameter p0 of 40, index (14,);
    wrong for 94 of the 101 gradient values that the model repeats
Likely cause: equal to this rank's own gradient: nothing was communicated; every element
    of the model is wrong in the same way
Expected: mean -1.75, bit for bit (both values are shown without the sign that this
    element has in the model)
Actual: -2.625 on rank 0, step 0, bucket 0 of 393 elements, parameter p0 of 40, index
    (14,); wrong for 93 of the 101 gradient values that the model repeats
Likely cause: 1.5 times the mean: scaled by a wrong factor; every element of the model is
    wrong in the same way
Expected: mean -1.75, bit for bit (both values are shown without the sign that this
    element has in the model)
Actual: 1.75 on rank 0, step 0, bucket 0 of 393 elements, parameter p0 of 40, index (14,);
    wrong for 93 of the 101 gradient values that the model repeats
Likely cause: -1 times the mean: scaled by a wrong factor; every element of the model is
    wrong in the same way
Expected: mean -1.75, bit for bit (both values are shown without the sign that this
    element has in the model)
Actual: -2.75 on rank 0, step 0, bucket 0 of 393 elements, parameter p1 of 350, index (5,
    46); wrong for 101 of the 101 gradient values that the model repeats
Likely cause: wrong in 1 of 1 buckets, the smallest of them: bucket 0 (393 elements in 3
    tensors)
Expected: weights of at least 0 that sum to 1, this rank's own among them
Actual: rank 1, step 0, bucket 0 of 393 elements: 1 of rank 0, 0 of rank 1
Expected: the same weights of the ranks' gradients for all elements of a bucket
Actual: rank 0, step 0, bucket 0 of 393 elements: for 101 of the 101 gradient values that
    it repeats, elements do not fit the weights that fit best, 0.755 of rank 0, 0.251 of
    rank 1
Expected: weights of at least 0 that sum to 1, this rank's own among them
Actual: rank 0, step 0, bucket 0 of 393 elements: 1.5 of rank 0, -0.5 of rank 1
Expected: the mean in the warm-up
Actual: rank 0, step 0, bucket 0: weights 0.75, 0.25
Expected: as SGD(lr=0.1) leaves it
Actual: rank 0, step 0, bucket 0 of 393 elements, parameter p0 of 40, index (14,):
    0.349999994 instead of 0.174999997
Expected: as SGD(lr=0.1) leaves it
Actual: rank 0, step 0, bucket 0 of 393 elements, parameter p0 of 40, index (14,): -0
    instead of 0.174999997
Likely cause: it was not stepped at all""",
    )


def test_the_messages_on_moments():
    own = lambda run, rank, step, index: of(run, rank, step, index).float()  # noqa: E731
    without = made(mean, VAST)
    for rank in without.ranks:
        for event in rank.all("folded"):
            event["missing"] = ["p1"]
    found = Found()
    vast.require_contracted(without, parse_claims(FEEDBACK), found)
    every = replace(VAST, steps=("heavy_last",) * 2)
    failures = [
        *found.failures[:1],
        *contracted(FEEDBACK, own)[:1],
        *contracted(FEEDBACK, lambda *place: mean(*place) * 2)[:1],
        *contracted(FEEDBACK, lambda *place: mean(*place) / 0)[:1],
        *contracted(
            "compressed(feedback=False, delta=0.99)", lambda *place: mean(*place) * 1.2, every
        )[:1],
    ]
    expecttest.assert_expected_inline(
        read_failures(failures),
        """\
Expected: a gradient
Actual: rank 0, step 1: none of p1
Expected: the sum of all results within 0.75 of the gradients from the mean
Actual: rank 0, step 1: 0.939 of the gradients away, in parameter p1 of [7, 50]
Likely cause: in that parameter it is 1.94 times the mean, along the mean
Expected: the sum of all results within 0.75 of the gradients from the mean
Actual: rank 0, step 1: 1 of the gradients away, in parameter p1 of [7, 50]
Likely cause: in that parameter it is 2 times the mean, along the mean
Expected: finite values for finite gradients
Actual: rank 0, step 1: some are not
Expected: the result within 0.1 of the gradients from the mean
Actual: rank 0, step 0: 0.2 of the gradients away, in parameter p1 of [7, 50]
Likely cause: in that parameter it is 1.2 times the mean, along the mean""",
    )
