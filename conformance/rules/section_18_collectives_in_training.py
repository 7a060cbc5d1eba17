"""Section 18, continued: quantized collectives as training uses them."""

from conformance.judging.common_rules import (
    AUTOCAST_OPERATIONS,
    DEFAULT_DTYPE,
    ON_MORE_RANKS,
    TOGETHER,
    TOGETHER_REMEDY,
    keeps_no_more,
    raises_if_collective_fails,
    right_beside_own_numbers,
)
from conformance.judging.oracles.collective import calls, require_call, require_calls
from conformance.judging.oracles.collective_feedback import require_long_run, require_nothing_lost
from conformance.judging.oracles.collective_forms import (
    is_plain,
    require_dtype,
    require_shape,
)
from conformance.judging.oracles.collective_training import (
    note_refusal_of_async,
    note_refusal_of_others,
    require_kept_around,
    require_no_error_in_wait,
    require_recovery,
)
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.collective import OF_UNEVEN_SIZES, SUBGROUPS
from conformance.scenarios.collective_conditions import MIXED_CALLS, kind_of_calls
from conformance.scenarios.collective_training import (
    ALSO_OUTSIDE,
    IN_FLIGHT,
    LARGE,
    LONG,
    ON_TWO_GROUPS,
    RECOVERING,
    RECOVERING_HALF,
    UNEVEN,
    UNEVEN_ON_GROUPS,
    VIEWS,
    WITH_CALLS_OUTSIDE,
)
from conformance.scenarios.conditions_together import COLLECTIVE as CONDITIONS
from conformance.scenarios.failing_collectives import ASYNCHRONOUS, COLLECTIVE
from conformance.scenarios.kinds_in_clusters import COLLECTIVE as CLUSTERS
from conformance.scenarios.kinds_under_default_dtypes import COLLECTIVE as DEFAULT_DTYPES
from conformance.scenarios.kinds_under_default_dtypes import COLLECTIVE_UNDER_AUTOCAST as AUTOCAST
from conformance.scenarios.probes_of_kinds import COLLECTIVE as PROBE
from conformance.subjects.claims import Claims


@rule(
    "18.21",
    "Large messages arrive",
    on=(LARGE,),
    owns=(LARGE,),
    needs=("18.1", "18.2", "18.3", "18.5", "18.23"),
    since="1.2",
    source="torch documentation, torch.distributed.all_gather: tensors of any size; grids of "
    "kernels and indices of 16 bits",
    remedy="chunks of a fixed size, of which the last or all but the first are left out; a scale "
    "for more than a block; another format for large messages; functions made in a loop over "
    "chunks, which read its variables in wait(), after the last chunk; chunks of reshape(-1), "
    "which is a copy if the tensor is not contiguous; an output that is cleared, or used as "
    "scratch, if it is a part of the input",
)
def large(run: Run, claims: Claims, found: Found) -> None:
    """Every element of a message of 2**17 to 2**21 elements, and of one above 2**21, arrives within
    the bound of rule 18.2; so does a small message between them or after them.

    So does one of 2**17 to 2**20 elements that is not contiguous: the weight of a convolution in
    channels_last, a transposed matrix, or columns of a wider one. Or an error refuses that layout.
    One of the contiguous large messages lies in a buffer, in place if 18.23 has such calls.

    Two of the four calls have async_op=True, one of a large contiguous message among them; they are
    under way together if one follows the other. If an error refuses that, the certificate names it,
    and the calls have no async_op. The sizes, the order, the layout and these calls are drawn from
    the session's seed. Values are random, in runs of 128 that differ by powers of two.
    """
    for event in run.ranks[0].all("refuses_calls"):
        layout = run.scenario.params[event["index"]].layout
        found.note(f"large messages in the layout {layout} are refused: {event['error']}")
    note_refusal_of_async(run, found, "large messages")
    require_calls(run, claims, found, kinds=("uneven",))
    for call in calls(run):
        require_kept_around(found, call)


@rule(
    "18.22",
    "Calls after special values are right",
    on=(RECOVERING, RECOVERING_HALF, LARGE),
    owns=(RECOVERING, RECOVERING_HALF),
    refusable=(RECOVERING_HALF,),
    needs=("18.1", "18.2", "18.3", "18.14", "18.21"),
    since="1.2",
    source="the definition of the claimed format; IEEE 754; Karimireddy et al., ICML 2019: error "
    "feedback",
    remedy="a scale of 0, or one that is kept above a fixed number; a zero point that is cut off "
    "at the ends of the format if all values of a block have one sign; a NaN in an error or a "
    "scale that is kept for the next call; nan_to_num, or a conversion to integers, or max() of "
    "Python over parts of a message, which lose NaN",
)
def recovery(run: Run, claims: Claims, found: Found) -> None:
    """Zeros arrive as zeros; constants, tiny values and values of one sign within the claimed
    bound; NaN and infinities spoil their own block at most, and do not arrive as finite numbers;
    ordinary values arrive as before in the next calls. So do NaN, and infinities, at drawn places
    of a large message: one of the sizes of 18.21.

    After NaN and infinities this holds for messages of float16 and bfloat16, too, unless an error
    on every rank refuses these. A claim without blocks lets a NaN spoil all that the rank sends in
    that call. With error feedback, bounds are those of the call and of the errors that earlier
    calls have kept.
    """
    require_recovery(run, claims, found)


@rule(
    "18.23",
    "Tensors may be parts of larger buffers",
    on=(VIEWS,),
    owns=(VIEWS,),
    needs=("18.7", "18.9", "18.10"),
    since="1.2",
    source="torch documentation, torch.distributed.all_gather: outputs are written to tensor_list; "
    "torch.Tensor.storage_offset; NCCL, In-place Operations; sharded optimizers, whose shard is a "
    "part of the buffer; Megatron-LM, whose asynchronous all_gather writes into one",
    remedy="output.copy_(result) in place of output.data = result or output.set_(result), also in "
    "wait(); the storage read or written from its beginning; padding that is written too, between "
    "outputs that lie behind each other, too; outputs that are cleared, or used as scratch, before "
    "all inputs are read",
)
def views(run: Run, claims: Claims, found: Found) -> None:
    """Inputs and outputs may be contiguous views of one buffer, at any offset: the messages are in
    the buffer, and the elements around them keep their values.

    In every other call the input of an all_gather is the rank's own part of the outputs, and the
    output of a scatter or a reduce_scatter its part of the inputs, whose other parts keep their
    values. In half of the calls tensors of a list have gaps of 1 to 200 elements between them. In
    the others they lie behind each other, as list(buffer.chunk(n)) does. Half of the calls have
    async_op=True, unless an error refuses it; one to three are under way at a time, and each rank
    waits for them in an order of its own. All of it is drawn from the session's seed.
    """
    note_refusal_of_async(run, found, "parts of larger buffers")
    for call in calls(run):
        require_call(run, claims, found, call)
        require_kept_around(found, call)


@rule(
    "18.24",
    "Messages of uneven sizes work, or are refused",
    on=(UNEVEN, UNEVEN_ON_GROUPS),
    owns=(UNEVEN, UNEVEN_ON_GROUPS),
    needs=("18.9", "18.10", "18.13"),
    since="1.2",
    source="torch documentation, torch.distributed.all_to_all: tensors of different sizes in a "
    "list; torch.distributed.all_gather: uneven sized tensors are supported; "
    "torch.distributed.all_to_all_single: output_split_sizes and input_split_sizes",
    remedy="the sizes of the first tensor, or of the rank's own, taken for those of all; the sizes "
    "of what a rank sends, taken for those of what it gets; padding to a length that others "
    "exceed; a rank without rows, which has nothing to send, and still gets those of its peers; "
    "sizes that are kept by the shapes of tensors, or left out if async_op=True; sizes or offsets "
    "in the dtype of the messages; rounds whose number depends on the rank's own parts; an "
    "agreement on sizes without group=; "
    "over Gloo, an all_gather of tensors of different sizes, which ends the process: compare the "
    "sizes first, and raise an error",
)
def uneven(run: Run, claims: Claims, found: Found) -> None:
    """If the tensors of an all_to_all or of an all_gather, or the parts of an all_to_all_single,
    have different numbers of rows, each rank gets those that are meant for it, or an error refuses
    them.

    Sizes change from step to step. In every other exchange a rank sends as many rows in all as it
    gets, in both steps the same number, but on three ranks not to the same peers. In the calls of
    an all_gather the order of ranks by their number of rows is drawn, and reversed in the next call
    and in the next step. In six calls drawn ranks have no rows: to send, or to receive, or for one
    rank and not for another; in every other one of these calls the others have none.

    Half of the messages are of float64, float16 or bfloat16. One call has 300 to 2,000 rows of
    bfloat16, one a part of 2**14 to 2**18 elements for one rank and small ones for the others, and
    one tensors that are not contiguous. Other calls are on two groups of two ranks, of which one
    makes fewer calls. An error may refuse each of these alone.

    About half of the calls have async_op=True. One to three such calls are under way at a time, and
    each rank waits for them in an order of its own. If an error refuses async_op=True for these
    sizes, the certificate names the error, and the calls have no async_op. Lists and
    split sizes are used again as in 18.10.
    """
    collective = run.scenario.options[0]
    if collective not in OF_UNEVEN_SIZES:
        found.does_not_apply(f"torch's {collective} takes tensors of one size")
        return
    note_refusal_of_async(run, found, "uneven sizes")
    for call in calls(run):
        if call.refused:
            require_no_error_in_wait(found, call)
        elif run.scenario.params[call.index].dtype != "float32":
            require_dtype(run, claims, found, call)
        else:
            require_call(run, claims, found, call)


@rule(
    "18.25",
    "Calls of one shape are apart while they are under way",
    on=(IN_FLIGHT, ON_TWO_GROUPS),
    owns=(IN_FLIGHT, ON_TWO_GROUPS),
    needs=("18.10",),
    since="1.2",
    source="torch documentation, async_op; torch.distributed.Work.wait, which may be called again; "
    "hybrid sharding, whose calls are on rows and on columns of a mesh",
    remedy="buffers that are kept by shape; a wait() that decodes, or divides, a second time; the "
    "group or its size in an attribute of the object, which the next call changes",
)
def in_flight(run: Run, claims: Claims, found: Found) -> None:
    """Many calls of one shape, made by one object, may be under way at once; each rank waits for
    them in an order of its own, and twice. Or an error refuses async_op=True.

    There are 24 to 40 of them on one group. Without the claim feedback two objects make them in
    turn. Two to four may also be on two groups: rows and columns of a mesh of 2 x 2 ranks, or one
    of these and WORLD. The ranks of rows, the groups and the orders of waits are drawn. Lists are
    used again as in 18.10.
    """
    for call in calls(run):
        if call.refused:
            require_no_error_in_wait(found, call)
            continue
        require_call(run, claims, found, call)


fails = raises_if_collective_fails(
    "18.26", call="the call, or its wait(),", on=COLLECTIVE, needs=("18.1", "18.2", "18.3")
)

fails_in_wait = raises_if_collective_fails(
    "18.27",
    title="Raises if the collective of an asynchronous call fails",
    call="the call, or its wait(),",
    on=ASYNCHRONOUS,
    needs=("18.10", "18.26"),
)

kept = keeps_no_more("18.28", on=(LONG,), needs=("18.29",))


@rule(
    "18.29",
    "Long runs are as right as short ones",
    on=(LONG,),
    owns=(LONG,),
    needs=("18.1", "18.2", "18.3"),
    since="1.6",
    source="runs of training have many thousand steps; every step calls the same object",
    remedy="a count of calls that overflows, or that ends a warm-up; buffers that are used again "
    "too early; a scale or an error that is kept for some calls; data that are kept for a tensor "
    "by its id, its address or its version: all three can stay the same while its values change",
)
def long_run(run: Run, claims: Claims, found: Found) -> None:
    """In each of 300 to 450 calls of one object, all messages arrive within the bound of rule 18.2.

    The number of calls and six shapes of 1 to 640 elements are drawn from the session's seed, and
    so is the shape of each call. Two calls of five have async_op=True, unless an error refuses
    that. With the claim feedback all calls have one shape, bounds are those of 18.22, and all calls
    together lose no more than the last error, as in 18.16. Three calls of four have the tensors of
    an earlier one with other values, which are written in place, or through ``.data``. In a third
    of all_gather's calls the input is a part of the output.
    """
    require_long_run(run, claims, found)


@rule(
    "18.30",
    "Messages arrive on five to eight ranks, and on any groups",
    on=CLUSTERS,
    owns=CLUSTERS,
    needs=("18.1", "18.2", "18.11"),
    since="1.6",
    source=ON_MORE_RANKS,
    remedy="tables, buffers and tags for four ranks; partners that assume a power of two; a "
    "constant distance between the ranks of a group",
)
def on_clusters(run: Run, claims: Claims, found: Found) -> None:
    """On five or seven ranks on nodes of unequal size, six or eight ranks on equal nodes, and
    groups of four and two ranks without a constant distance, all messages arrive. All of it is
    drawn."""
    require_calls(run, claims, found)


@rule(
    "18.31",
    "Works under any default dtype of torch, and under autocast",
    on=(DEFAULT_DTYPES, AUTOCAST),
    owns=(DEFAULT_DTYPES, AUTOCAST),
    needs=("18.1", "18.2"),
    since="1.6",
    source=f"{DEFAULT_DTYPE}; {AUTOCAST_OPERATIONS}",
    remedy="scales and buffers that are made without a dtype: torch.zeros(n), torch.tensor(x); "
    "matmul, einsum or linear, which compute in half precision under autocast; torch.cat of "
    "bfloat16, which raises under autocast to float16 on a CPU",
)
def default_dtypes(run: Run, claims: Claims, found: Found) -> None:
    """Messages of float32 arrive if torch's default dtype is float64, float16 or bfloat16, if it
    changes between calls, and if the calls are under autocast to float16 or bfloat16, as those in a
    forward are. The order of the three is drawn."""
    require_calls(run, claims, found)


@rule(
    "18.32",
    "Conditions of training come together",
    on=CONDITIONS,
    owns=CONDITIONS,
    needs=("18.4", "18.5", "18.6", "18.29", "18.30", "18.31"),
    since="1.6",
    source=TOGETHER,
    remedy=TOGETHER_REMEDY,
)
def together(run: Run, claims: Claims, found: Found) -> None:
    """Messages arrive if conditions come together that other rules judge alone.

    One run has tensors of all forms and dtypes, with subnormal numbers of float16 among others, on
    five to eight ranks under a default dtype that changes; an error may refuse other layouts and
    dtypes than contiguous float32. One has 300 to 450 calls under bfloat16 as the default dtype.
    The numbers are drawn from the session's seed.
    """
    if run.scenario.variant == LONG.variant:
        require_long_run(run, claims, found)
    else:
        for call in calls(run):
            require = require_shape if is_plain(run, call) else require_dtype
            require(run, claims, found, call)


own_numbers = right_beside_own_numbers("18.35", (large, long_run), on=(PROBE,))


@rule(
    "18.36",
    "A rank outside of the group keeps its tensors",
    on=(SUBGROUPS, WITH_CALLS_OUTSIDE),
    owns=(WITH_CALLS_OUTSIDE,),
    needs=("18.10", "18.11", "18.16"),
    since="1.6",
    source="torch documentation, torch.distributed.new_group; on a rank outside of the group "
    "torch's collectives warn and return, so that loops call them for every group",
    remedy="outputs that are decoded, or filled with zeros, whatever the collective has returned; "
    "a group that is replaced by WORLD; an error that is kept before the call returns: return "
    "before anything is encoded; data of a call under way, in an attribute of the object",
)
def outside(run: Run, claims: Claims, found: Found) -> None:
    """A call on a rank outside of the group, with the value that new_group returns there, changes
    no tensor and no list, or an error refuses it. So it is if the call has async_op=True, and its
    handle, if there is one, is waited for.

    All ranks make such calls, with messages for their own group, and with messages for WORLD.

    Nor does such a call change what other calls send or decode: if the same object is also called
    as outside of the group between its calls, or while a call with async_op=True is under way, all
    messages arrive. With the claim feedback all calls together lose no more than the last error, as
    in 18.16.
    """
    for rank in run.ranks:
        for event in rank.all("outside"):
            found.require(
                not event["changed"],
                "tensors that stay as they are on a rank outside of the group",
                f"rank {rank.rank}, p{event['index']}: {', '.join(event['changed'])} changed",
                "tensors are written although the collective has returned at once",
            )
    if run.scenario.variant != ALSO_OUTSIDE:
        return
    if claims.has("feedback"):
        cause = "an error is lost: by calls on this group, or by those outside of it between them"
        require_nothing_lost(run, claims, found, cause)
    else:
        require_calls(run, claims, found)


@rule(
    "18.37",
    "Averages, layouts, numbers and asynchronous calls come together",
    on=(MIXED_CALLS,),
    owns=(MIXED_CALLS,),
    needs=("18.5", "18.10", "18.16", "18.22", "18.33"),
    since="2.0",
    source="torch documentation, async_op and torch.distributed.ReduceOp; torch.no_grad, which is "
    "in force in Optimizer.step() and in hooks of a backward; these hooks run in threads of their "
    "own on a GPU",
    remedy="a branch of one of these alone: what op=ReduceOp.AVG divides, whether async_op=True is "
    "given or not; reshape(-1) of a tensor that is not contiguous, which is a copy; "
    "torch.is_grad_enabled(); a threading.local; an error that is fed back in one branch alone; "
    "the operation or the layout of a call under way, in an attribute of the object",
)
def mixed(run: Run, claims: Claims, found: Found) -> None:
    """Messages arrive if calls differ in several of these at once: a sum or an average; contiguous
    matrices, matrices in other layouts, weights of convolutions in channels_last and numbers;
    async_op=True or not; under no_grad or not; a wait() in the thread of the call or in another.
    One to four calls in a drawn order are begun before the first wait, and each rank waits for them
    in an order of its own.

    The scale of the values changes from call to call, as in 18.16. In two calls one message has NaN
    or infinities. With the claim feedback there are none, and all calls of an object together lose
    no more than the last error. What an error refuses is left out, and the certificate names it:
    averages, a layout, numbers, or async_op=True, also of some of these alone, or a call while
    another one is under way. All of it is drawn.
    """
    for event in run.ranks[0].all("refuses_calls"):
        found.note(f"{kind_of_calls(run.scenario, event['index'])} are refused: {event['error']}")
    refused: dict[str, dict[str, None]] = {}
    for event in run.ranks[0].all("refuses_waiting"):
        refused.setdefault(event["error"], {})[kind_of_calls(run.scenario, event["index"])] = None
    for error, kinds in refused.items():
        found.note(f"async_op=True is refused for {', '.join(kinds)}: {error}")
    note_refusal_of_others(run, found)
    if claims.has("feedback"):
        cause = "an error is lost in calls of one of these kinds"
        require_nothing_lost(run, claims, found, cause)
    else:
        require_recovery(run, claims, found)
