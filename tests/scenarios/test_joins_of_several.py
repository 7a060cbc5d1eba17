"""The contexts of ``joinable_numbers`` with several joinables."""

from dataclasses import replace

from conformance.scenarios.join_draws import ROWS_OF_ONE, divides_by_all, several_joinables
from conformance.scenarios.joinable import lengths
from conformance.scenarios.joins_in_training import NUMBERS


def test_joinables_of_one_context_have_its_inputs() -> None:
    counts = set()
    orders = set()
    for seed in range(40):
        scenario = replace(NUMBERS, session_seed=seed)
        contexts = several_joinables(scenario)
        rows = [row for context in contexts for row in sorted(context)]
        assert rows == list(range(ROWS_OF_ONE, ROWS_OF_ONE + len(rows)))
        for size in (2, 3):
            inputs = lengths(scenario, tuple(range(size)))
            assert len(inputs) == ROWS_OF_ONE + len(rows)
            for context in contexts:
                assert len({inputs[row] for row in context}) == 1
                assert len(set(inputs[context[0]])) > 1
        assert all(divides_by_all(scenario, row) for row in rows)
        counts |= {len(context) for context in contexts}
        orders |= {list(context) == sorted(context) for context in contexts}
    assert counts == {2, 3}
    assert orders == {False, True}
