"""Fixtures: one pool of ranks for the whole test run, and judgements and the results of CI's
commands, both made ahead of the tests that need them.
"""

import gc
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.judging.rule import Rule
from conformance.rules import book
from tests.cases import PATIENT, Case, Judge, Judgements, judges
from tests.gpg_keys import Signer, made_signer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help=("judge every mutant by the whole book, not only by the rules that it breaks"),
    )

    parser.addoption(
        "--every",
        action="store_true",
        help="judge every subject, and none by fewer rules for the sake of time",
    )


def pytest_configure() -> None:
    # The other cores belong to the ranks and to the processes that judge cases.
    torch.set_num_threads(1)


# Fixtures that start ranks, here and in single modules. Tests that start processes by other means
# have the marker in their own file.
STARTS_RANKS = {"pool", "impatient", "judgements_of", "host", "ran", "torchrun", "signer"}


def deselect(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    """Take the tests with this marker from ``items``."""
    config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker(marker)])
    items[:] = [item for item in items if not item.get_closest_marker(marker)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start ranks, and move tests of a ``case`` to the end, behind those that
    run while cases are judged.
    """
    for item in items:
        # Before pytest itself deselects by -m.
        if STARTS_RANKS & set(fixtures(item)):
            item.add_marker("ranks")
    if "drop_in" not in config.getoption("markexpr"):
        deselect(config, items, "drop_in")
    if not (config.getoption("--thorough") or config.getoption("--every")):
        deselect(config, items, "rarely")
    items.sort(key=lambda item: "case" in fixtures(item))


@pytest.fixture(scope="session")
def signer() -> Iterator[Signer]:
    """A key of GnuPG that the tests trust."""
    if not shutil.which("gpg"):
        pytest.skip("gpg is not installed")
    with made_signer("Kit") as made:
        yield made


def pytest_collection_finish() -> None:
    """Take what has been imported and collected out of the garbage collector's sight."""
    gc.freeze()


def fixtures(item: pytest.Item) -> list[str]:
    """Return the names of the fixtures and parameters of a test; a doctest has none."""
    return getattr(item, "fixturenames", [])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    # Draws of a test depend neither on chance nor on the tests that ran before it. For each kind of
    # device torch.manual_seed() would format the stack: 1 ms in each of some thousand tests.
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """A pool that all tests of this run share."""
    with Pool(PATIENT) as pool:
        yield pool


@pytest.fixture(scope="session")
def impatient() -> Iterator[Pool]:
    """A pool with a short deadline, for subjects that hang."""
    with Pool(5.0, lanes=1) as pool:
        yield pool


@pytest.fixture(scope="session")
def rules() -> dict[str, Rule]:
    """The rule book."""
    return book()


@pytest.fixture(scope="session", autouse=True)
def _judged_ahead(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Judgements]]:
    """Start to judge the ``case`` of every selected test, once each, while other tests run.

    This is apart from ``judgements_of`` because a fixture in automatic use is one of every test,
    and the marker ``ranks`` is only for tests that request judgements. A worker of pytest-xdist
    knows too late which tests it gets: it judges a case when its test asks for it.
    """
    config = request.config
    if is_worker(config):
        with ExitStack() as stack:
            judge = Judge(stack)
            yield lambda case: judge.judge(as_judged(case, config))
        return
    cases = [
        item.callspec.params["case"] for item in request.session.items if "case" in fixtures(item)
    ]
    if not cases:
        # An executor starts a process of multiprocessing's even if nothing is submitted.
        yield none_selected
        return
    judged_as = {case: as_judged(case, config) for case in cases}
    with judges() as judged:
        futures = {case: judged(case) for case in dict.fromkeys(judged_as.values())}
        yield lambda case: futures[judged_as[case]].result()


def as_judged(case: Case, config: pytest.Config) -> Case:
    """Return a case as it is judged under the options of this test run.

    A short test run judges by its ``short_rules``, without the rules that they build on.
    """
    if config.getoption("--thorough"):
        return replace(case, rules=())
    if config.getoption("--every"):
        return case
    if case.short_rules:
        return replace(case, rules=case.short_rules, alone=True)
    return case


def is_worker(config: pytest.Config) -> bool:
    """Whether this is a process of pytest-xdist, one of several that share the tests."""
    return hasattr(config, "workerinput")


def none_selected(case: Case) -> Judgements:
    """Stand in for the judgements of a run without cases."""
    raise LookupError(f"{case} is not a parameter named 'case' of a selected test")


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts of a checkout that a job of CI needs, in a folder of their own for its results."""
    from tests.ci_runs import make_checkout  # with readers of YAML, which few test runs need

    return make_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="session", autouse=True)
def _ran_ahead(request: pytest.FixtureRequest) -> Iterator[Future[Any] | None]:
    """Start to run the commands of CI's templates, if a selected test needs their results."""
    is_needed = any("ran" in fixtures(item) for item in request.session.items)
    if is_worker(request.config) or not is_needed:
        yield None
        return
    from tests.ci_runs import run_all

    folder: Path = request.getfixturevalue("checkout")
    with ThreadPoolExecutor(1) as executor:
        yield executor.submit(run_all, folder)


@pytest.fixture(scope="session")
def ran(_ran_ahead: Future[Any] | None, checkout: Path) -> Any:
    """The results of all commands of all templates of CI, by command."""
    from tests.ci_runs import run_all

    return _ran_ahead.result() if _ran_ahead else run_all(checkout)


@pytest.fixture(scope="session")
def judgements_of(_judged_ahead: Callable[[Case], Judgements]) -> Callable[[Case], Judgements]:
    """A function that returns the judgements on a case of a selected test."""
    return _judged_ahead
