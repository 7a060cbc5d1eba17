"""Section 20: errors that only show among many ranks, which are simulated in one process.

Rule 20.1 has the bound of ``judging/oracles/clusters.py``, for each element. The limits of the
others, as shares of the largest gradient, follow from the bound in ``judging/oracles/mean.py``,
gamma_k mean_r |x_r|, for n = 1024 ranks. Full precision, a sum in any order: k = n + 1 and
u = 2**-24 give 6.1e-5, below 2**-10. Half precision, a sum in pairs: k = log2(n) + 3 and
u = 2**-8 (bfloat16) give 0.054, below 1/16. A hook that gathers and then sums in half precision,
one after another, has k = n + 2, and may exceed the limit. A value that underflows or overflows is
off by all of it.
"""

import math
from typing import Any

import torch

from conformance.judging.oracles.clusters import share_of_bound
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.gradients import at_scale
from conformance.scenarios.hook import AT_SCALE, SCALE_NUMEL, SCALES
from conformance.subjects.claims import Claims

# The number of sizes at which the simulation begins, and at which real ranks are right.
GUARDS = 3

# The largest error as a share of the largest gradient, by the dtype that is rounded to.
LIMITS = {None: 2**-10, "float16": 1 / 16, "bfloat16": 1 / 16}


def _simulated(run: Run, claims: Claims, found: Found) -> list[dict[str, Any]]:
    """Return the events of the simulated sizes that real ranks have not shown to be right.

    The list is empty, and the rule does not apply, if the hook cannot be simulated. Real ranks are
    right at the sizes that the simulation begins with (``GUARDS``): an error there is the
    simulation's.
    """
    if claims.lossy or claims.fused:
        found.does_not_apply(
            f"no single step is right or wrong, because the subject claims {claims}"
        )
        return []
    events = list(run.ranks[0].all("simulated"))
    stopped = run.ranks[0].first("not simulated")
    guards = set(run.scenario.simulated[:GUARDS])
    larger = [event for event in events if event["size"] not in guards]
    if not larger:
        reason = stopped["why"] if stopped else "no ranks were simulated"
        found.does_not_apply(f"it cannot be simulated: {reason}")
    elif not all(
        event["alike"] and bool((_errors(run, claims, "random", event["size"]) <= 1).all())
        for event in events
        if event["size"] in guards
    ):
        found.does_not_apply(
            "judged on real ranks alone, not on up to 1024 simulated ones: as a test, the kit "
            "simulates 2, 3 and 4 ranks in one process, and the hook got another result there than "
            "on as many real ranks. This is no failure of the hook: if it keeps tensors in its "
            "module, all simulated ranks share them, and real ranks do not"
        )
        return []
    return larger


def _judge(run: Run, claims: Claims, found: Found, kind: str, cause: str = "") -> None:
    """Require the mean of one kind of gradients at every simulated size."""
    events = _simulated(run, claims, found)
    if not events:
        return
    limit = LIMITS[claims.rounded]
    errors = {event["size"]: _error(run, claims, kind, event["size"]) for event in events}
    largest = max(errors.values())
    found.note(
        f"{kind} gradients: the result is off by at most {largest:.2g} among {_span(run, events)}"
    )
    for size, error in errors.items():
        expected = f"the mean of {kind} gradients, within {limit:.2g}"
        found.require(error <= limit, expected, f"off by {error:.2g} among {size} ranks", cause)
    found.checked(0, largest / limit)


def _span(run: Run, events: list[dict[str, Any]]) -> str:
    """Return the numbers of ranks that were simulated, and why there are no more."""
    stopped = run.ranks[0].first("not simulated")
    rest = f"; no more ranks: {stopped['why']}" if stopped else ""
    return f"{events[0]['size']} to {events[-1]['size']} ranks{rest}"


def _errors(run: Run, claims: Claims, kind: str, size: int) -> torch.Tensor:
    """Return the error of each element and step among ``size`` ranks, as a share of its bound.

    It is 0 if the bound decides nothing.
    """
    share = share_of_bound(size, claims)
    begin = SCALES.index(kind) * SCALE_NUMEL
    place = slice(begin, begin + SCALE_NUMEL)
    got = run.ranks[0].tensors[f"at scale/{size}"].double()[..., place]
    if share is None:
        return torch.zeros_like(got)
    values = at_scale(size)[:, place].float().double()
    factor = size if claims.sum else 1
    errors = (got - values.mean(0) * factor).abs() / (values.abs().mean(0) * factor * share)
    return errors.nan_to_num(math.inf, math.inf, math.inf)


def _error(run: Run, claims: Claims, kind: str, size: int) -> float:
    """Return the largest error of any step among ``size`` ranks, as a share of the largest
    gradient.
    """
    begin = SCALES.index(kind) * SCALE_NUMEL
    place = slice(begin, begin + SCALE_NUMEL)
    got = run.ranks[0].tensors[f"at scale/{size}"].double()[..., place]
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
    "Gives the mean among any number of ranks, simulated",
    on=(AT_SCALE,),
    needs=("2.1",),
    since="1.3",
    source="fairscale#132, pytorch#197890: right on two ranks, wrong on more",
    remedy="values that are computed from the number of ranks: shifts, tables, chunks, tails, "
    "roots",
)
def random(run: Run, claims: Claims, found: Found) -> None:
    """Among 5, 6, 7, 8 and 12 simulated ranks, every multiple of 8 from 16 to 96, 1024, and seven
    numbers of ranks that are drawn from 9 to 1023, every element is within the forward error bound
    of a sum, and all ranks get the same bits.

    Up to 16 ranks take 24 steps, up to 32 ranks four, 1024 ranks one, and others two.

    The bound is derived in ``judging/oracles/clusters.py``. It decides nothing for half precision
    among hundreds of ranks. A hook that gathers is simulated up to 128 ranks, and one that is
    registered by a set-up is not simulated.
    """
    events = _simulated(run, claims, found)
    errors = {event["size"]: _errors(run, claims, "random", event["size"]) for event in events}
    for event in events:
        size = event["size"]
        step, worst = divmod(int(errors[size].argmax()), SCALE_NUMEL)
        worst += SCALES.index("random") * SCALE_NUMEL
        recorded = run.ranks[0].tensors[f"at scale/{size}"]
        got = float(recorded.view(-1, recorded.shape[-1])[step, worst])
        right = float(at_scale(size)[:, worst].mean()) * (size if claims.sum else 1)
        found.require(
            bool((errors[size] <= 1).all()),
            f"{right:.6g}, within the bound of a sum",
            f"{got:.6g} among {size} simulated ranks in step {step}: {got / right:.4g} times the "
            "right result",
        )
        actual = f"{size} simulated ranks: some have others than rank 0"
        found.require(event["alike"], "the same bits on all ranks", actual)
    if events and not found.failures:
        found.checked(0, max(float(error.max()) for error in errors.values()))
        found.note(f"random gradients: right among {_span(run, events)}")


@rule(
    "20.2",
    "Averages large gradients among 5 to 1024 ranks",
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
    "Averages small gradients among 5 to 1024 ranks",
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
