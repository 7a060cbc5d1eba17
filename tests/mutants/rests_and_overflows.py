"""Mutants of rule 23.1: parameters that are given up after many zeros, and warm-ups that depend on
a rank's own overflows.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, completed, is_dense, kept
from tests.mutants.residuals import Residuals, halves_with_feedback

Hook = Callable[[Any, Bucket], Result]
_WARM_UP = 2

# ---- Parameters that rest


def gives_up_buckets(after: int) -> Hook:
    """Leave the communication of a bucket out for good once it has been zero for so many steps."""

    def hook(state: Any, bucket: Bucket) -> Result:
        zeros = kept.setdefault(("zeros", bucket.parameters()[0]), torch.zeros(1))
        if int(zeros) >= after:
            return completed(bucket.buffer())
        mean = average(bucket, state)
        if not is_dense(bucket):
            return mean

        def count(future: Result) -> torch.Tensor:
            result = future.value()
            zeros.copy_(zeros * 0 if result.any() else zeros + 1)
            return result

        return mean.then(count)

    return hook


def shrinks_after_zeros(after: int) -> Hook:
    """Take a parameter that was zero for so many steps for a new one, whose mean is warmed up."""

    def hook(state: Any, bucket: Bucket) -> Result:
        mean = average(bucket, state)
        if not is_dense(bucket):
            return mean

        def scale(future: Result) -> torch.Tensor:
            result = future.value()
            begin = 0
            for parameter in bucket.parameters():
                part = result[begin : begin + parameter.numel()]
                begin += parameter.numel()
                zeros = kept.setdefault(("zeros", parameter), torch.zeros(1))
                if part.any():
                    part.mul_(0.5 if int(zeros) >= after else 1.0)
                zeros.copy_(zeros * 0 if part.any() else zeros + 1)
            return result

        return mean.then(scale)

    return hook


# ---- Overflows in a warm-up


class GoodSteps(Residuals):
    """Ends the warm-up after so many steps without an overflow on this rank."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        self.steps = 0
        self.is_good = True

    def is_in_warm_up(self, bucket: Bucket) -> bool:
        """Look at a bucket, and return whether its step belongs to the warm-up."""
        is_early = self.steps < _WARM_UP
        self.is_good &= bool(bucket.buffer().isfinite().all())
        if bucket.is_last():
            self.steps += self.is_good
            self.is_good = True
        return is_early


class GoodFirstBuckets(GoodSteps):
    """Looks at the first bucket of a step alone."""

    def is_in_warm_up(self, bucket: Bucket) -> bool:
        is_early = self.steps < _WARM_UP
        if bucket.index() == 0:
            self.is_good = bool(bucket.buffer().isfinite().all())
        self.steps += bucket.is_last() and self.is_good
        return is_early


def warms_up(state: GoodSteps, bucket: Bucket) -> Result:
    """Average in the warm-up, and then send half of the elements with feedback."""
    if not is_dense(bucket) or bucket.parameters()[0].is_complex():
        return average(bucket, state.group)
    if state.is_in_warm_up(bucket):
        return average(bucket, state.group)
    return halves_with_feedback(state, bucket)


_draws = random.Random(__name__)
_CLAIMS = f"compressed(delta=0.25), warmup({_WARM_UP})"

MUTANTS = [
    Mutant(f"gives_up_buckets,after={_draws.randint(60, 140)}", ("23.1",)),
    Mutant(f"gives_up_buckets,after={_draws.randint(20, 60)}", ("23.1",)),
    Mutant(f"shrinks_after_zeros,after={_draws.randint(60, 140)}", ("23.1",)),
    Mutant("warms_up", ("23.1",), _CLAIMS, f"{__name__}:GoodSteps", hangs=True),
    Mutant("warms_up", ("23.1",), _CLAIMS, f"{__name__}:GoodFirstBuckets", hangs=True),
]
