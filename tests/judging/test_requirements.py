"""Requirements that several rules share, on made runs."""

from dataclasses import replace

import torch

from conformance.judging.oracles.mean import mean
from conformance.records.run import Run
from conformance.scenarios.hook import UNEVEN
from conformance.scenarios.model import Param
from tests.made_runs import made_run, refused

RATE = 0.5


def fused_run(follows: bool) -> Run:
    """Return a run of SGD in a hook: one rank has no input before the last two steps.

    Args:
        follows: that rank takes the parameters of the others, which it shadowed, as Join does.
    """
    steps = ("crafted",) * 4 + ("faint",) * 2
    run = made_run(mean, replace(UNEVEN, params=(Param((30,)),), steps=steps), world=3)
    for rank in range(3):
        parameter = torch.zeros(30, dtype=torch.float64)
        for step in range(len(steps)):
            has_input = run.scenario.has_input(rank, 3, step)
            if has_input or follows:
                parameter = (parameter - RATE * mean(run, 0, step, 0)).float().double()
            if has_input:
                run.ranks[rank].tensors[f"{step}/parameter/p0"] = parameter.float()
    return run


def test_a_rank_with_inputs_again_has_the_parameters_of_those_it_shadowed() -> None:
    assert refused("13.6", fused_run(follows=True), f"fused(SGD, lr={RATE})") == ""
    assert "rank 1, step 4, parameter p0: " in refused(
        "13.6", fused_run(follows=False), f"fused(SGD, lr={RATE})"
    )
