"""Section 18: quantized collectives."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from conformance import messages
from conformance.claims import Claims
from conformance.kinds.collective import CALLED, FORMS, NARROW, ORDERED, PLAIN, REPEATED, SPECIAL, SUBGROUPS, WAITED
from conformance.leftovers import left_behind
from conformance.rulebook import SHOULD, rule
from conformance.run import Run
from conformance.verdict import Found

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


@rule(
    "18.1",
    "What is sent arrives",
    on=(PLAIN,),
    owns=(PLAIN,),
    source="torch documentation, torch.distributed.all_gather, all_to_all, all_to_all_single, scatter",
    remedy="the order of the parts on the wire, and where each is put; a rank that is taken for another",
)
def arrives(run: Run, claims: Claims, found: Found) -> None:
    """At each place arrives the message of the rank that it belongs to, in its own shape; what its format holds, exactly.

    Each rank sends each other one something else. Values have four significant bits, of which every format of 16 bits holds
    all; with fewer bits they are about what they were: how near is 18.2's. A rank's own part may be as it was.
    """
    _hold(run, claims, found, kinds=(ROUGH,))


@rule(
    "18.2",
    "The round trip loses what it says",
    on=(PLAIN,),
    needs=("18.1",),
    source="IEEE 754; Dettmers et al., ICLR 2022 (blocks with a scale each); Micikevicius et al., FP8 Formats for Deep Learning, 2022",
    remedy="how values are rounded; of which values a scale is the largest, and that it goes with them",
)
def round_trip(run: Run, claims: Claims, found: Found) -> None:
    """Every value arrives as its format rounds it: for rounded(float16) the nearest, ties to even; for rounded(bfloat16) one of
    the two beside it; for blocks(...) and bounded(...) within the bound, in float64.

    Magnitudes differ from message to message, and from block to block of 128 elements: a scale of something else shows. With
    q the format's largest value, M the largest magnitude in a block and y = |x| q / M, the error is at most M / q times
    half a step of the format at y, and some roundings of float32.
    """
    _hold(run, claims, found, kinds=("normal", "uneven"))


@rule(
    "18.3",
    "Divided by its loss factor",
    on=(PLAIN,),
    needs=("18.1",),
    claimed="divided",
    source="torch.distributed.algorithms._quantization.quantization.auto_quantize, quant_loss",
    remedy="the factor is handed on to what dequantizes, lists of tensors and every format among it",
)
def divided(run: Run, claims: Claims, found: Found) -> None:
    """What arrives is divided by the factor that is claimed, whichever collective and format it is."""
    loss, actual = claims.said["divided"]["loss"], _loss(run, claims)
    found.require(actual == loss, f"what was fed, divided by {loss:g}", "what was fed, not divided", "the factor is ignored")


@rule(
    "18.4",
    "Any shape",
    on=(FORMS,),
    owns=(FORMS,),
    needs=("18.9",),
    source="torch documentation, torch.distributed.all_gather: tensors of any shape; pytorch #62142",
    remedy="flatten before quantizing; what a kernel takes of matrices alone; the largest of no elements",
)
def shapes(run: Run, claims: Claims, found: Found) -> None:
    """Tensors of one, two, three and four dimensions arrive, empty ones and those of one element too.

    Where it claims to take tensors of so many dimensions alone, others are refused with an error.
    """
    taken = int(claims.said["dimensions"]["name"]) if claims.has("dimensions") else 0
    for call in _calls(run):
        spec = run.scenario.params[call.index]
        if spec.dtype != "float32" or spec.layout != "contiguous":
            continue
        if taken not in (0, len(spec.shape)):
            found.require(bool(call.refused), f"an error: dimensions({taken}) is claimed", f"{call}, of shape {spec.shape}: there was none")
            continue
        _require(run, claims, found, call)


@rule(
    "18.5",
    "Any memory layout",
    on=(FORMS,),
    needs=("18.9",),
    source="torch documentation, torch.Tensor.contiguous: memory is in another order than elements are",
    remedy="contiguous(), or copy_ into a contiguous tensor, before memory is read",
)
def layouts(run: Run, claims: Claims, found: Found) -> None:
    """Elements of a tensor that is not contiguous arrive at their own places, or it is refused with an error."""
    _hold(run, claims, found, may_refuse=True, params=[i for i, p in enumerate(run.scenario.params) if p.layout != "contiguous"])


@rule(
    "18.6",
    "Other dtypes, or an error",
    on=(FORMS,),
    needs=("18.9",),
    source="torch documentation, torch.distributed.all_gather: outputs have the dtype of the input",
    remedy="check is_floating_point() on every rank before anything is sent; cast back to the dtype of the output",
)
def dtypes(run: Run, claims: Claims, found: Found) -> None:
    """float64, float16 and bfloat16 arrive in their own dtype, or are refused with an error; integers arrive as they are, to the
    last bit, or are refused."""
    for call in _calls(run):
        spec = run.scenario.params[call.index]
        if spec.dtype == "float32" or call.not_asked:
            continue
        if call.refused:
            found.checked(1)
            continue
        others = sorted({dtype for dtype in call.event["dtypes"] if dtype != spec.dtype})
        if found.require(not others, f"tensors of {spec.dtype}", f"{call}: {', '.join(others)} in their place"):
            _require(run, claims, found, call, exact=spec.dtype.startswith("int"))


@rule(
    "18.7",
    "Written in place",
    on=(PLAIN,),
    needs=("18.1",),
    source="torch documentation, torch.distributed.all_gather: tensor_list is where the outputs are written to",
    remedy="copy_ into the tensors that were handed in, instead of putting others into their list",
)
def in_place(run: Run, claims: Claims, found: Found) -> None:
    """The tensors that were handed in hold what arrives: views of one buffer, and other names of them, see it too."""
    for call in _calls(run):
        where = f"{call}: outputs {', '.join(map(str, call.event['replaced']))} are other tensors; those handed in were not written"
        found.require(not call.event["replaced"], "the tensors that were handed in", where, "other tensors are put into the list")


@rule(
    "18.8",
    "Inputs stay",
    on=(PLAIN, FORMS),
    needs=("18.1",),
    source="torch documentation, torch.distributed: inputs of a collective that gathers, scatters or exchanges are not changed",
    remedy="clone() before an operation in place; half() and float() give the tensor itself where the dtype is the same",
)
def inputs_stay(run: Run, claims: Claims, found: Found) -> None:
    """Tensors that are handed in to be sent stay what they are, bit for bit."""
    for call in _calls(run):
        changed = call.event["inputs_changed"]
        found.require(not changed, "inputs as they were", f"{call}: inputs {', '.join(map(str, changed))} changed")


@rule(
    "18.9",
    "It has arrived when it returns",
    on=(ORDERED,),
    owns=(ORDERED,),
    needs=("18.1", "18.2"),
    source="torch documentation, async_op: without it the call is over when it returns",
    remedy="an asynchronous collective that nobody waits for before its result is dequantized",
)
def done(run: Run, claims: Claims, found: Found) -> None:
    """Called without async_op, everything has arrived when the call returns.

    Peers enter each call when rank 0 has left it, or waits for them: a rank that returns without waiting is found out every time.
    """
    _hold(run, claims, found)


@rule(
    "18.10",
    "Begun, and waited for later",
    on=(WAITED,),
    owns=(WAITED,),
    needs=("18.9",),
    source="torch documentation, async_op: a Work whose wait() returns when the call is over",
    remedy="dequantize in wait(), after the collective's own; buffers of a call's own; refuse what is not supported",
)
def waited(run: Run, claims: Claims, found: Found) -> None:
    """With async_op=True it returns what has wait(), after which everything has arrived, or it refuses that with an error.

    Two calls are under way at once, and are waited for in the opposite order.
    """
    for call in _calls(run):
        if call.refused:
            found.checked(1)
            continue
        actual = f"{call}: returned {call.event['returned']}"
        if found.require(call.event["waits"], "an object with wait()", actual, "async_op=True is ignored"):
            _require(run, claims, found, call)


@rule(
    "18.11",
    "Any group",
    on=(SUBGROUPS,),
    owns=(SUBGROUPS,),
    needs=("18.1", "18.2"),
    source="torch documentation, torch.distributed.new_group; torch.distributed.scatter: src is a global rank",
    remedy="dist.get_world_size() and get_rank() without the group; a collective without group=; a place where src is a global rank",
)
def subgroups(run: Run, claims: Claims, found: Found) -> None:
    """With group= it is the collective of that group, whatever WORLD is; the source of a scatter is a global rank."""
    _hold(run, claims, found)


@rule(
    "18.12",
    "Arguments by position and by keyword",
    on=(CALLED,),
    owns=(CALLED,),
    needs=("18.9", "18.11"),
    source="torch documentation, torch.distributed.all_gather, all_to_all, all_to_all_single, scatter",
    remedy="kwargs.get('group') alone, which does not see a group given by position; **kwargs that nobody reads",
)
def arguments(run: Run, claims: Claims, found: Found) -> None:
    """Arguments given by position or by keyword, as torch.distributed's functions have them, are heeded, or refused with an error;
    likewise group_src of a scatter."""
    _hold(run, claims, found, may_refuse=True, forms=("positional", "keywords", "group_src"))


@rule(
    "18.13",
    "Uneven splits",
    on=(CALLED,),
    needs=("18.9", "18.11"),
    source="torch documentation, torch.distributed.all_to_all_single: output_split_sizes and input_split_sizes",
    remedy="hand the split sizes on, by the names that they have in torch.distributed",
)
def splits(run: Run, claims: Claims, found: Found) -> None:
    """With output_split_sizes and input_split_sizes each rank gets as many rows as are meant for it, or they are refused with an
    error.

    Ranks send as many rows in all as they would without: what ignores the sizes goes on with the rows of others.
    """
    if run.scenario.said[0] != "all_to_all_single":
        found.does_not_apply(f"{run.scenario.said[0]} has no split sizes")
        return
    _hold(run, claims, found, may_refuse=True, forms=("splits", "positional_splits"))


@rule(
    "18.14",
    "Special values",
    on=(SPECIAL,),
    owns=(SPECIAL,),
    needs=("18.1", "18.2"),
    claimed="rounded",
    source="IEEE 754; pytorch #62142; torch.distributed.algorithms._quantization.quantization clamps to float16's range",
    remedy="an addition to the bits of a NaN that overflows; a scale that loses subnormals; a clamp that loses NaN",
)
def special(run: Run, claims: Claims, found: Found) -> None:
    """NaN arrives as NaN, an infinity with its sign, zeros with theirs, subnormals and ties rounded as others are.

    Beyond float16's range a value arrives as infinite, or as the largest that float16 has, with its sign. NaN is NaN
    whichever bits it has: those of a CUDA device are 7fffffff.
    """
    for call in _calls(run):
        for arrival in _arrivals(run, claims, call):
            right, got = arrival.right, arrival.got
            if not _judge(found, run, claims, arrival) or got is None:
                continue
            if claims.has("feedback"):
                continue  # -0.0 and an error of 0.0 are 0.0
            zeros = right.exact == 0
            wrong = (zeros & (got.signbit() != right.exact.signbit())).nonzero().reshape(-1)
            found.require(not len(wrong), "-0.0 where it was sent", f"{arrival}: a zero with another sign, index {wrong[:1].tolist()}")


@rule(
    "18.15",
    "It sends fewer bytes",
    on=(ORDERED,),
    needs=("18.9",),
    source="the definition of a quantized collective",
    remedy="what is handed to the collective has to be of the narrow dtype, not rounded values in a wide one",
)
def fewer_bytes(run: Run, claims: Claims, found: Found) -> None:
    """What a rank gives to torch's collectives is at most what its format needs: half for 16 bits, a quarter and the scales for 8
    bits, and always less than float32.

    Counted as messages, one for each rank of the group, whatever collectives they are sent by.
    """
    size, seen = run.world, False
    for call in _calls(run):
        handed = run.scenario.params[call.index]
        count = size * torch.Size(handed.shape).numel()
        given = sum(number * (size if name.lstrip("_").startswith("allgather") else 1) for name, number in call.event["sent"])
        seen |= bool(given)
        if given:  # or it cannot be seen what it sends
            found.sends(given, FLOAT32 * count)
        limit = _share(claims) * FLOAT32 * count + (HEADER + _padding(claims)) * size
        what = f"at most {limit / size:.0f} bytes a message, by {claims}"
        sent = given < FLOAT32 * count if claims.has("bounded") and _share(claims) == 1 else given <= limit
        found.require(sent, what, f"{call}: {given / size:.0f} bytes for {count // size} elements", _wide(given, count))
    if not seen:
        found.checks = 0
        found.does_not_apply("it gives nothing to torch's collectives: what it sends cannot be seen here")


@rule(
    "18.16",
    "What is lost is made up for",
    on=(REPEATED,),
    owns=(REPEATED,),
    needs=("18.1", "18.2"),
    claimed="feedback",
    source="Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019: error feedback",
    remedy="e <- x + e - D(Q(x + e)), of the values before they are divided by a loss factor; kept from call to call",
)
def feedback(run: Run, claims: Claims, found: Found) -> None:
    """Fed the same N times, the mean of what arrives is within one call's bound, divided by N, of what was fed.

    With e the error that is kept, the sum of what arrives is N x - e. Without feedback the mean is off by what one call loses.
    """
    count = len(run.scenario.steps)
    for rank in run.ranks:
        first = next((call for call in _calls(run) if call.rank == rank.rank), None)
        if first is None:
            continue
        calls = [call for call in _calls(run) if call.rank == rank.rank]
        for k, arrival in enumerate(_arrivals(run, claims, first)):
            right, tensors = arrival.right, [tensor for call in calls if (tensor := _tensor(run, call, k)) is not None]
            if not found.require(len(tensors) == count, f"{count} tensors", f"{arrival}: {len(tensors)} arrived"):
                continue
            total = sum((tensor.reshape(-1).double() for tensor in tensors), torch.zeros_like(right.exact))
            # What is sent is x + e, and e at most a twentieth of x: its bound is a little larger. And roundings of float32.
            bound = 1.1 * right.bound / count + 2.0**-21 * right.exact.abs() + 2.0**-40
            error = (total / count - right.exact).abs()
            at = int((error / bound).argmax())
            actual = (
                f"{arrival}, index {at}: off by {error[at].item():.3g} over {count} calls; one call's bound is {right.bound[at].item():.3g}"
            )
            same = all(torch.equal(tensor, tensors[0]) for tensor in tensors)
            cause = "nothing is fed back: each call loses the same again" if same else ""
            found.require(bool((error <= bound).all()), f"a mean within {bound[at].item():.3g}", actual, cause)


@rule(
    "18.17",
    "It leaves the process as it was",
    on=(PLAIN,),
    source="torch documentation, reproducibility; the same as 9.1, 9.3, 9.4 and 9.6 of hooks",
    remedy="a seed that is set, a global setting or a patched function that is not put back, a thread or a file that is left",
)
def leaves_no_trace(run: Run, claims: Claims, found: Found) -> None:
    """Random generators, torch's settings, functions of torch and Python, and the process's threads, children and temporary files
    are after it what they were before."""
    left_behind(run, found)


@rule(
    "18.18",
    "Smaller groups than it says are refused",
    on=(PLAIN,),
    worlds="fewer",
    claimed="min_world_size",
    source="the same as 2.11 of hooks",
    remedy="check the group's size where it is called, and raise on every rank",
)
def fewer(run: Run, claims: Claims, found: Found) -> None:
    """In a group of fewer ranks than it claims to take, it raises an error on every rank."""
    found.require(False, "an error on every rank", f"{run.name}: it ran to its end", "min_world_size is claimed and not checked")


@rule(
    "18.19",
    "It can be begun and waited for later",
    on=(WAITED,),
    level=SHOULD,
    needs=("18.10",),
    source="torch documentation, async_op",
    remedy="return an object whose wait() waits for the collective's Work, and then dequantizes",
)
def can_wait(run: Run, claims: Claims, found: Found) -> None:
    """async_op=True is supported, as it is by torch.distributed's collectives."""
    for call in _calls(run):
        if not call.not_asked:
            found.require(not call.refused, "an object with wait()", f"{call}: {call.refused}")


@rule(
    "18.20",
    "All ranks hold the same bits",
    on=(PLAIN,),
    level=SHOULD,
    needs=("18.1", "18.2"),
    source="DeepSpeed and b12x #44: an owner that keeps what it had before it was rounded; replicas drift apart",
    remedy="dequantize a rank's own part as those of others",
)
def replicas(run: Run, claims: Claims, found: Found) -> None:
    """After an all_gather all ranks of the group hold the same bits, their own part too."""
    if run.scenario.said[0] != "all_gather":
        found.does_not_apply(f"of {run.scenario.said[0]} each rank gets its own")
        return
    for call in _calls(run):
        first = next(other for other in _calls(run) if (other.step, other.index) == (call.step, call.index))
        for k in range(run.world):
            mine, other = (_tensor(run, one, k) for one in (call, first))
            same = mine is not None and other is not None and torch.equal(mine, other)
            found.require(same, f"the bits that rank {first.rank} holds", f"{call}, output {k}: it differs")


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
            return f"it is what rank {group[source]} sends{'' if run.scenario.said[0] == 'all_gather' else f' rank {group[to]}'}{of}"
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
        name = claims.said["rounded"]["name"]
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
    if said := claims.said.get("blocks"):
        top, relative, smallest = NARROW[said["name"]]
        largest = _largest(sent, said["size"])
        return torch.maximum(sent.abs() * relative, largest / top * smallest)
    said = claims.said["bounded"]
    if "block" in said:
        return said["relative"] * _largest(sent, said["block"])
    return said["relative"] * whole


def _largest(sent: torch.Tensor, block: int) -> torch.Tensor:
    """Return for each element the largest magnitude in its block."""
    blocks = torch.nn.functional.pad(sent.abs(), (0, -len(sent) % block)).view(-1, block)
    return blocks.amax(1).repeat_interleave(block)[: len(sent)] if len(sent) else sent


def _loss(run: Run, claims: Claims) -> float:
    """Return what has arrived is divided by: the factor that is claimed, or 1 where it is ignored, which is 18.3's to say."""
    loss = float(claims.said["divided"]["loss"]) if claims.has("divided") else 1.0
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
        return float(claims.said["bounded"]["ratio"])
    return 0.5 if claims.has("rounded") else (1 + FLOAT32 / claims.said["blocks"]["size"]) / FLOAT32


def _padding(claims: Claims) -> int:
    """Return how many bytes more a message has, where its last block is not full."""
    said = claims.said.get("blocks")
    return said["size"] + FLOAT32 if said else 0


def _wide(given: int, count: int) -> str:
    return "as many bytes as in float32: values are rounded, and sent in a wide dtype" if given >= FLOAT32 * count else ""
