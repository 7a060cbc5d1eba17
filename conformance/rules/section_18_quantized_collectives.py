"""Section 18: quantized collectives."""

from conformance.judging.common_rules import leaves_no_trace, refuses_fewer_ranks
from conformance.judging.oracles.collective import (
    ROUGH,
    Call,
    arrivals,
    arrived_tensor,
    calls,
    loss_factor,
    require_arrival,
    require_call,
    require_calls,
    require_zero_signs,
)
from conformance.judging.oracles.collective_bytes import require_fewer_bytes
from conformance.judging.oracles.collective_feedback import (
    require_mean_of_calls,
    require_nothing_lost,
)
from conformance.judging.oracles.collective_forms import (
    is_plain,
    require_dtype,
    require_same_bits,
    require_shape,
)
from conformance.judging.oracles.collective_handles import require_truth_of_handle
from conformance.judging.oracles.collective_training import require_no_error_in_wait
from conformance.judging.rule import SHOULD, rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.collective import (
    CALLED,
    CALLS,
    FORMS,
    INTEGERS,
    ORDERED,
    PLAIN,
    REPEATED,
    SPECIAL,
    STACK,
    SUBGROUPS,
    WAITED,
)
from conformance.scenarios.collective_conditions import MIXED_CALLS
from conformance.scenarios.collective_training import (
    AFTER_WORLD,
    CHANGING_SCALE,
    DTYPES,
    LARGE,
    ON_TWO_GROUPS,
    RECOVERING,
    VARYING,
)
from conformance.scenarios.kinds_in_clusters import COLLECTIVE as CLUSTERS
from conformance.subjects.claims import Claims


@rule(
    "18.1",
    "Every message arrives at its place",
    on=(PLAIN,),
    owns=(PLAIN,),
    certifies_machine=True,
    source="torch documentation, torch.distributed.all_gather, all_to_all, scatter, "
    "reduce_scatter, all_reduce, and those of one tensor",
    remedy="the order of the parts on the wire, and the output that each is written to; a rank "
    "that is taken for another",
)
def arrives(run: Run, claims: Claims, found: Found) -> None:
    """Each output holds the message of the rank that it belongs to, in its own shape, and exactly
    if the format represents it.

    Each rank sends every other rank a different message. Values have four significant bits, which
    every format of 16 bits represents. With fewer bits they arrive approximately, and rule 18.2
    judges the error. A rank's own part may arrive unchanged. An output of a reduce_scatter or an
    all_reduce is the sum of the messages of all ranks.
    """
    require_calls(run, claims, found, kinds=(ROUGH,))


@rule(
    "18.2",
    "The round trip loses no more than claimed",
    on=(PLAIN,),
    needs=("18.1",),
    certifies_machine=True,
    source="IEEE 754; Dettmers et al., ICLR 2022 (blocks with a scale each); Micikevicius et al., "
    "FP8 Formats for Deep Learning, 2022",
    remedy="the rounding of values; the block that a scale is computed from, and the transfer of "
    "the scale with it",
)
def round_trip(run: Run, claims: Claims, found: Found) -> None:
    """Every value arrives as its format rounds it: for rounded(float16) the nearest, ties to even;
    for rounded(bfloat16) one of the two neighbours; for blocks(...) and bounded(...) within the
    bound.

    Magnitudes differ from message to message, and from block to block of 128 elements, which shows
    a scale that was computed from other values. With q the format's largest value, M the largest
    magnitude in a block and y = |x| q / M, the error is at most M / q times half a step of the
    format at y, and some roundings of float32. A sum may be off by the errors of all its messages.
    Under rounded(...) it may be computed in the narrow dtype; an all_reduce may quantize it again.
    """
    require_calls(run, claims, found, kinds=("normal", "uneven"))


@rule(
    "18.3",
    "Values are divided by the claimed loss factor",
    on=(PLAIN,),
    needs=("18.1",),
    claimed="divided",
    source="torch.distributed.algorithms._quantization.quantization.auto_quantize, quant_loss",
    remedy="pass the factor to the dequantization, also for lists of tensors and for every format",
)
def divided(run: Run, claims: Claims, found: Found) -> None:
    """Arriving values are divided by the claimed factor, for every collective and format."""
    loss = claims.options["divided"]["loss"]
    expected = f"the sent values, divided by {loss:g}"
    is_divided = loss_factor(run, claims) == loss
    found.require(is_divided, expected, "the sent values, not divided", "the factor is ignored")


@rule(
    "18.4",
    "Any shape works",
    on=(FORMS,),
    owns=(FORMS,),
    needs=("18.9",),
    source="torch documentation, torch.distributed.all_gather: any shape; pytorch #62142",
    remedy="flatten before quantizing; a kernel that takes matrices only; the maximum of no "
    "elements; a number, whose shape is (), taken for an empty tensor",
)
def shapes(run: Run, claims: Claims, found: Found) -> None:
    """Tensors of one, two, three and four dimensions arrive, also empty ones and those of one
    element; and numbers, which have no dimension, if the collective takes lists or one tensor.

    With the claim dimensions(n) tensors of another number of dimensions are refused with an error.
    """
    for call in calls(run):
        # 18.5 and 18.6 judge the other layouts and dtypes.
        if is_plain(run, call):
            require_shape(run, claims, found, call)


@rule(
    "18.5",
    "Any memory layout works, or is refused",
    on=(FORMS,),
    needs=("18.9",),
    source="torch documentation, torch.Tensor.contiguous: memory may have another order",
    remedy="contiguous(), or copy_ into a contiguous tensor, before memory is read; output.copy_()",
)
def layouts(run: Run, claims: Claims, found: Found) -> None:
    """Elements of a tensor that is not contiguous arrive at their own places, or an error refuses
    the tensor. Inputs, outputs or both are transposed, or columns of wider tensors."""
    specs = enumerate(run.scenario.params)
    strided = [index for index, spec in specs if not spec.is_contiguous]
    require_calls(run, claims, found, params=strided, may_refuse=True)


@rule(
    "18.6",
    "Other dtypes work, or are refused",
    on=(FORMS, DTYPES, CALLED),
    owns=(DTYPES,),
    needs=("18.9",),
    source="torch documentation, torch.distributed.all_gather: outputs have the dtype of the input",
    remedy="check is_floating_point() on every rank before anything is sent; cast back to the "
    "dtype of the output; float() and half() of a complex tensor, which drop the imaginary part: "
    "torch.view_as_real",
)
def dtypes(run: Run, claims: Claims, found: Found) -> None:
    """float64, float16 and bfloat16 tensors arrive in their own dtype, and integers unchanged to
    the last bit; or an error refuses them.

    Elements of float64 have magnitudes from 2**-1000 to 2**1000, which are drawn: as rounded(...)
    rounds them, or within their bounds, or zeros in place of tiny ones; those beyond float32 may
    arrive as infinite or as its largest, and may spoil their block, but show.

    Complex tensors arrive with both parts of each element, within the bound of the largest
    magnitude that the rank sends, or an error refuses them.

    Messages of float64, float16, bfloat16 and complex64 have 300 to 900 elements, and 2**11 to
    2**18, which are drawn. Integers are also sent on subgroups.
    """
    for call in calls(run):
        # 18.33 judges integers that are not added.
        is_own = run.scenario.name != CALLED.name or call.form == INTEGERS
        if is_own and run.scenario.params[call.index].dtype != "float32":
            require_dtype(run, claims, found, call)


@rule(
    "18.7",
    "Outputs are written in place",
    on=(PLAIN,),
    needs=("18.1",),
    source="torch documentation, torch.distributed.all_gather: outputs are written to tensor_list",
    remedy="copy_ into the given tensors instead of putting others into their list",
)
def in_place(run: Run, claims: Claims, found: Found) -> None:
    """The given output tensors hold the messages, so that views of one buffer, and other references
    to the tensors, see them."""
    for call in calls(run):
        replaced = call.event["replaced"]
        outputs = ", ".join(map(str, replaced))
        found.require(
            not replaced,
            "messages in the given tensors",
            f"{call}: outputs {outputs} are other tensors; the given ones were not written",
            "other tensors are put into the list",
        )


@rule(
    "18.8",
    "Inputs stay unchanged",
    on=(PLAIN, FORMS, CALLED, SPECIAL, RECOVERING, LARGE, MIXED_CALLS),
    needs=("18.1",),
    source="torch documentation, torch.distributed: inputs of a collective that gathers, "
    "scatters or exchanges are not changed",
    remedy="clone() before an operation in place; half() and float() return the tensor itself if "
    "the dtype is the same",
)
def inputs_stay(run: Run, claims: Claims, found: Found) -> None:
    """The tensors to send keep their bits: also those of large messages, those with NaN, infinities
    and values beyond the range of the format, and those of averages and of asynchronous calls."""
    for call in calls(run):
        names = ", ".join(map(str, call.event["inputs_changed"]))
        found.require(not names, "unchanged inputs", f"{call}: inputs {names} changed")


@rule(
    "18.9",
    "Messages are there on return",
    on=(ORDERED,),
    owns=(ORDERED,),
    needs=("18.1", "18.2"),
    source="torch documentation, async_op: without it the call is complete when it returns",
    remedy="an asynchronous collective without a wait() before its result is dequantized",
)
def done(run: Run, claims: Claims, found: Found) -> None:
    """Without async_op all messages have arrived when the call returns.

    Peers enter each call when rank 0 has left it or waits for them. A rank that returns without
    waiting therefore fails every time.
    """
    require_calls(run, claims, found)


@rule(
    "18.10",
    "An asynchronous call completes in wait(), or is refused",
    on=(WAITED,),
    owns=(WAITED,),
    needs=("18.9",),
    source="torch documentation, async_op: a Work whose wait() returns when the call is complete; "
    "torch.distributed.Work.is_completed, get_future, result, exception, is_success and "
    "synchronize",
    remedy="dequantize in wait(), after the wait of the collective; separate buffers for each "
    "call; list(tensor_list) in the call, not in wait(); is_completed(), get_future() and result() "
    "of the collective's own Work, which know nothing of the outputs; a collective that begins in "
    "wait(), and so in another order on each rank: begin it in the call",
)
def waited(run: Run, claims: Claims, found: Found) -> None:
    """With async_op=True the call returns an object whose wait() ends after all messages have
    arrived, or an error refuses the argument.

    Four calls are under way at once, one of no element and one of a single one. Each rank waits for
    them in a drawn order of its own. Lists given to three calls are cleared, refilled or reversed
    before that. If the object has is_completed() or get_future(), outputs are there when the first
    is true or the future is complete, also in its callbacks. The future completes without wait(),
    and holds the outputs, or no tensors. After wait() result(), if there is one, gives the outputs
    or no tensors, is_success() is true, exception() gives none, synchronize() changes nothing.
    """
    for call in calls(run):
        if call.refused:
            require_no_error_in_wait(found, call)
            continue
        actual = f"{call}: returned {call.event['returned']}"
        cause = "async_op=True is ignored"
        if found.require(call.event["waits"], "an object with wait()", actual, cause):
            require_call(run, claims, found, call)
            require_truth_of_handle(found, call)


@rule(
    "18.11",
    "Any process group works",
    on=(SUBGROUPS, AFTER_WORLD),
    owns=(SUBGROUPS, AFTER_WORLD),
    needs=("18.1", "18.2"),
    source="torch documentation, torch.distributed.new_group; torch.distributed.scatter: src is a "
    "global rank",
    remedy="dist.get_world_size() and get_rank() without the group; a collective without group=; a "
    "rank in the group in place of the global rank src; a group, its size or a place in it that is "
    "kept from the first call; a barrier of WORLD",
)
def subgroups(run: Run, claims: Claims, found: Found) -> None:
    """With group= messages of up to 2**20 elements are exchanged within that group, also after a
    call on WORLD, and while other groups make fewer calls; scatter's src is a global rank."""
    require_calls(run, claims, found)


@rule(
    "18.12",
    "Arguments may be positional or keywords",
    on=(CALLED,),
    owns=(CALLED,),
    needs=("18.9", "18.11"),
    source="torch documentation, torch.distributed.all_gather, all_to_all, all_to_all_single, "
    "scatter",
    remedy="kwargs.get('group') alone, which misses a positional group; **kwargs that are not read",
)
def arguments(run: Run, claims: Claims, found: Found) -> None:
    """Arguments take effect by position and by keyword, as in torch.distributed, or an error
    refuses them; this includes group_src of a scatter."""
    forms = ("positional", "keywords", "group_src")
    require_calls(run, claims, found, forms=forms, may_refuse=True)


@rule(
    "18.13",
    "Uneven splits work, or are refused",
    on=(CALLED,),
    needs=("18.9", "18.11"),
    source="torch documentation, torch.distributed.all_to_all_single: output_split_sizes and "
    "input_split_sizes",
    remedy="pass the split sizes on, under the names that they have in torch.distributed",
)
def splits(run: Run, claims: Claims, found: Found) -> None:
    """With output_split_sizes and input_split_sizes each rank gets the rows that are meant for it,
    or an error refuses them.

    The total number of rows is the same as without the sizes, so that a collective that ignores
    them ends with the rows of other ranks.
    """
    collective = run.scenario.options[0]
    if collective != "all_to_all_single":
        found.does_not_apply(f"{collective} has no split sizes")
        return
    forms = ("splits", "positional_splits")
    require_calls(run, claims, found, forms=forms, may_refuse=True)


@rule(
    "18.38",
    "A stack of messages works, or is refused",
    on=(CALLED,),
    needs=("18.9", "18.11"),
    since="2.0",
    source="torch documentation, torch.distributed.all_gather_into_tensor and "
    "reduce_scatter_tensor: a concatenation along the primary dimension, or a stack",
    remedy="parts by torch.Tensor.split: chunk(world size) takes both forms; copy_(), which copies "
    "one message to several places in silence",
)
def stacks(run: Run, claims: Claims, found: Found) -> None:
    """Messages of all ranks may be a stack in place of a concatenation, or an error refuses it."""
    collective = run.scenario.options[0]
    if STACK not in CALLS[collective]:
        found.does_not_apply(f"{collective} has no stack of messages")
        return
    require_calls(run, claims, found, forms=(STACK,), may_refuse=True)


@rule(
    "18.14",
    "Special values arrive",
    on=(SPECIAL,),
    owns=(SPECIAL,),
    needs=("18.1", "18.2"),
    claimed="rounded",
    source="IEEE 754; pytorch #62142; torch.distributed.algorithms._quantization.quantization "
    "clamps to float16's range",
    remedy="an addition to the bits of a NaN that overflows; a scale that loses subnormals; a "
    "clamp that loses NaN",
)
def special(run: Run, claims: Claims, found: Found) -> None:
    """NaN arrives as NaN, infinities and zeros with their signs, and subnormals and ties are
    rounded like other values.

    A value beyond float16's range arrives as infinite or as the largest float16, with its sign. Any
    bits of a NaN are a NaN; on a CUDA device they are 7fffffff.
    """
    for call in calls(run):
        for arrival in arrivals(run, claims, call):
            is_right = require_arrival(run, claims, found, arrival)
            # With error feedback -0.0 and an error of 0.0 add up to 0.0.
            if is_right and not claims.has("feedback"):
                require_zero_signs(found, arrival)


@rule(
    "18.15",
    "Sends fewer bytes than float32 needs",
    on=(ORDERED, LARGE, WAITED, SUBGROUPS, AFTER_WORLD, ON_TWO_GROUPS, *CLUSTERS),
    needs=("18.9", "18.10", "18.11"),
    source="the definition of a quantized collective",
    remedy="the collective has to be given a tensor of the narrow dtype, not rounded values in a "
    "wide one; a cast that is missing where large messages, asynchronous calls, or calls with "
    "group= take another path",
)
def fewer_bytes(run: Run, claims: Claims, found: Found) -> None:
    """A rank passes to torch's collectives no more bytes than its format needs: half of float32's
    for 16 bits, a quarter and the scales for 8 bits; and always less than float32 needs.

    Bytes count per message, one for each rank of the group, whatever collectives send them. An
    all-reduce sends each element twice, so that rounded values in float32 save nothing.

    This holds for messages of float32 of up to some 2**21 elements, those of 18.21, on WORLD and on
    groups: two disjoint ones, rows and columns of a mesh of 2 x 2 ranks, and those of 18.30. Of
    calls with async_op=True the bytes of all that are under way count together. A rank that is
    alone in its group has nobody to send to.
    """
    require_fewer_bytes(run, claims, found)


@rule(
    "18.16",
    "Error feedback makes up for losses",
    on=(REPEATED, CHANGING_SCALE),
    owns=(REPEATED, CHANGING_SCALE),
    needs=("18.1", "18.2"),
    claimed="feedback",
    source="Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019: error feedback",
    remedy="the error e that is kept: e <- x + e - D(Q(x + e)), with Q the quantization and D its "
    "inverse, of the values before they are divided by a loss factor. Keep e from call to call, "
    "whole and in float32, for messages of any dtype, also if the next values are much smaller or "
    "zeros; keep one for each rank that a message goes to, not one for each shape",
)
def feedback(run: Run, claims: Claims, found: Found) -> None:
    """Over N calls with the same input, in float32, bfloat16 and float16, the mean of the arriving
    values is within one call's bound, divided by N, of the input, up to roundings of the input's
    dtype. Two or three ranks make the calls: of three, each may send two messages of one shape.

    With e the error that is kept, the sum of the arriving values is N x - e. Without feedback the
    mean is off by the loss of one call.

    If the scale of the values changes from call to call, or rows are used now and then, the sums of
    all arriving and of all sent values differ by the bound of the last error alone, after every
    call; also for messages of float16, and of 2**13 to 2**18 elements.
    """
    if run.scenario.variant == VARYING:
        require_nothing_lost(run, claims, found)
        return
    repeated: dict[tuple[int, int], list[Call]] = {}
    for call in calls(run):
        repeated.setdefault((call.rank, call.index), []).append(call)
    for same in repeated.values():
        for output, arrival in enumerate(arrivals(run, claims, same[0])):
            outputs = [arrived_tensor(run, call, output) for call in same]
            tensors = [tensor for tensor in outputs if tensor is not None]
            require_mean_of_calls(found, arrival, tensors, len(run.scenario.steps))


no_trace = leaves_no_trace("18.17", on=(PLAIN,))

fewer = refuses_fewer_ranks(
    "18.18",
    on=(PLAIN,),
    remedy="check the group's size in the call, and raise on every rank",
)


@rule(
    "18.19",
    "Supports asynchronous calls",
    on=(WAITED,),
    level=SHOULD,
    needs=("18.10",),
    source="torch documentation, async_op",
    remedy="return an object whose wait() waits for the collective's Work, and then dequantizes",
)
def can_wait(run: Run, claims: Claims, found: Found) -> None:
    """async_op=True is supported, as in torch.distributed's collectives."""
    for call in calls(run):
        if not call.was_not_made:
            found.require(not call.refused, "an object with wait()", f"{call}: {call.refused}")


@rule(
    "18.20",
    "All ranks hold the same bits",
    on=(PLAIN,),
    level=SHOULD,
    needs=("18.1", "18.2"),
    source="DeepSpeed and b12x #44: an owner that keeps its unrounded values; replicas drift apart",
    remedy="dequantize a rank's own part like the others",
)
def replicas(run: Run, claims: Claims, found: Found) -> None:
    """After an all_gather all ranks of the group hold the same bits, also of their own parts.

    18.34 requires it of an all_reduce.
    """
    collective = run.scenario.options[0]
    if collective not in ("all_gather", "all_gather_into_tensor"):
        found.does_not_apply(f"{collective} gives each rank other messages, or 18.34 judges it")
        return
    require_same_bits(run, found)
