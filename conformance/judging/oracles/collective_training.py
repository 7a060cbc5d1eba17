"""Messages of zeros, constants and tiny values; and calls after a NaN or an infinity, in float64.

``oracles.collective`` has the bound b(x) of one call without error feedback. It holds for zeros,
constants and tiny values as it is: a block of zeros has the bound 0, so that zeros arrive, and the
bound of a tiny block is in proportion to its own largest element.

Poison. The largest magnitude M of a block that has a NaN or an infinity is not a number, so that
blocks(...) and bounded(..., block=n) promise nothing about the other elements of that block, and
bounded(...) without ``block=`` nothing about the other elements that the rank sends in that call;
rounded(...) promises all other elements. Everything else keeps its bound. The NaN or infinity
itself must not arrive as a finite number: nobody would see that it is lost. Under rounded(float16)
an infinity may be the largest float16, with its sign (see 18.14).

Error feedback. Let e' be the error that a rank keeps before a call, and e the one after it. It
sends f = x + e', and l y = x + e' - e arrives, so that

    |l y - x| <= |e'| + |e|,    |e| <= b(f) <= b(|x| + E'),    E' the largest |e'|,

because b grows with magnitudes. Here b of rounded(float16) is 2**-11 |f| + 2**-25, and b of
rounded(bfloat16) is 2**-7 |f| + 2**-133, since one of two neighbours may arrive. The sum f, and
the difference that gives e, are rounded in float32: 2**-22 |f| covers four such roundings. E is
followed from the first call of the object on, with E = 0 before it. In the poisoned elements
nothing is promised, and at most everything is kept: E = |x| + E', without what is not finite. An
error that is itself not finite breaks the next call's bound.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from conformance.judging.oracles.collective import (
    Arrival,
    Call,
    arrivals,
    calls,
    loss_factor,
    require_arrival,
    require_zero_signs,
)
from conformance.judging.oracles.collective_bounds import (
    LARGEST_HALF,
    SLACK,
    claimed_bound,
    largest_nearby,
)
from conformance.judging.oracles.collective_sums import unit_of
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective import SUMMING, operation_of
from conformance.scenarios.collective_messages import CLEARED
from conformance.scenarios.collective_training import OF_LARGE
from conformance.scenarios.model import Scenario
from conformance.subjects.claims import Claims

Pair = messages.Pair
# The messages of an output, the number of the call's parameter, and its step.
Output = tuple[tuple[Pair, ...], int, int]


@dataclass(frozen=True)
class Promise:
    """The promise of a claim about one message.

    Attributes:
        sent: the message, flat in float64.
        deviation: the largest error of each element.
        is_free: the elements about which nothing is promised.
        kept: the largest errors that are kept after the call, for the next one.
        fed: the largest magnitudes that are quantized in the call.
    """

    sent: torch.Tensor
    deviation: torch.Tensor
    is_free: torch.Tensor
    kept: torch.Tensor
    fed: torch.Tensor


def divisor_of(run: Run, call: Call) -> int:
    """Return what a sum of messages is divided by: the size of the group for averages, or 1."""
    return len(run.group(call.rank)) if operation_of(call.form) == "average" else 1


def require_recovery(run: Run, claims: Claims, found: Found) -> None:
    """Require every message of every call, as far as the claims promise it; of the scenario of
    large messages those after NaN and infinities.
    """
    for call in calls(run):
        is_of_large = run.scenario.variant == OF_LARGE
        if is_of_large and run.scenario.steps[call.step] not in messages.POISON:
            continue
        for arrival in arrivals(run, claims, call):
            require_promised(run, claims, found, arrival)


def promises_of_all_steps(run: Run, claims: Claims, index: int) -> dict[Output, Promise]:
    """Return the promises about all calls of one shape, by one object with error feedback."""
    size = len(run.group(0))
    scenario = run.scenario
    steps = range(len(scenario.steps))
    found: dict[Output, Promise] = {}
    if scenario.options[0] in SUMMING:
        for place in range(size):
            (pairs,) = messages.received(scenario, size, place, 0, index)
            of_steps = _promises_of_sums(scenario, claims, size, pairs, index, steps)
            found |= {(pairs, index, step): one for step, one in zip(steps, of_steps, strict=True)}
        return found
    for source in range(size):
        kept: dict[Pair, torch.Tensor] = {}
        for step in steps:
            of_call = _promises_of_step(scenario, claims, size, source, index, step, kept)
            found |= {((pair,), index, step): promise for pair, promise in of_call.items()}
    return found


def require_no_error_in_wait(found: Found, call: Call) -> None:
    """Require that a call that was not made, or broke off, was refused when it was made.

    A refusal of async_op=True comes from the call itself: it is too late in wait().
    """
    use = call.event.get("use_of_lists")
    found.require(
        not call.event["raised_in_wait"],
        "a wait() that returns, or an error of the call itself",
        f"{call}: wait() raised {call.refused}",
        "a wait() that raises"
        + (f", after the caller's list is {CLEARED}" if use == CLEARED else ""),
    )


def require_kept_around(found: Found, call: Call) -> None:
    """Require that a buffer keeps its values around the outputs, if they lie in one."""
    changed = call.event.get("changed_around", 0)
    actual = f"{call}: {changed} elements of the buffer around the outputs have changed"
    cause = "more is written than the message has"
    found.require(not changed, "elements around the outputs as they were", actual, cause)


def note_refusal_of_async(run: Run, found: Found, of_calls: str) -> None:
    """Note the error that refuses async_op=True for some calls that are made without it.

    Args:
        of_calls: the calls.
    """
    refused = [(call.step, call.index) for call in calls(run) if call.refused]
    for event in run.ranks[0].all("refuses_waiting"):
        if (event["step"], event["index"]) not in refused:
            found.note(f"async_op=True is refused for {of_calls}: {event['error']}")
            break
    note_refusal_of_others(run, found)


def note_refusal_of_others(run: Run, found: Found) -> None:
    """Note the error that refuses a call while another one is under way, if there was one."""
    event = run.ranks[0].first("refuses_others")
    if event:
        found.note(f"a call is refused while another one is under way: {event['error']}")


def promise_of(
    scenario: Scenario,
    claims: Claims,
    size: int,
    pairs: tuple[Pair, ...],
    index: int,
    step: int,
) -> Promise:
    """Return the promise about an output of a call, a message or a sum; see :func:`promises`."""
    if scenario.options[0] not in SUMMING:
        return promises(scenario, claims, size, pairs[0][0], index, step)[pairs[0]]
    keeps_errors = claims.has("feedback") and messages.keeps_objects(scenario)
    steps = range(0 if keeps_errors else step, step + 1)
    *_, promise = _promises_of_sums(scenario, claims, size, pairs, index, steps)
    return promise


def _promises_of_sums(
    scenario: Scenario,
    claims: Claims,
    size: int,
    pairs: tuple[Pair, ...],
    index: int,
    steps: range,
) -> Iterator[Promise]:
    """Yield the promise about a sum in each step, from the first call of the object on.

    An all_reduce quantizes the sum again, and may keep the error of that, too.
    """
    kept: dict[Pair, torch.Tensor] = {}
    kept_of_sum: torch.Tensor | float = 0.0
    is_sent = scenario.options[0] == "all_reduce"
    dtype = getattr(torch, scenario.params[index].dtype)
    narrow = claims.options["rounded"]["name"] if claims.has("rounded") else ""
    # The sum is rounded to the dtype of the messages, too.
    unit = max(unit_of(narrow), torch.finfo(dtype).eps)
    for step in steps:
        of_messages: dict[Pair, Promise] = {}
        for source, _ in pairs:
            of_messages |= _promises_of_step(scenario, claims, size, source, index, step, kept)
        parts = [of_messages[pair] for pair in pairs]
        sent = sum((part.sent for part in parts[1:]), parts[0].sent)
        magnitude = sum((_finite(part.sent).abs() for part in parts), torch.zeros_like(sent))
        deviation = sum((part.deviation for part in parts), torch.zeros_like(sent))
        deviation = deviation + len(pairs) * unit * (magnitude + deviation)
        is_free = torch.stack([part.is_free for part in parts]).any(0)
        if is_sent:
            fed = magnitude + deviation + kept_of_sum
            is_free = _poisoned(claims, {(0, 0): _nan_where(is_free)}, anywhere=True)[0, 0]
            loss = SLACK * _loss(claims, fed, {(0, 0): fed}, anywhere=True)
            deviation = deviation + loss + kept_of_sum
            if claims.has("feedback"):
                kept_of_sum = torch.where(is_free, fed, loss)
        of_sources = sum((part.kept for part in parts), torch.zeros_like(sent))
        yield Promise(sent, deviation, is_free, of_sources + kept_of_sum, magnitude + deviation)


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0)


def _nan_where(flags: torch.Tensor) -> torch.Tensor:
    return torch.zeros(flags.shape, dtype=torch.float64).masked_fill(flags, math.nan)


def promises(
    scenario: Scenario, claims: Claims, size: int, source: int, index: int, step: int
) -> dict[Pair, Promise]:
    """Return the promises about the messages that a rank sends in a call.

    Args:
        scenario: the scenario, whose steps before this one decide the errors that are kept.
        claims: the subject's claims.
        size: the size of the group.
        source: the place of the rank.
        index, step: the number of the call's parameter, and its step.
    """
    kept: dict[Pair, torch.Tensor] = {}
    if claims.has("feedback") and messages.keeps_objects(scenario):
        for earlier in range(step):
            _promises_of_step(scenario, claims, size, source, index, earlier, kept)
    return _promises_of_step(scenario, claims, size, source, index, step, kept)


def _promises_of_step(
    scenario: Scenario,
    claims: Claims,
    size: int,
    source: int,
    index: int,
    step: int,
    kept: dict[Pair, torch.Tensor],
) -> dict[Pair, Promise]:
    """Return the promises about the messages of a call; see :func:`promises`.

    Args:
        kept: the largest errors that are kept before the call, by pair; those after it, then.
    """
    found: dict[Pair, Promise] = {}
    has_feedback = claims.has("feedback")
    sent = {
        pair: messages.message(scenario, size, step, index, *pair).double().reshape(-1)
        for pair in messages.sent(scenario, size, source, step, index)
    }
    magnitude = {pair: _finite(values).abs() + kept.get(pair, 0.0) for pair, values in sent.items()}
    anywhere = scenario.options[0] == "all_reduce"
    for pair, is_free in _poisoned(claims, sent, anywhere).items():
        loss = _loss(claims, magnitude[pair], magnitude, anywhere)
        if has_feedback:
            loss = loss * SLACK + 2.0**-22 * magnitude[pair]
        deviation = loss + kept.get(pair, 0.0)
        left = torch.where(is_free, magnitude[pair], loss)
        found[pair] = Promise(sent[pair], deviation, is_free, left, magnitude[pair])
        if has_feedback:
            kept[pair] = left
    return found


def _poisoned(
    claims: Claims, sent: Mapping[Pair, torch.Tensor], anywhere: bool
) -> dict[Pair, torch.Tensor]:
    """Return the elements of each message about which nothing is promised.

    Args:
        anywhere: a block may begin at any element.
    """
    poison = {pair: ~values.isfinite() for pair, values in sent.items()}
    if claims.has("rounded"):
        return poison
    block = 0
    if claims.has("blocks"):
        block = int(claims.options["blocks"]["size"])
    elif "block" in claims.options["bounded"]:
        block = int(claims.options["bounded"]["block"])
    if block and anywhere:
        return {
            pair: largest_nearby(is_poison.double(), block) > 0
            for pair, is_poison in poison.items()
        }
    if block:
        return {pair: _in_block(is_poison, block) for pair, is_poison in poison.items()}
    is_anywhere = any(bool(is_poison.any()) for is_poison in poison.values())
    return {pair: torch.full_like(is_poison, is_anywhere) for pair, is_poison in poison.items()}


def _in_block(flags: torch.Tensor, block: int) -> torch.Tensor:
    """Return for each element whether a flag is set in its block."""
    padded = torch.nn.functional.pad(flags, (0, -len(flags) % block)).view(-1, block)
    return padded.any(1).repeat_interleave(block)[: len(flags)]


def _loss(
    claims: Claims,
    fed: torch.Tensor,
    fed_in_call: Mapping[Pair, torch.Tensor],
    anywhere: bool = False,
) -> torch.Tensor:
    """Return the bound of one call for values of these magnitudes."""
    if claims.has("rounded"):
        if claims.options["rounded"]["name"] == "float16":
            return fed * 2.0**-11 + 2.0**-25
        return fed * 2.0**-7 + 2.0**-133
    largest = max(float(values.max()) for values in fed_in_call.values())
    return SLACK * claimed_bound(claims, fed, torch.full_like(fed, largest), anywhere)


def require_promised(
    run: Run,
    claims: Claims,
    found: Found,
    arrival: Arrival,
    promised: Mapping[Output, Promise] | None = None,
) -> None:
    """Require one message, as far as the claims promise it.

    Args:
        promised: the promises by output, if they are computed already.
    """
    got = arrival.got
    call = arrival.call
    if got is None or len(got) != len(arrival.allowed.exact):
        require_arrival(run, claims, found, arrival)
        return
    if claims.has("rounded") and not claims.has("feedback"):
        # Each element has one or two right values, also NaN and infinities.
        if require_arrival(run, claims, found, arrival):
            require_zero_signs(found, arrival)
        return
    size = len(run.group(call.rank))
    key = arrival.pairs, call.index, call.step
    promise = promised[key] if promised else promise_of(run.scenario, claims, size, *key)
    if not _require_nothing_hidden(claims, found, arrival, promise.sent):
        return
    if not _require_finite(run, found, arrival, promise):
        return
    loss = loss_factor(run, claims) * divisor_of(run, call)
    zero = torch.zeros_like(got)
    exact = torch.where(promise.is_free, zero, promise.sent / loss)
    bound = torch.where(promise.is_free, zero, promise.deviation / abs(loss))
    allowed = replace(
        arrival.allowed,
        exact=exact,
        low=exact - bound,
        high=exact + bound,
        bound=bound,
        two_values=False,
    )
    got = torch.where(promise.is_free, zero, got)
    lost = ((got == 0) & allowed.wrong(got) & (exact != 0)).nonzero().reshape(-1)
    if len(lost) and run.scenario.steps[call.step] in ("tiny", "patches"):
        at = int(lost[0])
        found.require(
            False,
            f"{allowed.low[at].item():.9g} to {allowed.high[at].item():.9g}",
            f"{arrival}, index {at}: 0 ({len(lost)} of {len(got)} elements)",
            "tiny values are lost: a scale has a least value, or is sent in too few bits",
        )
        return
    require_arrival(run, claims, found, replace(arrival, got=got, allowed=allowed))


def _require_nothing_hidden(
    claims: Claims, found: Found, arrival: Arrival, sent: torch.Tensor
) -> bool:
    """Require that no NaN or infinity arrives as a finite number."""
    assert arrival.got is not None
    is_hidden = arrival.got.isfinite() & ~sent.isfinite()
    if claims.options.get("rounded", {}).get("name") == "float16":
        # Divided by a loss factor, the largest float16 is smaller.
        loss = float(claims.options["divided"]["loss"]) if claims.has("divided") else 1.0
        largest = sent.sign() * LARGEST_HALF / loss
        is_hidden &= sent.isnan() | ((arrival.got - largest).abs() > largest.abs() * 2.0**-10)
    hidden = is_hidden.nonzero().reshape(-1)
    if not len(hidden):
        found.checked(int((~sent.isfinite()).any()))
        return True
    at = int(hidden[0])
    return found.require(
        False,
        f"NaN or an infinity, for {sent[at].item()}",
        f"{arrival}, index {at}: {arrival.got[at].item():.9g}",
        "a NaN or an infinity is lost",
    )


def _require_finite(run: Run, found: Found, arrival: Arrival, promise: Promise) -> bool:
    """Require that promised elements are finite."""
    assert arrival.got is not None
    stray = (~arrival.got.isfinite() & ~promise.is_free).nonzero().reshape(-1)
    if not len(stray):
        return True
    at = int(stray[0])
    step = arrival.call.step
    earlier = [kind for kind in run.scenario.steps[:step] if kind in ("nan", "infinite")]
    cause = ""
    if promise.is_free.any():
        cause = "a NaN or an infinity spreads beyond its block"
    elif earlier:
        cause = "a NaN or an infinity of an earlier call is kept, in an error or in a scale"
    elif not promise.sent[at]:
        cause = "zeros are divided by their scale, which is 0"
    return found.require(
        False,
        f"a finite number, for {promise.sent[at].item():.9g}",
        f"{arrival}, index {at}: {arrival.got[at].item()} "
        f"({len(stray)} of {len(arrival.got)} elements)",
        cause,
    )
