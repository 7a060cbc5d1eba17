"""Section 20: errors that only show among many ranks, which are simulated in one process.

The limits, as shares of the largest gradient, follow from the bound in ``judging/oracles/mean.py``,
gamma_k mean_r |x_r|, for n = 1024 ranks. Full precision, a sum in any order: k = n + 1 and
u = 2**-24 give 6.1e-5, below 2**-10. Half precision, a sum in pairs: k = log2(n) + 3 and
u = 2**-8 (bfloat16) give 0.054, below 1/16. A hook that gathers and then sums in half precision,
one after another, has k = n + 2, and may exceed the limit. A value that underflows or overflows is
off by all of it.
"""

import math
from typing import Any

import torch

from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.gradients import at_scale
from conformance.scenarios.hook import AT_SCALE, SCALE_NUMEL, SCALES
from conformance.subjects.claims import Claims

# The largest error as a share of the largest gradient, by the dtype that is rounded to.
LIMITS = {None: 2**-10, "float16": 1 / 16, "bfloat16": 1 / 16}


def _judge(run: Run, claims: Claims, found: Found, kind: str, cause: str = "") -> None:
    """Require the mean of one kind of gradients at every simulated size."""
    if claims.lossy or claims.fused:
        found.does_not_apply(
            f"no single step is right or wrong, because the subject claims {claims}"
        )
        return
    events = list(run.ranks[0].all("simulated"))
    limit = LIMITS[claims.rounded]
    errors = {event["size"]: _error(run, claims, kind, event["size"]) for event in events}
    stopped = run.ranks[0].first("not simulated")
    # The smallest size is that of real ranks, which are right: an error there is the simulation's.
    smallest = min(run.scenario.simulated, default=0)
    if not set(errors) - {smallest}:
        reason = stopped["why"] if stopped else "no ranks were simulated"
        found.does_not_apply(f"it cannot be simulated: {reason}")
        return
    if not _is_simulated_right(events, smallest, errors[smallest] <= limit):
        found.does_not_apply(
            "it cannot be simulated: ranks that share a process get other results, "
            "e.g. because a module keeps state"
        )
        return
    larger = {size: error for size, error in errors.items() if size != smallest}
    text = ", ".join(f"{error:.2g} among {size} ranks" for size, error in larger.items())
    rest = f"; no more ranks: {stopped['why']}" if stopped else ""
    found.note(f"{kind} gradients: the result is off by {text}{rest}")
    for event in events:
        size = event["size"]
        expected = f"the mean of {kind} gradients, within {limit:.2g}"
        found.require(errors[size] <= limit, expected, f"off by {text}", cause)
        actual = f"{size} simulated ranks: some have others than rank 0"
        found.require(event["alike"], "the same bits on all ranks", actual)
    found.checked(0, max(errors.values()) / limit)


def _is_simulated_right(events: list[dict[str, Any]], smallest: int, within_limit: bool) -> bool:
    alike = all(event["alike"] for event in events if event["size"] == smallest)
    return alike and within_limit


def _error(run: Run, claims: Claims, kind: str, size: int) -> float:
    """Return the largest error among ``size`` ranks, as a share of the largest gradient."""
    begin = SCALES.index(kind) * SCALE_NUMEL
    place = slice(begin, begin + SCALE_NUMEL)
    got = run.ranks[0].tensors[f"at scale/{size}"].double()[place]
    fed = at_scale(size)[:, place].float().double()
    right = fed.mean(0)
    scale = fed.abs().max()
    if claims.sum:
        right = right * size
        scale = scale * size
    # A sum that the dtype cannot hold is no error.
    if float(right.abs().max()) > torch.finfo(getattr(torch, claims.rounded or "float32")).max:
        return 0.0
    error = float((got - right).abs().max() / scale)
    return error if math.isfinite(error) else math.inf


@rule(
    "20.1",
    "Averages random gradients among 8 to 1024 ranks",
    on=(AT_SCALE,),
    needs=("2.1", "10.1"),
    level=SHOULD,
    since="1.3",
    source="fairscale#132, pytorch#197890: right on two ranks, wrong on more",
    remedy="values that are computed from the number of ranks: shifts, tables, chunks, tails, "
    "roots",
)
def random(run: Run, claims: Claims, found: Found) -> None:
    """The mean is right among 8, 64 and 1024 simulated ranks, within 2**-10 of the largest
    gradient, or 1/16 if it is rounded."""
    _judge(run, claims, found, "random")


@rule(
    "20.2",
    "Averages large gradients among 8 to 1024 ranks",
    on=(AT_SCALE,),
    needs=("20.1",),
    level=SHOULD,
    since="1.3",
    source="pytorch#59522, horovod#278: a sum that is taken before it is divided overflows in half "
    "precision",
    remedy="a division after the sum: divide before it, or by one factor of the number of ranks "
    "before it and by the other after it",
)
def large(run: Run, claims: Claims, found: Found) -> None:
    """Gradients from 128 to 256, of one sign on all ranks, get their mean, and no infinity."""
    cause = "the sum is taken before it is divided, and overflows"
    _judge(run, claims, found, "large", cause)


@rule(
    "20.3",
    "Averages small gradients among 8 to 1024 ranks",
    on=(AT_SCALE,),
    needs=("20.1",),
    level=SHOULD,
    since="1.3",
    source="horovod#278: a division before the sum underflows in half precision",
    remedy="a division before the sum: divide after it, or by one factor of the number of ranks "
    "before it and by the other after it",
)
def small(run: Run, claims: Claims, found: Found) -> None:
    """Gradients from 2**-16 to 2**-15, of one sign on all ranks, get their mean."""
    cause = "each rank's part is divided before it is rounded, to less than the dtype holds"
    _judge(run, claims, found, "small", cause)
