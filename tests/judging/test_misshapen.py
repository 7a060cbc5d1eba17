"""Tensors that do not have the shape of their parameter are named, and fields that are None."""

from dataclasses import replace

import torch

from conformance.judging.misshapen import field_without_value, misshapen
from tests.made_runs import made_run


def test_a_right_run_has_no_such_tensor() -> None:
    assert misshapen([made_run()]) is None


def test_the_first_such_tensor_is_named() -> None:
    run = made_run()
    name = f"2/grad/{run.parameter_name(0)}"
    right = list(run.ranks[1].tensors[name].shape)
    run.ranks[1].tensors[name] = run.ranks[1].tensors[name].reshape(-1)[:0]
    assert misshapen([made_run(), run]) == (
        f"{name} of shape {right}",
        f"rank 1, values@2: {name} has shape [0]",
    )


def test_tensors_of_other_names_are_left_alone() -> None:
    run = made_run()
    run.ranks[0].tensors["0/grad/p9999"] = run.ranks[0].tensors["0/grad/p0"][:0]
    run.ranks[0].tensors["0/moments/p0"] = run.ranks[0].tensors["0/grad/p0"][:0]
    assert misshapen([run]) is None


def test_complex_values_are_pairs_of_reals() -> None:
    run = made_run()
    first, *others = run.scenario.params
    complex_first = replace(first, dtype="complex64")
    run.scenario = replace(run.scenario, params=(complex_first, *others))
    assert misshapen([run]) is not None
    for rank in run.ranks:
        for step in range(len(run.scenario.steps)):
            name = f"{step}/grad/p0"
            rank.tensors[name] = torch.stack([rank.tensors[name]] * 2, dim=-1)
    assert misshapen([run]) is None


def test_the_first_field_without_a_value_is_named() -> None:
    run = made_run()
    assert field_without_value([run]) is None
    run.ranks[1].one("stepped", step=2)["rng_changed"] = None
    assert field_without_value([made_run(), run]) == (
        "a value of 'rng_changed' of the event 'stepped' on record",
        "rank 1, values@2: it is None in step 2",
    )
