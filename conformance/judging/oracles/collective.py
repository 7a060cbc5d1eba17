"""TODO: conformance/judging/oracles/collective.py."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios import collective_messages as messages
from conformance.scenarios.collective import PLAIN, SPECIAL
from conformance.subjects.claims import Claims
from conformance.subjects.kinds.collective import NARROW

LARGEST_HALF = torch.finfo(torch.float16).max


SLACK = 1 + 2.0**-16  # of a scale that is a quotient of float32, and what is multiplied by it


FLOAT32 = 4


HEADER = 256  # bytes that a message may have beside its values


ROUGH = "crafted"  # what tells messages apart, in the plain scenario


# What arrives in a call of this form is something else: the likely cause.
_IGNORED = {
    "positional": "an argument is not seen where it is given by position",
    "keywords": "an argument is not seen where it is given by keyword",
    "group_src": "group_src is ignored",
    **dict.fromkeys(("splits", "positional_splits"), "the split sizes are ignored"),
}


@dataclass(frozen=True)
class _Call:
    """A call on record."""

    rank: int
    step: int
    index: int
    form: str
    event: dict[str, Any] = field(hash=False, compare=False)

    @property
    def refused(self) -> str:
        return str(self.event["refused"])

    @property
    def not_asked(self) -> bool:
        return self.refused == "not asked"

    def __str__(self) -> str:
        form = f", arguments as {self.form}" if self.form else ""
        return f"rank {self.rank}, step {self.step}, p{self.index}{form}"


@dataclass(frozen=True)
class _Right:
    """What may arrive of a message, flat in float64.

    Attributes:
        exact: what was sent, divided by the loss factor.
        low, high: the two values beside it, where it is ``grid``; or else the bounds of an interval.
        bound: the largest error that it may have.
        rounding: the relative error of a few operations in the dtype that it arrives in, and the smallest value of that.
    """

    exact: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    grid: bool
    bound: torch.Tensor
    rounding: tuple[float, float]

    def wrong(self, got: torch.Tensor, own: bool = False) -> torch.Tensor:
        """Return which elements are none that may arrive; at a rank from itself they may also be as they were."""
        if self.grid:
            right = self._near(got, self.low) | self._near(got, self.high)
        else:
            right = (got >= self.low - self.tolerance(self.low)) & (got <= self.high + self.tolerance(self.high))
        return ~(right | (self._near(got, self.exact) if own else False))

    def _near(self, got: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (got == value) | (got.isnan() & value.isnan()) | ((got - value).abs() <= self.tolerance(value))

    def tolerance(self, value: torch.Tensor) -> torch.Tensor:
        relative, smallest = self.rounding
        return (relative * value.abs() + smallest).nan_to_num(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class _Arrival:
    """What has arrived at a place of a call, and what should have."""

    call: _Call
    source: int
    place: int
    got: torch.Tensor | None
    right: _Right

    def __str__(self) -> str:
        return f"{self.call}, from rank {self.source}"


def _calls(run: Run) -> Iterator[_Call]:
    for rank in run.ranks:
        for event in rank.all("called"):
            yield _Call(rank.rank, event["step"], event["index"], messages.form_of(run.scenario, event["index"]), event)


def _hold(
    run: Run,
    claims: Claims,
    found: Found,
    kinds: tuple[str, ...] = (),
    params: list[int] | None = None,
    forms: tuple[str, ...] = (),
    may_refuse: bool = False,
) -> None:
    """Require that everything arrives of the calls that feed one of ``kinds``, are of one of ``params``, made in one of ``forms``."""
    for call in _calls(run):
        if (kinds and run.scenario.steps[call.step] not in kinds) or (params is not None and call.index not in params):
            continue
        if forms and call.form not in forms:
            continue
        if may_refuse and call.refused:
            found.checked(1)
            continue
        _require(run, claims, found, call)


def _require(run: Run, claims: Claims, found: Found, call: _Call, exact: bool = False) -> None:
    """Require that a call was not refused and that everything of it has arrived; as it was, if ``exact``."""
    if call.not_asked:
        return
    shape = run.scenario.params[call.index].shape
    if not found.require(not call.refused, "the collective", f"{call}, of shape {shape}: it raised {call.refused}"):
        return
    for arrival in _arrivals(run, claims, call):
        _judge(found, run, claims, arrival, exact)


def _judge(found: Found, run: Run, claims: Claims, arrival: _Arrival, exact: bool = False) -> bool:
    got, right = arrival.got, arrival.right
    shape = f"{len(right.exact)} elements"
    if got is None or len(got) != len(right.exact):
        return found.require(False, shape, f"{arrival}: {'no tensor' if got is None else f'{len(got)} elements'}")
    group = run.group(arrival.call.rank)
    own = group[arrival.place] == arrival.source
    wrong = (got != right.exact if exact else right.wrong(got, own)).nonzero().reshape(-1)
    if not right.grid and not len(wrong) and len(got):
        found.checked(0, ((got - right.exact).abs() / (right.bound + right.tolerance(right.exact))).nan_to_num(0.0).max().item())
    if found.require(not len(wrong), "", ""):
        return True
    at, failure = int(wrong[0]), found.failures[-1]
    failure.expected = _expected(right, at, exact)
    failure.actual = f"{arrival}, index {at}: {got[at].item():.9g} ({len(wrong)} of {len(got)} elements differ)"
    failure.cause = "integers are rounded" if exact else _cause(run, claims, arrival, at)
    return False


def _expected(right: _Right, at: int, exact: bool) -> str:
    low, high, fed = (tensor[at].item() for tensor in (right.low, right.high, right.exact))
    if exact:
        return f"{fed:.17g}, or an error"
    if low == high or low != low:
        return f"{low:.9g}, of {fed:.9g}"
    return f"{low:.9g} or {high:.9g}, of {fed:.9g}" if right.grid else f"{low:.9g} to {high:.9g}, of {fed:.9g}"


def _cause(run: Run, claims: Claims, arrival: _Arrival, at: int) -> str:
    """Name the mistake that makes this of what was sent, where it is a known one; ``at`` is the first element that is wrong."""
    call, got, right = arrival.call, arrival.got, arrival.right
    assert got is not None
    if got.isnan().all():
        return "nothing is written"
    if run.scenario.name == SPECIAL.name:
        return _lost_value(right.exact[at].item(), got[at].item())
    if not got.any():
        return "zeros arrive: what is received is read before it is there"
    for name, value in _mistaken(right, _loss(run, claims)).items():
        if torch.allclose(got, value, rtol=0.0 if right.rounding == (0.0, 0.0) else 1e-3, atol=0.0):
            return name
    group = run.group(call.rank)
    for step, source, to in product([call.step, *range(call.step)], range(len(group)), range(len(group))):
        other = _right(run, claims, call, source, to, step)
        if len(got) > 1 and len(other.exact) == len(got) and not other.wrong(got).any():
            of = "" if step == call.step else f" in step {step}"
            return f"it is what rank {group[source]} sends{'' if run.scenario.options[0] == 'all_gather' else f' rank {group[to]}'}{of}"
    if right.grid and torch.equal(got.sort().values, right.low.sort().values):
        return "these are its elements in another order"
    error = (got - right.exact).abs()
    if not right.grid and (error <= right.bound.max()).all():
        return "a scale is the largest of more than its block"
    if not right.grid and (error <= 2 * right.bound + right.tolerance(right.exact)).all():
        return "up to twice what it may be is lost: it is cut off, not rounded to the nearest"
    if run.scenario.params[call.index].layout != "contiguous":
        return "elements are taken in the order of memory"
    return _IGNORED.get(call.form, "the group is ignored, or ranks are taken for places in it" if run.scenario.groups else "")


def _lost_value(fed: float, got: float) -> str:
    if math.isnan(fed):
        return "NaN is lost"
    if math.isinf(fed):
        return "an infinity is lost"
    return "subnormal values are flushed to zero" if got == 0 else ""


def _mistaken(right: _Right, loss: float) -> dict[str, torch.Tensor]:
    """Return what known mistakes make of a message."""
    exact = right.exact
    scaled = {"it is divided twice": exact / loss, "it is multiplied by the factor": exact * loss * loss} if loss != 1.0 else {}
    rounded = {"it is rounded to bfloat16": exact.bfloat16().double(), "it is rounded toward zero": _toward_zero(exact)}
    return {"it is what was fed: it is not rounded": exact, **scaled, **(rounded if right.grid else {})}


def _toward_zero(values: torch.Tensor) -> torch.Tensor:
    """Return values rounded to float16 toward zero."""
    nearest = values.half()
    beyond = nearest.double().abs() > values.abs()
    return torch.where(beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest).double()


def _arrivals(run: Run, claims: Claims, call: _Call) -> Iterator[_Arrival]:
    group = run.group(call.rank)
    pairs = messages.received(run.scenario, len(group), group.index(call.rank), call.step, call.index)
    for k, (source, to) in enumerate(pairs):
        tensor = _tensor(run, call, k)
        got = None if tensor is None else tensor.reshape(-1).double()
        yield _Arrival(call, group[source], group.index(call.rank), got, _right(run, claims, call, source, to, call.step))


def _tensor(run: Run, call: _Call, k: int) -> torch.Tensor | None:
    return next(rank for rank in run.ranks if rank.rank == call.rank).tensors.get(f"{call.step}/arrived/p{call.index}/{k}")


def _right(run: Run, claims: Claims, call: _Call, source: int, to: int, step: int) -> _Right:
    """Return what may arrive of the message from the rank in one place of the group to that in another."""
    size, loss = len(run.group(call.rank)), _loss(run, claims)
    fed = messages.message(run.scenario, size, step, call.index, source, to).reshape(-1)
    sent = fed.double()
    epsilon, smallest = (
        (4 * torch.finfo(fed.dtype).eps, torch.finfo(fed.dtype).tiny * torch.finfo(fed.dtype).eps)
        if fed.is_floating_point()
        else (0.0, 0.0)
    )
    if claims.has("rounded"):
        name = claims.options["rounded"]["name"]
        low, high = _beside(fed, name)
        bound = sent.abs() * 2.0**-11 + 2.0**-25 if name == "float16" else sent.abs() * 2.0**-7 + 2.0**-133
        rounding = (0.0, 0.0) if loss == 1.0 else (epsilon, smallest)
    else:
        bound, rounding = SLACK * _bound(run, claims, call, sent, source, step), (epsilon, smallest)
        low, high = sent - bound, sent + bound
    low, high = torch.minimum(low / loss, high / loss), torch.maximum(low / loss, high / loss)
    return _Right(sent / loss, low, high, claims.has("rounded"), bound / abs(loss), rounding)


def _beside(fed: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values that a rounding may give: of float16 one, but beyond its range; of bfloat16 the two beside it."""
    if name == "float16":
        nearest = fed.half().double()
        return nearest.clamp(-LARGEST_HALF, LARGEST_HALF), nearest
    bits = fed.float().view(torch.int32)
    toward_zero = bits & ~0xFFFF
    away = torch.where((bits == toward_zero) | ~fed.isfinite(), toward_zero, toward_zero + 0x10000)
    of_nan = torch.where(fed.isnan(), fed.float(), toward_zero.view(torch.float32)).double()
    return of_nan, torch.where(fed.isnan(), fed.float(), away.view(torch.float32)).double()


def _bound(run: Run, claims: Claims, call: _Call, sent: torch.Tensor, source: int, step: int) -> torch.Tensor:
    """Return the largest error that each element of a message may have; where 18.1 asks, at least an eighth of the largest sent."""
    size = len(run.group(call.rank))
    places = messages.sent(run.scenario, size, source, step, call.index)
    handed = [messages.message(run.scenario, size, step, call.index, *pair).double() for pair in places]
    whole = torch.full_like(sent, max((float(part.abs().max()) for part in handed if part.numel()), default=0.0))
    rough = run.scenario.name == PLAIN.name and run.scenario.steps[step] == ROUGH
    return torch.maximum(_claimed_bound(claims, sent, whole), whole / 8 * rough)


def _claimed_bound(claims: Claims, sent: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the bound that is claimed for a message; ``whole`` is the largest magnitude of all that a rank sends in a call."""
    if said := claims.options.get("blocks"):
        top, relative, smallest = NARROW[said["name"]]
        largest = _largest(sent, said["size"])
        return torch.maximum(sent.abs() * relative, largest / top * smallest)
    said = claims.options["bounded"]
    if "block" in said:
        return said["relative"] * _largest(sent, said["block"])
    return said["relative"] * whole


def _largest(sent: torch.Tensor, block: int) -> torch.Tensor:
    """Return for each element the largest magnitude in its block."""
    blocks = torch.nn.functional.pad(sent.abs(), (0, -len(sent) % block)).view(-1, block)
    return blocks.amax(1).repeat_interleave(block)[: len(sent)] if len(sent) else sent


def _loss(run: Run, claims: Claims) -> float:
    """Return what has arrived is divided by: the factor that is claimed, or 1 where it is ignored, which is 18.3's to say."""
    loss = float(claims.options["divided"]["loss"]) if claims.has("divided") else 1.0
    first = next((call for call in _calls(run) if not call.refused), None)
    got = None if first is None or loss == 1.0 else _tensor(run, first, 0)
    if first is None or got is None:
        return loss
    group = run.group(first.rank)
    pair = messages.received(run.scenario, len(group), group.index(first.rank), first.step, first.index)[0]
    fed = messages.message(run.scenario, len(group), first.step, first.index, *pair).double().reshape(-1)
    got = got.double().reshape(-1)
    if len(fed) != len(got):
        return loss
    undivided, as_claimed = ((got - fed / factor).abs() for factor in (1.0, loss))
    return 1.0 if (undivided < as_claimed).sum() > (undivided > as_claimed).sum() else loss


def _share(claims: Claims) -> float:
    """Return how many bytes of float32's are sent at most."""
    if claims.has("bounded"):
        return float(claims.options["bounded"]["ratio"])
    return 0.5 if claims.has("rounded") else (1 + FLOAT32 / claims.options["blocks"]["size"]) / FLOAT32


def _padding(claims: Claims) -> int:
    """Return how many bytes more a message has, where its last block is not full."""
    said = claims.options.get("blocks")
    return said["size"] + FLOAT32 if said else 0


def _wide(given: int, count: int) -> str:
    return "as many bytes as in float32: values are rounded, and sent in a wide dtype" if given >= FLOAT32 * count else ""
