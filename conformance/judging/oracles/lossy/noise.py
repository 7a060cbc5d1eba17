"""Judge the size of claimed noise."""

from itertools import product

import torch

from conformance.judging.oracles.lossy.common import joined
from conformance.judging.oracles.mean import mean
from conformance.judging.oracles.vast import FEWEST
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.subjects.claims import Claims

NEARLY = 0.85  # of the noise of all ranks: that of a thousand elements is off by a few percent


def require_noise(run: Run, claims: Claims, found: Found, steps: list[int]) -> None:
    """Require the claimed noise as the result of zeros.

    The noise of W ranks may be independent, or drawn once for all of them. That of one rank alone
    is divided by W.
    """
    for step, rank in product(steps, range(run.world)):
        noise = claims.least_noise(len(run.group(rank)))
        least = noise / 1.5
        most = 1.5 * (noise if claims.noise_of_one else claims.noise)
        got = joined([run.got(rank, step, index) for index in range(len(run.scenario.params))])
        size = -1.0 if got is None else float(got.norm()) / len(got) ** 0.5
        holds = found.require(
            least <= size <= most,
            f"noise with a root mean square of {least:.3g} to {most:.3g} if zeros are fed",
            f"rank {rank}, step {step}: {'no gradient' if got is None else f'{size:.3g}'}",
        )
        if not holds:
            return


def require_noise_of_all(run: Run, claims: Claims, found: Found) -> None:
    """Require as much noise for parameters that some ranks leave out as for others.

    Without the noise of one rank of two it has 0.71 times that size, and without that of two ranks
    of three 0.58 times. A parameter of seven elements has 96 draws: its size is off by 3 percent.
    """
    steps = range(claims.warmup, len(run.scenario.steps))
    for rank in range(run.world):
        sizes, left_out = {}, set()
        group = run.group(rank)
        for index in range(len(run.scenario.params)):
            drawn = [step for step in steps if run.receives(rank, step, index)]
            errors = []
            for step in drawn:
                got = run.got(rank, step, index)
                if got is not None:
                    errors.append(got - mean(run, rank, step, index, group))
            if not errors:
                continue
            sizes[index] = float(torch.stack(errors).square().mean()) ** 0.5
            if not all(run.feeds(other, drawn[0], index) for other in group):
                left_out.add(index)
        whole = [size for index, size in sizes.items() if index not in left_out]
        least = NEARLY * min(claims.least_noise(len(group)), *whole)
        for index in left_out:
            found.require(
                sizes[index] >= least,
                f"noise with a root mean square of {least:.3g} or more, as for other parameters",
                f"rank {rank}, parameter {run.parameter_name(index)}, which not all ranks use: "
                f"{sizes[index]:.3g}",
                "a rank adds no noise to what it has not used: others see what its data use",
            )


def require_noise_of_parameter(
    run: Run, claims: Claims, found: Found, index: int, cause: str
) -> None:
    """Require the claimed noise in a large parameter, on every rank that gets a gradient.

    A factor of 1.5 is allowed from 1,000 elements on, as in ``oracles/vast.py``; in 24 elements
    chance alone exceeds a factor of two once in 10,000 draws. The elements of all steps count.
    """
    steps = range(claims.warmup, len(run.scenario.steps))
    for rank in range(run.world):
        results = [(step, run.got(rank, step, index)) for step in steps]
        errors = [got - mean(run, rank, step, index) for step, got in results if got is not None]
        if sum(map(len, errors)) < FEWEST:
            continue
        error = torch.cat(errors)
        noise = claims.least_noise(len(run.group(rank)))
        size = float(error.square().mean().sqrt()) * claims.noise / noise
        ranks = "the number of ranks" if claims.noise_of_one else "the root of the ranks"
        found.require(
            size >= claims.noise / 1.5,
            f"noise with a root mean square of {claims.noise:g} over {ranks}",
            f"rank {rank}, parameter {run.parameter_name(index)}: {size:.3g}",
            cause,
        )
        found.checked(len(error))


def require_noise_of_group(run: Run, claims: Claims, found: Found) -> None:
    """Require the claimed noise, if there is any, in every parameter of a model on a group."""
    if not claims.noise:
        return
    for index in range(len(run.scenario.params)):
        require_noise_of_parameter(
            run,
            claims,
            found,
            index,
            "noise that is divided by the number of ranks of WORLD, or that no rank of the group "
            "adds",
        )
        if found.failures:
            return
