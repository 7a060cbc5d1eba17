"""Values that may arrive through a quantized collective, in float64.

Let x be an element of a message, l the claimed loss factor (1 without ``divided``) and y the
element that arrives, so that l y stands for x. The claims bound the error:

    rounded(float16)
        l y is the nearest float16 to x, ties to even. Beyond the range of float16 it is either
        infinite or the largest float16, with the sign of x.
    rounded(bfloat16)
        l y is one of the two bfloat16 next to x, so that both rounding to nearest and truncation
        are right.
    blocks(q, size=n)
        Let M be the largest magnitude in the block of n elements that holds x. With Q the largest
        value of the format q, r half of its relative step and h half of its smallest step, x is
        sent as x Q / M, which is rounded to within max(r |x| Q / M, h). So
        |l y - x| <= max(r |x|, h M / Q).
    bounded(relative=p)
        |l y - x| <= p M, with M the largest magnitude in the block or, without ``block=``, the
        largest that the rank sends in this call.

Roundings. A scale is a quotient in float32 and is multiplied by values in float32: the bounds of
blocks(...) and bounded(...) are widened by ``SLACK``. The division by l and the cast to the
output's dtype may round a few times in that dtype: 4 eps |y| and its smallest subnormal are added,
except for rounded(...) without a loss factor, which has to give the exact bits.

Range. A float64 below the smallest scale of float32 may arrive as zero. One beyond float32 arrives
within its bound, as infinite, or as a number near float32's largest, with its sign. Its scale may
overflow: then its block, or without blocks all that the rank sends, may also be NaN or infinite.

A rank's own part need not pass through the quantization: it may also arrive as x / l.

Messages of the first step of the plain scenario only have to be told apart (18.1; 18.2 judges how
much is lost): the bound there is at least an eighth of the largest magnitude that the rank sends.

If the loss factor is ignored, 18.3 fails; the other rules then judge against l = 1. Which of the
two holds is decided by the first tensor that arrived: by the number of elements nearer to x than
to x / l.

Bytes. A message may take its share of float32's bytes: a half for rounded(...), for blocks(...)
one byte per element and a float32 scale per block, ``ratio`` for bounded(...). It may be padded to
whole blocks, with a scale, and have ``HEADER`` bytes beside its values.

Error feedback. Let e be the error that a rank keeps. The sum of N arrivals of the same x is
N x - e, so that their mean is off by at most the bound of one call divided by N. A call sends
x + e, with e at most a twentieth of x, which makes its bound a little larger: a factor of 1.1
covers that. Roundings of float32 add 2**-21 |x| + 2**-40.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from conformance.judging.oracles.allowed_values import Allowed
from conformance.judging.oracles.collective_bounds import (
    LARGEST,
    LOST,
    SLACK,
    beyond_float32,
    claimed_bound,
    largest_around,
    neighbours,
)
from conformance.judging.oracles.collective_causes import (
    ignored,
    lost_value,
    mistaken,
    nothing_written,
)
from conformance.judging.oracles.collective_sums import allowed_sum, cause_of_wrong_sum
from conformance.judging.oracles.kept_by_run import MOST_KEPT, KeptByRun
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective import (
    OPERATIONS,
    PLAIN,
    SPECIAL,
    SUMMING,
    TO_ALL,
    operation_of,
)
from conformance.subjects.claims import Claims

_EARLIER = 24  # calls whose messages are compared with one that is wrong
ROUGH = "crafted"  # the kind of input that tells messages apart in the plain scenario


@dataclass(frozen=True)
class Call:
    """A recorded call of the collective on one rank."""

    rank: int
    step: int
    index: int
    form: str
    event: dict[str, Any] = field(hash=False, compare=False)

    @property
    def refused(self) -> str:
        """The error of a refusal, empty if the call was not refused."""
        return str(self.event["refused"])

    @property
    def was_not_made(self) -> bool:
        # If rank 0 refuses a call, its peers do not make it: they would wait for rank 0.
        return self.refused == "not asked"

    def __str__(self) -> str:
        form = f", call form {self.form!r}" if self.form else ""
        return f"rank {self.rank}, step {self.step}, p{self.index}{form}"


@dataclass(frozen=True)
class Arrival:
    """An output of a call at the rank in ``place``: a message, or the sum of messages.

    Attributes:
        pairs: the places (from, to) of the messages.
        source: the rank that sent the message; -1 if it is a sum.
    """

    call: Call
    pairs: tuple[messages.Pair, ...]
    source: int
    place: int
    got: torch.Tensor | None
    allowed: Allowed

    @property
    def is_sum(self) -> bool:
        return self.source < 0

    def __str__(self) -> str:
        output = "the reduced output" if self.is_sum else f"the message from rank {self.source}"
        return f"{self.call}, {output}"


def calls(run: Run) -> Iterator[Call]:
    """Yield all recorded calls."""
    for rank in run.ranks:
        for event in rank.all("called"):
            form = messages.form_of(run.scenario, event["index"])
            yield Call(rank.rank, event["step"], event["index"], form, event)


def group_of(run: Run, call: Call) -> tuple[int, ...]:
    """Return the global ranks of a call's group."""
    return messages.group_of(run.scenario, run.world, call.rank, call.step, call.index)


def arrivals(run: Run, claims: Claims, call: Call) -> Iterator[Arrival]:
    """Yield the outputs of a call, in order."""
    group = group_of(run, call)
    is_sum = run.scenario.options[0] in SUMMING
    for output, pairs in enumerate(_outputs(run, call)):
        tensor = arrived_tensor(run, call, output)
        got = None if tensor is None else tensor.reshape(-1).double()
        allowed = _kept_allowed(run, claims, call, pairs)
        source = -1 if is_sum else group[pairs[0][0]]
        yield Arrival(call, pairs, source, group.index(call.rank), got, allowed)


def arrived_tensor(run: Run, call: Call, output: int) -> torch.Tensor | None:
    """Return an output of a call as it was recorded."""
    record = next(rank for rank in run.ranks if rank.rank == call.rank)
    return record.tensors.get(f"{call.step}/arrived/p{call.index}/{output}")


def require_calls(
    run: Run,
    claims: Claims,
    found: Found,
    kinds: Sequence[str] = (),
    params: Sequence[int] | None = None,
    forms: Sequence[str] = (),
    may_refuse: bool = False,
) -> None:
    """Require that every message of the selected calls arrives.

    The calls are those with inputs of one of ``kinds``, for one of ``params``, in one of ``forms``.
    """
    for call in calls(run):
        is_selected = (
            (not kinds or run.scenario.steps[call.step] in kinds)
            and (params is None or call.index in params)
            and (not forms or call.form in forms)
        )
        if is_selected and may_refuse and call.refused:
            found.checked(1)
        elif is_selected:
            require_call(run, claims, found, call)


def require_call(
    run: Run, claims: Claims, found: Found, call: Call, is_exact: bool = False
) -> None:
    """Require that a call was not refused and that all its messages arrived, perhaps exactly."""
    if call.was_not_made:
        return
    shape = run.scenario.params[call.index].shape
    actual = f"{call}, of shape {shape}: it raised {call.refused}"
    if not found.require(not call.refused, "the collective", actual):
        return
    for arrival in arrivals(run, claims, call):
        require_arrival(run, claims, found, arrival, is_exact)


def require_arrival(
    run: Run, claims: Claims, found: Found, arrival: Arrival, is_exact: bool = False
) -> bool:
    """Require the right values of one message; return whether they are."""
    got = arrival.got
    allowed = arrival.allowed
    expected = f"{len(allowed.exact)} elements"
    if got is None:
        return found.require(False, expected, f"{arrival}: no tensor")
    if len(got) != len(allowed.exact):
        return found.require(False, expected, f"{arrival}: {len(got)} elements")
    is_own = arrival.pairs[0][0] == arrival.place and not arrival.is_sum
    is_wrong = got != allowed.exact if is_exact else allowed.wrong(got, is_own)
    wrong = is_wrong.nonzero().reshape(-1)
    if not len(wrong):
        margin = None
        if not allowed.two_values and len(got):
            bound = allowed.bound + allowed.tolerance(allowed.exact)
            # An error of 0 beside a bound of 0 uses nothing of the bound, nor does an infinity.
            used = ((got - allowed.exact).abs() / bound).nan_to_num(0.0, 0.0, 0.0)
            for unbounded in (allowed.is_free, allowed.may_overflow):
                if unbounded is not None:
                    used = used.masked_fill(unbounded, 0.0)
            margin = used.max().item()
        found.checked(1, margin)
        return True
    at = int(wrong[0])
    is_rounded = is_exact and not operation_of(arrival.call.form)
    cause = "integers are rounded" if is_rounded else _cause(run, claims, arrival, at)
    return found.require(
        False,
        _describe_allowed(allowed, at, is_exact),
        f"{arrival}, index {at}: {got[at].item():.9g} ({len(wrong)} of {len(got)} elements differ)",
        cause,
    )


def require_zero_signs(found: Found, arrival: Arrival) -> None:
    """Require the sign of every zero."""
    if arrival.is_sum:
        # The sum of zeros of both signs has the sign of neither.
        return
    assert arrival.got is not None
    exact = arrival.allowed.exact
    wrong = ((exact == 0) & (arrival.got.signbit() != exact.signbit())).nonzero().reshape(-1)
    first = ", ".join(map(str, wrong[:1].tolist()))
    actual = f"{arrival}: a zero with another sign, index {first}"
    found.require(not len(wrong), "zeros with the signs that were sent", actual)


def loss_factor(run: Run, claims: Claims) -> float:
    """Return the factor that the arrived values are divided by: the claimed one, or 1."""
    loss = float(claims.options["divided"]["loss"]) if claims.has("divided") else 1.0
    first = next((call for call in calls(run) if not call.refused), None)
    if first is None or loss == 1.0:
        return loss
    outputs = _outputs(run, first)
    group = group_of(run, first)
    own = group.index(first.rank)
    # A subject may forget to divide the rank's own part, which is then the one to blame.
    number = next((n for n, pairs in enumerate(outputs) if pairs[0][0] != own), 0)
    tensor = arrived_tensor(run, first, number)
    if tensor is None:
        return loss
    got = tensor.double().reshape(-1)
    parts = [
        messages.message(run.scenario, len(group), first.step, first.index, *pair)
        .double()
        .reshape(-1)
        for pair in outputs[number]
    ]
    sent = sum(parts[1:], parts[0])
    if len(sent) != len(got):
        return loss
    error_undivided = (got - sent).abs()
    error_divided = (got - sent / loss).abs()
    nearer_undivided = (error_undivided < error_divided).sum()
    nearer_divided = (error_undivided > error_divided).sum()
    return 1.0 if nearer_undivided > nearer_divided else loss


def _outputs(run: Run, call: Call) -> list[tuple[messages.Pair, ...]]:
    """Return the places (from, to) of the messages of each output of a call, in their order."""
    group = group_of(run, call)
    place = group.index(call.rank)
    return messages.received(run.scenario, len(group), place, call.step, call.index)


# All ranks of a group get the same sum.
_kept = KeptByRun[Allowed]()


def _kept_allowed(
    run: Run, claims: Claims, call: Call, pairs: tuple[messages.Pair, ...]
) -> Allowed:
    """Return the values that may arrive in an output of a call."""
    compute = functools.partial(_allowed, run, claims, call, pairs, call.step)
    if math.prod(run.scenario.params[call.index].shape) > MOST_KEPT:
        return compute()
    key = claims, group_of(run, call), call.step, call.index, call.form, pairs
    return _kept.get(run, key, compute)


def _allowed(
    run: Run, claims: Claims, call: Call, pairs: Sequence[messages.Pair], step: int
) -> Allowed:
    """Return the values that may arrive of a message, or of the sum of messages."""
    parts = [_allowed_message(run, claims, call, *pair, step) for pair in pairs]
    collective = run.scenario.options[0]
    if collective not in SUMMING:
        (allowed,) = parts
        return allowed
    narrow = claims.options["rounded"]["name"] if claims.has("rounded") else ""
    dtype = getattr(torch, run.scenario.params[call.index].dtype)
    total = allowed_sum(
        parts,
        functools.partial(_bound_of_sum, claims) if collective == "all_reduce" else None,
        narrow,
        torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0,
        operation_of(call.form),
        loss_factor(run, claims),
    )
    if _is_rough(run, step) and not narrow:
        # Once, and not for each of the messages.
        largest = max(float(part.exact.abs().max()) for part in parts) if len(total.exact) else 0.0
        rough = (largest / 8 - total.bound).clamp(min=0)
        total = replace(
            total, low=total.low - rough, high=total.high + rough, bound=total.bound + rough
        )
    return total


def _bound_of_sum(claims: Claims, magnitude: torch.Tensor) -> torch.Tensor:
    """Return the bound of quantizing a sum of these magnitudes."""
    if claims.has("rounded") or not len(magnitude):
        # The roundings of the sum count this one.
        return torch.zeros_like(magnitude)
    largest = magnitude.max().expand_as(magnitude)
    return SLACK * claimed_bound(claims, magnitude, largest, anywhere=True)


def _allowed_message(
    run: Run, claims: Claims, call: Call, source: int, to: int, step: int
) -> Allowed:
    """Return the values that may arrive of a message between two places of the group."""
    size = len(group_of(run, call))
    loss = loss_factor(run, claims)
    given = messages.message(run.scenario, size, step, call.index, source, to)
    message = messages.as_reals(given)
    sent = message.double()
    is_rounded = claims.has("rounded")
    may_overflow = None
    if is_rounded:
        dtype = claims.options["rounded"]["name"]
        low, high = neighbours(message, dtype)
        if message.dtype is torch.bfloat16:
            # The largest float16 is none of its numbers.
            low, high = low.bfloat16().double(), high.bfloat16().double()
        bound = sent.abs() * 2.0**-7 + 2.0**-133
        if dtype == "float16":
            bound = sent.abs() * 2.0**-11 + 2.0**-25
    else:
        largest, claimed = _bound(run, claims, call, sent, source, step, given.is_complex())
        bound = SLACK * claimed
        low, high = beyond_float32(sent, bound)
        may_overflow = largest > LARGEST / 2
    relative = 0.0
    smallest = 0.0
    # Rounded values need no other operation, and integers are not divided.
    if message.is_floating_point() and not (is_rounded and loss == 1.0):
        info = torch.finfo(message.dtype)
        relative = 4 * info.eps
        smallest = LOST if message.dtype is torch.float64 else info.tiny * info.eps
    return Allowed(
        exact=sent / loss,
        # A negative factor exchanges the two ends.
        low=torch.minimum(low / loss, high / loss),
        high=torch.maximum(low / loss, high / loss),
        two_values=is_rounded,
        bound=bound / abs(loss),
        relative_rounding=relative,
        smallest_rounding=smallest,
        may_overflow=may_overflow,
    )


def _bound(
    run: Run,
    claims: Claims,
    call: Call,
    sent: torch.Tensor,
    source: int,
    step: int,
    is_complex: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what bounds depend on, and the largest error of each element.

    The error is a rough one in the step that 18.1 reads. Blocks of complex elements may hold their
    parts in any order, or magnitudes: the bound of all is that of the largest possible magnitude.
    """
    size = len(group_of(run, call))
    largest = 0.0
    for pair in messages.sent(run.scenario, size, source, step, call.index):
        message = messages.message(run.scenario, size, step, call.index, *pair)
        if message.numel():
            largest = max(largest, float(messages.as_reals(message).double().abs().max()))
    collective = run.scenario.options[0]
    if is_complex:
        largest *= math.sqrt(2)
        sent = torch.full_like(sent, largest)
    largest_sent = torch.full_like(sent, largest)
    anywhere = collective == "all_reduce"
    bound = claimed_bound(claims, sent, largest_sent, anywhere)
    if _is_rough(run, step) and collective not in SUMMING:
        bound = torch.maximum(bound, largest_sent / 8)
    return largest_around(claims, sent, largest_sent, anywhere), bound


def _is_rough(run: Run, step: int) -> bool:
    """Whether a step's messages only have to be told apart."""
    return run.scenario.name == PLAIN.name and run.scenario.steps[step] == ROUGH


def _describe_allowed(allowed: Allowed, at: int, is_exact: bool) -> str:
    low = allowed.low[at].item()
    high = allowed.high[at].item()
    exact = allowed.exact[at].item()
    if is_exact:
        return f"{exact:.17g}, or an error"
    if low == high or math.isnan(low):
        return f"{low:.9g} (exact: {exact:.9g})"
    if allowed.two_values:
        return f"{low:.9g} or {high:.9g} (exact: {exact:.9g})"
    return f"from {low:.9g} to {high:.9g} (exact: {exact:.9g})"


def _cause(run: Run, claims: Claims, arrival: Arrival, at: int) -> str:
    """Return the known mistake that gives these values, or an empty text if none does.

    ``at`` is the first element that is wrong.
    """
    got = arrival.got
    allowed = arrival.allowed
    assert got is not None
    if got.isnan().all():
        return nothing_written(arrival.call.event)
    if run.scenario.name == SPECIAL.name:
        return lost_value(allowed.exact[at].item(), got[at].item())
    if not got.any():
        return (
            "only zeros arrive: zeros are sent, the output is cleared, or the receive buffer is "
            "read before the message is there"
        )
    if arrival.is_sum:
        return _cause_of_sum(run, claims, arrival)
    rtol = 1e-3 if allowed.has_rounding else 0.0
    for name, value in mistaken(allowed, loss_factor(run, claims)).items():
        if torch.allclose(got, value, rtol=rtol, atol=0.0):
            return name
    if other := _other_message(run, claims, arrival.call, got):
        return f"it is the message {other}"
    if allowed.two_values and torch.equal(got.sort().values, allowed.low.sort().values):
        return "these are its elements in another order"
    error = (got - allowed.exact).abs()
    if not allowed.two_values and (error <= allowed.bound.max()).all():
        return "a scale is the largest magnitude of more than its block"
    twice = 2 * allowed.bound + allowed.tolerance(allowed.exact)
    if not allowed.two_values and (error <= twice).all():
        return "up to twice the bound is lost: values are truncated, not rounded to the nearest"
    is_contiguous = run.scenario.params[arrival.call.index].is_contiguous
    error = (got.sort().values - allowed.exact.sort().values).abs()
    if not is_contiguous and (error <= 2 * allowed.bound.max()).all():
        return "elements are taken in the order of memory"
    return ignored(run.scenario, arrival.call.form)


def _cause_of_sum(run: Run, claims: Claims, arrival: Arrival) -> str:
    """Return the known mistake that gives these values of a sum, or an empty text."""
    call = arrival.call
    assert arrival.got is not None
    parts = [_allowed_message(run, claims, call, *pair, call.step) for pair in arrival.pairs]
    if operation := operation_of(call.form):
        return (
            f"not the result of op={OPERATIONS[operation]}: another operation, group or divisor, a "
            "lost sign, or a coarser rounding"
        )
    of_group = "the group is ignored" if run.scenario.groups else ""
    return cause_of_wrong_sum(arrival.got, parts, arrival.place) or of_group


def _other_message(run: Run, claims: Claims, call: Call, got: torch.Tensor) -> str:
    """Return the sender and receiver of the message that arrived instead; empty if none matches."""
    # A single element equals others by chance.
    if len(got) < 2:
        return ""
    group = group_of(run, call)
    places = range(len(group))
    # This call first, and then earlier ones, whose buffers may be read again.
    before = range(max(0, call.step - _EARLIER), call.step)
    for step, source, to in product([call.step, *before], places, places):
        other = _allowed_message(run, claims, call, source, to, step)
        if len(other.exact) == len(got) and not other.wrong(got).any():
            receiver = "" if run.scenario.options[0] in TO_ALL else f" to rank {group[to]}"
            earlier = "" if step == call.step else f" in step {step}"
            return f"from rank {group[source]}{receiver}{earlier}"
    return ""
