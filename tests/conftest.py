"""Fixtures: one pool of ranks for the whole test run, and judgements made ahead of the tests that need them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from conformance.hosts.pool import Pool
from conformance.judging.rule import Rule
from conformance.rules import book
from tests.cases import Case, Judgements, judges


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="judge every mutant by the whole book, not only by the rules that it breaks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is judged ahead is asked for last: other tests run while it is judged."""
    items.sort(key=lambda item: "case" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """A pool that all tests of this run share."""
    with Pool(30.0) as pool:
        yield pool


@pytest.fixture(scope="session")
def impatient() -> Iterator[Pool]:
    """One for what is expected to hang."""
    with Pool(5.0, lanes=1) as pool:
        yield pool


@pytest.fixture(scope="session")
def rules() -> dict[str, Rule]:
    """The rule book."""
    return book()


@pytest.fixture(scope="session", autouse=True)
def judgements_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Judgements]]:
    """A function that returns the judgements on a case; every selected test's ``case`` is judged once.

    In use from the first test on, whichever that is: the judging goes on while others run.
    """
    cases = [item.callspec.params["case"] for item in request.session.items if "case" in getattr(item, "fixturenames", ())]
    whole = {case: replace(case, rules=()) if request.config.getoption("--thorough") else case for case in cases}
    with judges() as judged:
        futures = {case: judged(case) for case in dict.fromkeys(whole.values())}
        yield lambda case: futures[whole[case]].result()
