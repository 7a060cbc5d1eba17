"""The search for numbers in a subject's own code."""

import math
import textwrap

from conformance.judging.oracles.coverage import SourceFile, analyse
from conformance.judging.oracles.lossy import TRIALS
from conformance.records.source_marks import marks_of
from conformance.scenarios.profiles import GLOO_CPU
from conformance.session.coverage import Measured
from conformance.session.plan import Plan
from conformance.session.probes import MOST_NUMBERS, Probes
from conformance.subjects.claims import Claims, parse_claims
from conformance.subjects.spec import SubjectSpec


def measured(source: str) -> Measured:
    """Return the coverage of a source whose last function was entered, and took no branch."""
    text = textwrap.dedent(source).encode()
    marks = marks_of(text)
    decides = {arm.reached for arm in marks.arms if arm.reached is not None}
    ran = frozenset({marks.functions[-1].entry} | decides)
    return Measured(analyse([SourceFile("pkg.a", "/x/pkg/a.py", "", text, ran)]))


def probes(claims: Claims = Claims(), capacity: int | None = None, **named: str) -> Probes:  # noqa: B008
    subject = SubjectSpec(hook="pkg.a:hook", **named)
    return Probes(subject, claims, Plan("hook", claims, GLOO_CPU, (1, 2, 3, 4)), capacity)


LIMITS = """
    def hook(step, limit=None):
        if step > limit:
            return 1
    """


def names(found: Probes, source: str) -> list[str]:
    return [f"{one.scenario.name}@{one.world}" for one in found.next(measured(source))]


def test_an_argument_of_the_state_is_a_number() -> None:
    found = probes(state="pkg.a:State,limit=55")
    assert names(found, LIMITS) == ["probe_55_steps@2"]
    assert found.tried.numbers[0]["file"] == "pkg/a.py"


def test_a_number_is_tried_once() -> None:
    found = probes(state="pkg.a:State,limit=55")
    assert names(found, LIMITS)
    assert names(found, LIMITS) == []


def test_numbers_out_of_reach_are_listed() -> None:
    found = probes(state="pkg.a:State,limit=500000")
    assert names(found, LIMITS) == []
    assert [one["value"] for one in found.tried.out_of_reach] == [500_000]
    reason = found.reason(measured(LIMITS))
    assert reason == "no scenario reaches these numbers: 500000 (pkg/a.py:3)"


def test_no_more_than_some_numbers_are_tried() -> None:
    lines = "\n".join(f"    if step == {100 + i}:\n        return {i}" for i in range(12))
    found = probes()
    names(found, f"def hook(step):\n{lines}\n")
    assert len(found.tried.numbers) == MOST_NUMBERS
    assert len(found.tried.out_of_reach) == 12 - MOST_NUMBERS


def test_larger_worlds_than_there_are_ranks_for_are_left_out() -> None:
    source = """
        def hook(world):
            if world > 5:
                return 1
        """
    steps = "probe_5_steps@2"
    assert names(probes(), source) == [steps, "probe_5_ranks@5", "probe_5_ranks@6"]
    assert names(probes(capacity=5), source) == [steps, "probe_5_ranks@5"]


def test_lossy_probes_feed_random_gradients_and_then_faint_ones() -> None:
    source = """
        def hook(numel):
            if numel > 5_000:
                return 1
        """
    found = probes(parse_claims("compressed(delta=0.25)"))
    wanted, emptied = found.next(measured(source))
    assert wanted.scenario.steps == ("normal", "normal")
    assert emptied.scenario.steps[:2] == ("normal", "normal")
    assert set(emptied.scenario.steps[2:]) == {"faint"}
    assert len(emptied.scenario.steps) > math.sqrt(5_000)


def test_unbiased_probes_take_as_many_draws_as_the_number_of_steps() -> None:
    source = """
        def hook(step, bucket):
            if step == 500 or bucket.buffer().numel() == 90:
                return 1
        """
    claims = parse_claims("warmup(2), unbiased")
    steps = {one.scenario.name: one.scenario.steps for one in probes(claims).next(measured(source))}
    assert steps["probe_500_steps"][2:] == ("constant",) * 503
    assert steps["probe_90_elements"][2:] == ("constant",) * TRIALS


def test_only_results_that_are_judged_by_step_have_late_steps_of_large_parameters() -> None:
    source = """
        def hook(step, numel):
            if step > 500 and numel > 50_000:
                return 1
        """
    at_sizes = "probe_500_steps_at_sizes@2"
    assert at_sizes in names(probes(), source)
    assert at_sizes not in names(probes(parse_claims("compressed(delta=0.25)")), source)


def test_local_probes_go_on_until_ranks_meet_again() -> None:
    source = """
        def hook(step):
            if step > 500:
                return 1
        """
    for claims, count in (
        ("local", 503 + 201),
        ("local(period=8)", 503 + 9),
        ("local(mixing=False)", 503),
    ):
        wanted = probes(parse_claims(claims)).next(measured(source))
        (steps,) = [one.scenario for one in wanted if one.scenario.name == "probe_500_steps"]
        assert len(steps.steps) == count


def test_the_reason_without_numbers() -> None:
    source = """
        def hook(flag):
            if flag:
                return 1
        """
    found = probes()
    assert names(found, source) == []
    assert (
        found.reason(measured(source))
        == "none of the branches that were never taken compares with a number"
    )
    assert found.reason(Measured(None, "no source")) == "coverage was not measured: no source"
