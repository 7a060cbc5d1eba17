"""Parameters that rest in long runs."""

from conformance.scenarios.long_runs import ENDURANCE
from conformance.session.adaptations import adapt_scenario
from conformance.subjects.claims import parse_claims


def test_one_parameter_rests_at_first_and_another_one_later() -> None:
    lengths = []
    for seed in range(20):
        steps = adapt_scenario(ENDURANCE, parse_claims("exact"), seed=seed).steps
        first, later = dict.fromkeys(kind for kind in steps if kind.startswith("resting"))
        count = steps.count(first)
        assert 2 <= count <= 300
        assert set(steps[:count]) == {first}
        assert 150 <= steps.count(later) <= 350
        assert steps.index(later) >= max(150, count)
        lengths.append(count)
    assert min(lengths) < 20
    assert max(lengths) > 60


def test_no_parameter_rests_at_first_if_the_hook_steps_them() -> None:
    steps = adapt_scenario(ENDURANCE, parse_claims("fused(SGD, lr=0.1)"), seed=3).steps
    assert not steps[0].startswith("resting")
