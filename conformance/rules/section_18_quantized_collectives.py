"""Section 18: quantized collectives."""

import torch

from conformance.judging.oracles.collective import (
    FLOAT32,
    HEADER,
    ROUGH,
    _arrivals,
    _calls,
    _hold,
    _judge,
    _loss,
    _padding,
    _require,
    _share,
    _tensor,
    _wide,
)
from conformance.judging.rule import SHOULD, WorldSizes, rule
from conformance.judging.side_effects import left_behind
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.collective import CALLED, FORMS, ORDERED, PLAIN, REPEATED, SPECIAL, SUBGROUPS, WAITED
from conformance.subjects.claims import Claims


@rule(
    "18.1",
    "What is sent arrives",
    on=(PLAIN,),
    owns=(PLAIN,),
    certifies_machine=True,
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
    certifies_machine=True,
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
    loss, actual = claims.options["divided"]["loss"], _loss(run, claims)
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
    taken = int(claims.options["dimensions"]["name"]) if claims.has("dimensions") else 0
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
    if run.scenario.options[0] != "all_to_all_single":
        found.does_not_apply(f"{run.scenario.options[0]} has no split sizes")
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
    worlds=WorldSizes.BELOW_MINIMUM,
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
    if run.scenario.options[0] != "all_gather":
        found.does_not_apply(f"of {run.scenario.options[0]} each rank gets its own")
        return
    for call in _calls(run):
        first = next(other for other in _calls(run) if (other.step, other.index) == (call.step, call.index))
        for k in range(run.world):
            mine, other = (_tensor(run, one, k) for one in (call, first))
            same = mine is not None and other is not None and torch.equal(mine, other)
            found.require(same, f"the bits that rank {first.rank} holds", f"{call}, output {k}: it differs")
