"""Judge whether compression delivers a part of each bucket in each step of a long run.

``delta`` is promised for each call, whatever its input is: E ||C(p) - p||**2 <= (1 - delta)
||p||**2 (Karimireddy et al., assumption A; EF21, definition 1). A hook that sends nothing in every
other step, and the sum of two steps in the others, loses nothing over all steps, and keeps no delta
in half of its calls.

The kit sees the mean y of the messages of W ranks, and the mean p of their inputs: gradients, and
the parts that earlier results lack. With feedback that is p = m + sum (m - y); of estimates it is
m - y', with the result y' of the step before, and y - y' is what is sent.

Let D = 1 - ||C(p) - p||**2 / ||p||**2. From E D >= delta and D <= 1 follows D >= delta / 2 with a
probability of at least delta / 2, in each step given those before. Then 2 <C(p), p> >= D ||p||**2,
so that ||C(p)|| >= delta / 4 ||p||. The rank with the longest input has a longer one than the mean
is. So the mean of W messages is at least a quarter of delta / W of the mean input, and a half is
for messages that cancel out in part. A step is silent if its results are shorter than that.

In n steps that are chosen before the run all are silent with a probability of at most
(1 - delta / 2)**n, which is below 1e-9 for n >= 20.7 / -log(1 - delta / 2). The choices are: every
k-th step, for each first step; and all steps but these. Of schedules with the period k up to 30
those that are silent in half of the steps or more are found if delta is 0.1. A compressor that
draws at random in which steps it sends keeps its delta in each.
"""

import math
from collections.abc import Iterator

import torch

from conformance.judging.oracles.long_runs import LongRecord
from conformance.judging.verdict import Found
from conformance.scenarios.model import Scenario
from conformance.subjects.claims import DIFFERENCE

CHANCE = 1e-9
LONGEST_PERIOD = 30
SETTLED = 2.0**-8  # of the mean: an estimate that is nearer has nothing to send
FLOAT = 4  # bytes


def require_something_of_each_step(record: LongRecord, found: Found) -> bool:
    """Require results of each bucket in some of the steps of each choice."""
    if record.run.scenario.long_run.steps_per_round > 1:
        return True
    delta = record.claims.delta
    share = delta / (8 * record.run.world)
    fewest = math.ceil(math.log(CHANCE) / math.log(1 - delta / 2))
    for bucket in _buckets(record.run.scenario):
        right = torch.cat([record.wanted(index) for index in bucket], dim=1)
        ranks = {rank for index in bucket for rank, _ in record.different_ranks(index)}
        for rank in sorted(ranks):
            parts = [record.results(rank, index) for index in bucket]
            rows = torch.cat([part for part in parts if part is not None], dim=1)
            sent, given = _lengths(record, rows, right)
            silent = sent < share * given
            for every, first, is_rest, chosen in _choices(record, given > 0):
                count = int(chosen.sum())
                if count < fewest:
                    continue
                found.checked(1)
                if bool(silent[chosen].all()):
                    names = ", ".join(record.run.parameter_name(index) for index in bucket)
                    some = f"{first}, {first + every}, {first + 2 * every} and so on"
                    which = f"all steps but {some}" if is_rest else f"steps {some}"
                    return found.require(
                        False,
                        "a part of each bucket in each step: in at least one of the "
                        f"{count} steps named below, a message of {share:.2g} times the norm of "
                        "its input (gradient and residual)",
                        f"rank {rank}, bucket of {names}: smaller ones in {which}",
                        "steps that send nothing, or next to nothing: delta is promised for each "
                        "step, and not for the sum of several",
                    )
    return True


def _buckets(scenario: Scenario) -> Iterator[list[int]]:
    """Yield the parameters of each bucket, from DDP's second step on."""
    bucket: list[int] = []
    size = 0
    for index in reversed(range(len(scenario.params))):
        bucket.append(index)
        size += FLOAT * math.prod(scenario.params[index].shape)
        if size >= scenario.ddp.bucket_cap_mb * 2**20:
            yield bucket
            bucket = []
            size = 0
    if bucket:
        yield bucket


def _lengths(
    record: LongRecord, rows: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each round the lengths of the message and the input; 0 for an input that is not
    judged."""
    first = record.warm_up
    given = torch.zeros(len(rows), dtype=torch.float64)
    if record.claims.lossy == DIFFERENCE:
        before = rows[first:-1]
        missing = (right[first + 1 :] - before).norm(dim=1)
        given[first + 1 :] = missing * (missing > SETTLED * right[first + 1 :].norm(dim=1))
        sent = given.clone()
        sent[first + 1 :] = (rows[first + 1 :] - before).norm(dim=1)
        return sent, given
    left = (right - rows)[first:].cumsum(0)
    given[first] = right[first].norm()
    given[first + 1 :] = (right[first + 1 :] + left[:-1]).norm(dim=1)
    drains = torch.tensor([record.drains(place) for place in record.feed.places])
    given[drains] = 0
    return rows.norm(dim=1), given


def _choices(
    record: LongRecord, judged: torch.Tensor
) -> Iterator[tuple[int, int, bool, torch.Tensor]]:
    """Yield periods, their first steps, whether all other steps are chosen, and masks of rounds."""
    numbers = torch.arange(len(judged))
    for every in range(2, LONGEST_PERIOD + 1):
        for first in range(every):
            is_due = (numbers - record.warm_up) % every == first
            yield every, first + record.warm_up, False, is_due & judged
            if every > 2:
                yield every, first + record.warm_up, True, ~is_due & judged
