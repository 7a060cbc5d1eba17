"""Error feedback over calls whose values change.

Let x_t be what a rank sends in the call t, e_t the error that it keeps after that call, and y_t the
arriving values, times a loss factor. With e_0 = 0 and y_t = x_t + e_(t-1) - e_t,

    y_1 + ... + y_t = x_1 + ... + x_t - e_t.

So after every call the sums of all arriving and of all sent values differ by at most the bound of
the last error, whatever the errors before it were. ``oracles.collective_training`` has that bound
E_t, which follows the errors from the first call on. It is small again a few calls after a large
one. A sum of messages has an error for each of them, and an all_reduce one more for the sum.

Roundings are made up for by nobody: each call adds ``ROUNDING`` times the magnitude that it
quantizes, once for each message and for the sum. That covers the addition and the subtraction of
errors, the multiplication by a scale, the sum itself, and the division by a loss factor. What
arrives in float16 or bfloat16 is rounded to that, and a sum once for each message: eps times the
magnitude covers two such roundings.

Averages are judged as sums: y_t is the arriving value times the number W of ranks. An all_reduce
may quantize the average in place of the sum, and keep that error: times W it is within the bound
for the sum, since bounds grow in proportion to values, but for float16's least error of 2**-25,
which is then W 2**-25.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch

from conformance.judging.oracles.collective import (
    Arrival,
    arrivals,
    calls,
    loss_factor,
    require_arrival,
)
from conformance.judging.oracles.collective_training import (
    Output,
    Promise,
    divisor_of,
    promises_of_all_steps,
    require_promised,
)
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.subjects.claims import Claims

ROUNDING = 2.0**-20
HALF_OF_SMALLEST_HALF = 2.0**-25
_SMALLEST = 2.0**-149
_MOST_FAILURES = 8


def require_long_run(run: Run, claims: Claims, found: Found) -> None:
    """Require every message of a long run, and that every rank made all its calls.

    With error feedback all calls together have lost no more than the last error, too.
    """
    for rank in run.ranks:
        refused = rank.first("refuses_async")
        if refused:
            found.note(f"rank {rank.rank} refuses async_op=True: calls have no async_op")
        made = len(list(rank.all("called")))
        wanted = len(run.scenario.steps)
        found.require(made == wanted, f"{wanted} calls", f"rank {rank.rank}: {made} calls")
    promised = promises_of_all_steps(run, claims, 0) if claims.has("feedback") else None
    for call in calls(run):
        for arrival in arrivals(run, claims, call):
            if promised is None:
                require_arrival(run, claims, found, arrival)
            else:
                require_promised(run, claims, found, arrival, promised)
        # Likely causes take long to find, and are the same in hundreds of calls.
        if len(found.failures) >= _MOST_FAILURES:
            return
    if promised is not None and not found.failures:
        cause = "an error is lost: errors are cleared, or kept for some of the calls"
        require_nothing_lost(run, claims, found, cause, promised)


def require_nothing_lost(
    run: Run,
    claims: Claims,
    found: Found,
    cause: str = "",
    promised: Mapping[Output, Promise] | None = None,
) -> None:
    """Require after every call that all calls together have lost no more than the last error.

    Args:
        cause: the likely cause if they have; the change of scales if it is empty.
        promised: the promises by output, if they are computed already.
    """
    loss = loss_factor(run, claims)
    if promised is None:
        promised = {
            key: promise
            for index in range(len(run.scenario.params))
            for key, promise in promises_of_all_steps(run, claims, index).items()
        }
    narrow = claims.options["rounded"]["name"] if claims.has("rounded") else ""
    zero = torch.zeros(())
    difference: dict[tuple[int, ...], torch.Tensor] = defaultdict(lambda: zero)
    rounding: dict[tuple[int, ...], torch.Tensor] = defaultdict(lambda: zero)
    for call in calls(run):
        for output, arrival in enumerate(arrivals(run, claims, call)):
            key = call.rank, call.index, output
            promise = promised[arrival.pairs, call.index, call.step]
            count = f"{len(promise.sent)} elements"
            got = arrival.got
            if not found.require(got is not None, count, f"{arrival}: no tensor"):
                return
            assert got is not None
            if not found.require(len(got) == len(promise.sent), count, f"{arrival}: {len(got)}"):
                return
            divisor = divisor_of(run, call)
            difference[key] = difference[key] + got * loss * divisor - promise.sent
            of_call = (len(arrival.pairs) + 1) * (ROUNDING * promise.fed + _SMALLEST)
            of_dtype = _of_half_precision(run.scenario.params[call.index].dtype, promise.fed)
            rounding[key] = rounding[key] + of_call + len(arrival.pairs) * of_dtype
            bound = promise.kept + rounding[key]
            if divisor > 1 and narrow == "float16":
                # The average may be what is sent: its smallest step is that of W sums.
                bound = bound + divisor * HALF_OF_SMALLEST_HALF
            used = difference[key].abs() / bound
            at = int(used.nan_to_num(torch.inf).argmax())
            is_within = bool(used[at] <= 1)
            if not is_within:
                found.require(
                    False,
                    f"a sum of all calls within {bound[at].item():.3g}",
                    f"{arrival}, index {at}: off by {difference[key][at].abs().item():.3g} after "
                    f"{call.step + 1} calls",
                    cause or "an error is lost, or changed, as values of another scale follow",
                )
                return
            found.checked(1, float(used[at]))


def _of_half_precision(dtype: str, fed: torch.Tensor) -> torch.Tensor:
    """Return how far two roundings to a dtype of half precision move an arrival; 0 for others."""
    if dtype not in ("float16", "bfloat16"):
        return torch.zeros_like(fed)
    info = torch.finfo(getattr(torch, dtype))
    return info.eps * (fed + info.tiny)


def require_mean_of_calls(
    found: Found, arrival: Arrival, tensors: list[torch.Tensor], count: int
) -> None:
    """Require that ``count`` tensors arrived for the same message, and that their mean is right.

    ``arrival`` is the first arrival.
    """
    actual = f"{arrival}: {len(tensors)} arrived"
    if not found.require(len(tensors) == count, f"{count} tensors", actual):
        return
    exact = arrival.allowed.exact
    bound_of_call = arrival.allowed.bound
    bound = 1.1 * bound_of_call / count + 2.0**-21 * exact.abs() + 2.0**-40
    bound = bound + arrival.allowed.not_fed_back
    # What arrives is rounded to the dtype of the message, and nobody makes up for that.
    bound = bound + arrival.allowed.tolerance(exact.abs() + bound_of_call)
    total = torch.zeros_like(exact)
    for tensor in tensors:
        total = total + tensor.reshape(-1).double()
    error = (total / count - exact).abs()
    at = int((error / bound).argmax())
    are_same = all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    found.require(
        bool((error <= bound).all()),
        f"a mean within {bound[at].item():.3g}",
        f"{arrival}, index {at}: off by {error[at].item():.3g} over {count} calls; "
        f"one call's bound is {bound_of_call[at].item():.3g}",
        "nothing is fed back: each call loses the same again" if are_same else "",
    )
