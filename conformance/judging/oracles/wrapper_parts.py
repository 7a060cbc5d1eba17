"""Right modes, buffers and gradients of the parts of wrapped blocks.

Networks compute in float64, and are no deeper than those of ``judging/oracles/wrapper.py``, whose
bound of 2**-30 holds for them. Buffers of a norm in evaluation mode are only read: they are the
same numbers.

Running statistics r of a norm in training mode with momentum m become r + m (s - r) for statistics
s of a batch. If the forward runs again with the same batch, they are r + w (s - r), where w is
m for one update and 1 - (1 - m)**2 for two: w is at least m, and at most 1. A wrapper that changes
m to 1 - sqrt(1 - m), so that two updates count like one, has that w if the forward runs once;
it is m / 2 or more. With a momentum of None the first update takes s itself, and m is 1. The run
without the wrapper tells s: its statistics after the step are r + m (s - r).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from conformance.judging.oracles.wrapper import (
    TOLERANCES,
    Runs,
    pairs,
    require_same_results,
    subject_runs,
)
from conformance.judging.oracles.wrapper_training import without_steps
from conformance.judging.verdict import Found
from conformance.records.rank_record import RankRecord
from conformance.scenarios.model import Scenario
from conformance.scenarios.wrapper_parts import (
    NORMS,
    modes_of_parts,
    options_of_norms,
    share_in_parts,
)
from conformance.subjects.claims import Claims

TOLERANCE = TOLERANCES[""]


def require_same_parts(runs: Runs, claims: Claims, found: Found) -> None:
    """Require the results without the wrapper in the steps of ``wrapper_parts``.

    With the claim ``draws_anew`` this holds for the steps without dropout, and for outputs in all
    steps: parameters stay as they are.
    """
    if not claims.has("draws_anew"):
        require_same_results(runs, found)
        return
    require_same_results(runs, found, ("output",))
    for name, run, plain in pairs(runs):
        steps = range(len(run.scenario.steps))
        draws = {step for step in steps if share_in_parts(run.scenario, step)}
        both = {name: without_steps(run, draws), f"vanilla-{name}": without_steps(plain, draws)}
        require_same_results(both, found)


def require_kept_options(runs: Runs, found: Found) -> None:
    """Require that each part of a network has the mode and the options after a step that it had
    before it.
    """
    for name in subject_runs(runs):
        for rank in runs[name].ranks:
            for event in rank.all("parts"):
                before = event["before"]
                after = event["after"]
                changed = [key for key, value in before.items() if after.get(key) != value]
                if not changed:
                    found.checked(1)
                    continue
                first = changed[0]
                found.require(
                    False,
                    f"{first}={before[first]}, as before the step",
                    f"rank {rank.rank}, step {event['step']} of {name}: {first}="
                    f"{after.get(first)} ({len(changed)} of {len(before)} modes and options)",
                    "train() and eval() set the mode of all parts of a module"
                    if first.endswith(".training")
                    else "the wrapper puts back a value that is not the model's own",
                )


def require_frozen_buffers(runs: Runs, found: Found) -> None:
    """Require that buffers of norms in evaluation mode are those without the wrapper."""
    for norm in _norms(runs, trains=False):
        for name, right in norm.buffers(norm.plain, "ends").items():
            got = norm.buffers(norm.rank, "ends").get(name)
            found.require(
                got is not None and got.shape == right.shape and bool((got == right).all()),
                "buffers that stay as they are, of a norm in evaluation mode",
                f"{norm.place}: buffer {norm.module}.{name} is another",
                "the norm ran again in training mode, or the wrapper writes to buffers",
            )


def require_statistics_of_batch(runs: Runs, found: Found) -> None:
    """Require that running statistics of norms in training mode have taken in those of the batch,
    once or several times, and no others, in the steps without dropout.

    With dropout another forward may draw other masks, whose statistics are as good.
    """
    for norm in _norms(runs, trains=True):
        if share_in_parts(norm.scenario, norm.step):
            continue
        before = norm.buffers(norm.plain, "begins")
        for name, once in norm.buffers(norm.plain, "ends").items():
            if name == "num_batches_tracked":
                continue
            got = norm.buffers(norm.rank, "ends").get(name)
            weight = None
            if got is not None and got.shape == once.shape:
                weight = _weight_of_batch(before[name], once, got, norm.momentum)
            is_right = weight is not None and (
                norm.momentum / 2 - TOLERANCE <= weight <= 1 + TOLERANCE
            )
            found.require(
                is_right,
                f"running statistics that count the batch with a share of {norm.momentum:.6g} or "
                "more, and nothing else",
                f"{norm.place}: {norm.module}.{name} "
                + ("has other values" if weight is None else f"counts it with {weight:.6g}"),
                "the wrapper takes an update back, or the norm updates from other values",
            )


def _weight_of_batch(
    before: torch.Tensor, once: torch.Tensor, got: torch.Tensor, momentum: float
) -> float | None:
    """Return the weight of a batch in running statistics; None if they have other values, too.

    Args:
        before: the statistics before the step.
        once: these after one update.
        got: those to judge.
        momentum: the weight in one update.
    """
    difference = (once - before) / momentum
    weight = float((got - before).dot(difference) / difference.dot(difference))
    largest = torch.cat([before.abs(), (before + difference).abs()]).max()
    rest = (got - before - weight * difference).abs().max()
    return weight if rest <= TOLERANCE * largest else None


@dataclass(frozen=True)
class _Norm:
    """A norm in one step of a rank, with the wrapper and without it.

    Attributes:
        place: the rank, the step and the run, for messages.
        step: the number of the step.
        block: the number of its block.
        name: its name in the block.
        rank: the record with the wrapper.
        plain: the record without it.
        scenario: that of the run.
    """

    place: str
    step: int
    block: int
    name: str
    rank: RankRecord
    plain: RankRecord
    scenario: Scenario

    @property
    def module(self) -> str:
        """The name of the norm in the network."""
        return f"blocks.{self.block}.{self.name}"

    @property
    def momentum(self) -> float:
        """The weight of the batch in the statistics after one update."""
        momentum = options_of_norms(self.scenario)[self.block, self.name].momentum
        return 1.0 if momentum is None else momentum

    def buffers(self, record: RankRecord, moment: str) -> dict[str, torch.Tensor]:
        """Return the buffers of the norm at a moment of the step, by name."""
        prefix = f"{self.step}/{moment}/{self.block}/{self.name}/"
        return {
            key.removeprefix(prefix): tensor
            for key, tensor in record.tensors.items()
            if key.startswith(prefix)
        }


def _norms(runs: Runs, trains: bool) -> Iterator[_Norm]:
    """Yield the norms of all steps in training mode, or those in evaluation mode."""
    for name, run, plain in pairs(runs):
        for rank, other in zip(run.ranks, plain.ranks, strict=True):
            for step in range(len(run.scenario.steps)):
                place = f"rank {rank.rank}, step {step} of {name}"
                for (block, part), is_training in modes_of_parts(run.scenario, step).items():
                    if part in NORMS and is_training == trains:
                        yield _Norm(place, step, block, part, rank, other, run.scenario)
