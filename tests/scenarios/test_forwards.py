"""Steps of a long run with several forwards."""

from conformance.scenarios.feed import feed_of
from conformance.scenarios.forwards import FORWARDS_AT_LAST, STRETCH, forwards_of
from conformance.scenarios.long_runs import ENDURANCE
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims


def test_a_long_run_has_four_stretches_of_steps_with_several_forwards() -> None:
    kinds = set()
    for seed in range(20):
        scenario = adapt_scenario(ENDURANCE, parse_claims("exact"), seed=seed)
        more = forwards_of(scenario)
        steps = feed_of(scenario).steps
        assert more[steps - 1].more == FORWARDS_AT_LAST - 1
        single = {step for step, one in more.items() if one.rank is not None}
        assert 1 <= len(single) <= 6
        assert all(more[step].is_given_up for step in single)
        assert min(single) < steps // 2
        first_stretches = [step for step in more if step < steps * 3 // 4 and step not in single]
        assert 3 * STRETCH[0] <= len(first_stretches) <= 3 * STRETCH[1]
        assert {more[step].more for step in first_stretches} <= {0, 1, 2, 3}
        checkpoints = {more[step].checkpoints for step in first_stretches}
        assert len(checkpoints) == 2
        assert checkpoints < {0, 2, 3, 4}
        assert all(one.is_given_up or not (one.more and one.checkpoints) for one in more.values())
        kinds.add(more[steps - 1].is_given_up)
    assert kinds == {True, False}


def test_no_warm_up_has_further_forwards() -> None:
    claims = parse_claims("compressed(delta=0.25), warmup(300)")
    scenario = adapt_scenario(ENDURANCE, claims, seed=3)
    assert min(forwards_of(scenario)) >= 300
