"""Fixtures: one pool of ranks for the whole test run, and engines that judge on it."""

from collections.abc import Callable, Iterator

import pytest

from conformance.claims import Claims, parse_claims
from conformance.engine import Engine
from conformance.local import LocalSource
from conformance.pool import Pool
from conformance.rulebook import Rule, book
from conformance.subject import REFERENCE, SubjectSpec, parse_subject

DEADLINE = 10.0


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """A pool that all tests of this run share."""
    with Pool(DEADLINE) as pool:
        yield pool


@pytest.fixture(scope="session")
def rules() -> dict[str, Rule]:
    """The rule book."""
    return book()


@pytest.fixture(scope="session")
def engine_for(pool: Pool, rules: dict[str, Rule]) -> Callable[..., Engine]:
    """A function that returns the engine for a subject; engines of the same world sizes share their control."""
    source = LocalSource(pool)
    controls: dict[tuple[int, ...], Engine] = {}

    def make(
        target: str, *, claims: str = "exact", state: str | None = None, setup: bool = False, worlds: tuple[int, ...] = (1, 2, 3, 4)
    ) -> Engine:
        spec: SubjectSpec = parse_subject(None if setup else target, state, target if setup else None)
        control = controls.setdefault(worlds, Engine(source, rules, REFERENCE, Claims(), worlds))
        return Engine(source, rules, spec, parse_claims(claims), worlds, control)

    return make
