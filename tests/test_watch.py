"""Passive mode: what is found in training runs that are watched, and what is not."""

from typing import Any

import pytest

from conformance.pool import Pool
from conformance.scenario import Param, Scenario
from tests.hooks_ref.algorithms import run_hook

WHAT = Scenario("algorithm", "one step", (Param((3,)),), ("crafted",), level=0.0)


def run(pool: Pool, name: str, world: int = 2, what: Scenario = WHAT, **given: Any) -> None:
    """Run a subject, which checks itself."""
    run_hook(pool, what, world, setup=",".join([f"tests.watch_subjects:{name}", *(f"{key}={value!r}" for key, value in given.items())]))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("hook", ["", "hooks_ref:allreduce_hook", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook"])
def test_right_hooks(pool: Pool, hook: str, world: int) -> None:
    run(pool, "trains", world, hook=hook)
