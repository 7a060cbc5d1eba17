"""Section 20: numbers that only show among many ranks, which are simulated in one process (``simulate.py``).

The limits, as shares of the largest gradient, follow from the bound in ``oracle.py``, gamma_k mean_r |x_r|, for n = 1024
ranks. Full precision, a sum in any order: k = n + 1 and u = 2**-24 give 6.1e-5, below 2**-10. Half precision, a sum in
pairs: k = log2(n) + 3 and u = 2**-8 (bfloat16) give 0.054, below 1/16; a hook that gathers and then sums in half precision
one after another has k = n + 2, and is told of what that costs. What underflows or overflows is off by all of it.
"""

import math

import torch

from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.gradients import at_scale
from conformance.scenarios.hook import AT_SCALE, SCALE_NUMEL, SCALES
from conformance.subjects.claims import Claims

LIMITS = {None: 2**-10, "float16": 1 / 16, "bfloat16": 1 / 16}  # by the dtype that is rounded to; of the largest gradient


def _judge(run: Run, claims: Claims, found: Found, kind: str, cause: str = "") -> None:
    if claims.lossy or claims.fused:
        found.does_not_apply(f"under {claims} no one step says whether a result is right")
        return
    events = list(run.ranks[0].all("simulated"))
    offs, limit = {event["size"]: _off(run, claims, kind, event["size"]) for event in events}, LIMITS[claims.rounded]
    stopped = run.ranks[0].first("not simulated")
    few = min(run.scenario.simulated, default=0)  # what is wrong there is right among real ranks: the simulation is at fault
    if not set(offs) - {few}:
        found.does_not_apply(f"it cannot be simulated: {stopped['why'] if stopped else 'no ranks were'}")
        return
    if offs[few] > limit or not all(event["alike"] for event in events if event["size"] == few):
        found.does_not_apply("it cannot be simulated: ranks that share a process get other results, e.g. of what a module keeps")
        return
    said = ", ".join(f"{off:.2g} among {size} ranks" for size, off in offs.items() if size != few)
    found.note(f"{kind} gradients: the result is off by {said}" + (f"; no more ranks: {stopped['why']}" if stopped else ""))
    for event in events:
        size = event["size"]
        found.require(offs[size] <= limit, f"the mean of {kind} gradients, within {limit:.2g}", f"off by {said}", cause)
        found.require(event["alike"], "the same bits on all ranks", f"{size} simulated ranks: some have others than rank 0")
    found.checked(0, max(offs.values()) / limit)


def _off(run: Run, claims: Claims, kind: str, size: int) -> float:
    """Return by how much the result is off: its largest error, as a share of the largest gradient."""
    place = slice(SCALES.index(kind) * SCALE_NUMEL, (SCALES.index(kind) + 1) * SCALE_NUMEL)
    got, fed = run.ranks[0].tensors[f"at scale/{size}"].double()[place], at_scale(size)[:, place].float().double()
    right, scale = fed.mean(0), fed.abs().max()
    if claims.sum:
        right, scale = right * size, scale * size
    if float(right.abs().max()) > torch.finfo(getattr(torch, claims.rounded or "float32")).max:
        return 0.0  # a sum that this dtype does not hold
    off = float((got - right).abs().max() / scale)
    return off if math.isfinite(off) else math.inf


@rule(
    "20.1",
    "random gradients among 8 to 1024 ranks",
    on=(AT_SCALE,),
    needs=("2.1", "10.1"),
    level=SHOULD,
    since="1.3",
    source="fairscale#132, pytorch#197890: right on two ranks, wrong on more",
    remedy="what is computed from the number of ranks: shifts, tables, chunks, tails, roots",
)
def random(run: Run, claims: Claims, found: Found) -> None:
    """The mean is right among 8, 64 and 1024 simulated ranks, within 2**-10 of the largest gradient, or 1/16 where it is rounded."""
    _judge(run, claims, found, "random")


@rule(
    "20.2",
    "large gradients fit among 8 to 1024 ranks",
    on=(AT_SCALE,),
    needs=("20.1",),
    level=SHOULD,
    since="1.3",
    source="pytorch#59522, horovod#278: a sum that is taken before it is divided overflows in half precision",
    remedy="divide before the sum, or by a part of the number of ranks before it and by the other part after it",
)
def large(run: Run, claims: Claims, found: Found) -> None:
    """Gradients from 128 to 256, of one sign on all ranks, have the mean that they have, and no infinity."""
    _judge(run, claims, found, "large", "the sum is taken before it is divided, and overflows")


@rule(
    "20.3",
    "small gradients are not lost among 8 to 1024 ranks",
    on=(AT_SCALE,),
    needs=("20.1",),
    level=SHOULD,
    since="1.3",
    source="horovod#278: a division before the sum underflows in half precision",
    remedy="divide after the sum, or by a part of the number of ranks before it and by the other part after it",
)
def small(run: Run, claims: Claims, found: Found) -> None:
    """Gradients from 2**-16 to 2**-15, of one sign on all ranks, have the mean that they have."""
    _judge(run, claims, found, "small", "each rank's part is divided before it is rounded, to less than the dtype holds")
