"""Runs of a stateful hook on known gradients, for step-by-step comparison with a float64 oracle of
its algorithm."""

import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from conformance.hosts.pool import Pool
from conformance.judging.run_failures import failed_run
from conformance.records.run import Run, load_run
from conformance.scenarios.gradients import lay_out
from conformance.scenarios.model import DDPOptions, Param, Scenario
from conformance.subjects.spec import SubjectSpec

# Matrices worth compressing and not, a vector, a scalar, a matrix in channels_last and a transposed
# one: 8 buckets after the rebuild.
PARAMS = (
    *(Param((12, 9)), Param((12,)), Param((8, 3, 2, 2), layout="channels_last"), Param((8,))),
    *(Param((16, 5), layout="transposed"), Param((3, 2)), Param(()), Param((7, 11))),
)
ONE_BUCKET = 25.0
SEVERAL_BUCKETS = 64 / 2**20
_names = itertools.count()


def scenario(
    steps: int = 12,
    *,
    params: tuple[Param, ...] = PARAMS,
    kind: str = "normal",
    bucket_cap_mb: float = SEVERAL_BUCKETS,
    first_step: int = 0,
) -> Scenario:
    """Return a scenario of scripted gradients of one kind.

    By default several buckets from the second step on.
    """
    return Scenario(
        "algorithm",
        "scripted gradients",
        params,
        (kind,) * steps,
        ddp=DDPOptions(bucket_cap_mb=bucket_cap_mb),
        first_step=first_step,
        initial_value=0.0,
    )


def run_hook(
    pool: Pool,
    what: Scenario,
    world: int = 2,
    *,
    hook: str | None = None,
    state: str | None = None,
    setup: str | None = None,
) -> Run:
    """Run a hook, named as on the command line, and return the finished run."""
    run = try_hook(pool, what, world, hook=hook, state=state, setup=setup)
    broken = failed_run(run)
    assert broken is None, f"{broken.line}\n{broken.evidence}"
    return run


def try_hook(
    pool: Pool,
    what: Scenario,
    world: int = 2,
    *,
    hook: str | None = None,
    state: str | None = None,
    setup: str | None = None,
) -> Run:
    """Run a hook that may break."""
    folder = pool.run(what, world, SubjectSpec(hook, state, setup), f"algorithm-{next(_names)}")
    try:
        return load_run(folder, what, world)
    finally:
        shutil.rmtree(folder)


def gradients(run: Run, step: int, index: int) -> torch.Tensor:
    """Return the ranks' gradients of a parameter before the hook, ``[W, numel]`` in float64."""
    return torch.stack([run.fed(rank, step, index) for rank in range(run.world)])


def result(run: Run, rank: int, step: int, index: int) -> torch.Tensor:
    """Return a parameter's gradient after backward, flat in float64."""
    got = run.got(rank, step, index)
    assert got is not None, f"rank {rank}, step {step}: parameter {index} has no gradient"
    return got


def memory_order(spec: Param) -> torch.Tensor:
    """Return the places, in C order, of a gradient's elements in the order of its bucket."""
    if spec.dtype.startswith("complex"):  # pairs of reals, in contiguous parameters only
        return torch.arange(2 * math.prod(spec.shape))
    laid = lay_out(torch.arange(math.prod(spec.shape)).view(spec.shape), spec.layout)
    return laid.as_strided((laid.numel(),), (1,))


def every(run: Run, steps: range | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield (step, rank, parameter) in the order of time."""
    return itertools.product(
        steps or range(len(run.scenario.steps)), range(run.world), range(len(run.scenario.params))
    )


def require_same_bits(
    one: Run, other: Run, *, steps: Callable[[int], int | None] = lambda step: step
) -> None:
    """Compare two runs; ``steps`` maps a step of ``one`` to a step of ``other``, or to None."""
    for step, rank, index in every(one):
        if (theirs := steps(step)) is not None:
            assert torch.equal(
                result(one, rank, step, index), result(other, rank, theirs, index)
            ), (step, rank, index)


def other_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors whose values differ; NaN is the same as NaN.

    Some buffers of the network of ``training`` are not finite.
    """
    return [
        name
        for name, tensor in one.items()
        if not torch.allclose(tensor, other[name], rtol=0, atol=0, equal_nan=True)
    ]


@contextmanager
def torchs_own_fails(said: str) -> Iterator[None]:
    """Expect that torch's own fails with ``message``, so that a fix in torch is noticed."""
    with pytest.raises(AssertionError) as raised:
        yield
    assert said in str(raised.value), f"torch's own fails otherwise by now: {raised.value}"


def require_resumes(pool: Pool, folder: Path, hook: str, state: str) -> None:
    """Require that a run saved and continued in new processes has the bits of a whole run."""
    whole = run_hook(pool, scenario(12), hook=hook, state=state)
    given = f"hook='{hook}',folder='{folder}'"
    run_hook(pool, scenario(6), setup=f"tests.hooks_ref.saved_states:saves,state='{state}',{given}")
    for loads in (f"loads,{given}", f"loads_state_dict,state='{state}',{given}"):
        rest = run_hook(
            pool, scenario(6, first_step=6), setup=f"tests.hooks_ref.saved_states:{loads}"
        )
        require_same_bits(rest, whole, steps=lambda step: step + 6)
