"""The join context: the calls in each step, and torch's own joinables in the context."""

from typing import Any

import pytest
import torch

import hooks_ref
from conformance.hosts.pool import Pool
from conformance.scenarios.hook import SUBGROUPS
from conformance.scenarios.model import Param, Scenario
from tests.hooks_ref.algorithms import run_hook

SUBJECTS = "tests.hooks_ref.join_subjects"
WHAT = Scenario("algorithm", "one step", (Param((3,)),), ("crafted",), initial_value=0.0)


def run(pool: Pool, name: str, world: int, what: Scenario = WHAT, **given: Any) -> None:
    """Run a subject, which checks itself."""
    run_hook(
        pool,
        what,
        world,
        setup=",".join(
            [f"{SUBJECTS}:{name}", *(f"{key}={value!r}" for key, value in given.items())]
        ),
    )


@pytest.mark.parametrize("joinables", [1, 3])
@pytest.mark.parametrize("lengths", [(3, 3), (0, 4), (2, 3, 1), (0, 0), (9, 0, 1)], ids=str)
def test_who_trains(pool: Pool, lengths: tuple[int, ...], joinables: int) -> None:
    run(pool, "counts", len(lengths), lengths=lengths, joinables=joinables, factor=5)


def test_on_subgroups(pool: Pool) -> None:
    """Ranks are places in the joinables' group; two groups do not affect each other."""
    what = Scenario(
        "algorithm",
        "two groups",
        WHAT.params,
        ("crafted",),
        groups=SUBGROUPS.groups,
        initial_value=0.0,
    )
    run(pool, "counts", 4, what, lengths=(1, 4), joinables=2)


@pytest.mark.parametrize("name", ["disabled", "throws", "raises_inside", "steps_alone", "divides"])
def test_ways_out(pool: Pool, name: str) -> None:
    run(pool, name, 2)


@pytest.mark.parametrize(
    "given",
    [
        *(
            {"lengths": (2, 5, 0), "hook": hook}
            for hook in ("", "allreduce_hook", "fp16_compress_hook", "powerSGD_hook")
        ),
        *({"lengths": lengths, "zero": True} for lengths in ((3, 4), (4, 1))),
    ],
    ids=str,
)
def test_torchs_joinables(pool: Pool, given: dict[str, Any]) -> None:
    run(pool, "trains", len(given["lengths"]), **given)


def test_contexts_that_are_made_ahead(pool: Pool) -> None:
    run(pool, "made_ahead", 1)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="at least one"):
        hooks_ref.Join([])
    with pytest.raises(TypeError, match="Linear is not a Joinable"):
        hooks_ref.Join([torch.nn.Linear(1, 1)])
