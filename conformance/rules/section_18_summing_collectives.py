"""Section 18, continued: quantized collectives that give sums: reduce_scatter and all_reduce."""

from conformance.judging.oracles.collective import calls
from conformance.judging.oracles.collective_forms import require_dtype, require_same_bits
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.collective import CALLED, OF_BITS, PLAIN, SUMMING, operation_of
from conformance.scenarios.collective_conditions import MIXED_CALLS
from conformance.scenarios.collective_training import DTYPES, LARGE, LONG, OPERATED
from conformance.scenarios.kinds_in_clusters import COLLECTIVE as CLUSTERS
from conformance.subjects.claims import Claims


@rule(
    "18.33",
    "Other operations than a sum work, or are refused",
    on=(CALLED, OPERATED),
    owns=(OPERATED,),
    needs=("18.9", "18.11"),
    since="1.6",
    source="torch documentation, torch.distributed.ReduceOp; the argument op of all_reduce and "
    "reduce_scatter",
    remedy="an argument op that is not read, or whose unknown values are taken for a sum; a "
    "division by the size of WORLD under ReduceOp.AVG; an error on one rank alone",
)
def operations(run: Run, claims: Claims, found: Found) -> None:
    """With op=ReduceOp.AVG, MAX, MIN or PRODUCT the outputs are the averages, the largest or least
    values, or the products of the messages, within the bounds that follow from those of messages;
    or an error refuses the operation on every rank.

    Values are exact in every format, and random with 10 to 2**18 elements, for averages also in
    float64, float16 and bfloat16.

    Results of integers are exact, also those of BAND, BOR and BXOR, which an error refuses for
    numbers of floating point.
    """
    collective = run.scenario.options[0]
    if collective not in SUMMING:
        found.does_not_apply(f"{collective} has no argument op")
        return
    for call in calls(run):
        operation = operation_of(call.form)
        if not operation:
            continue
        actual = f"{call}: rank 0 refuses it, and this rank goes on"
        if not found.require(not call.event["goes_on_alone"], "an error on every rank", actual):
            continue
        is_refused = bool(call.refused)
        is_integer = run.scenario.params[call.index].dtype.startswith("int")
        if operation in OF_BITS and not is_integer:
            expected = "an error: numbers of floating point have no bits to combine"
            found.require(is_refused, expected, f"{call}: there was none")
        else:
            require_dtype(run, claims, found, call)


@rule(
    "18.34",
    "An all_reduce gives all ranks the same bits",
    on=(PLAIN, LARGE, LONG, DTYPES, OPERATED, MIXED_CALLS, *CLUSTERS),
    needs=("18.1", "18.2"),
    since="1.6",
    source="replicas of data parallelism, which add the same update to the same parameters: ranks "
    "that get other bits drift apart; DeepSpeed and b12x #44, an owner that keeps its unrounded "
    "values",
    remedy="decode the rank's own part of the sum, or of the average, from its code, like those of "
    "other ranks, for messages of any dtype; add messages in the same order on all ranks",
)
def same_bits(run: Run, claims: Claims, found: Found) -> None:
    """After an all_reduce all ranks of the group hold the same bits, for messages of all sizes, and
    for those of other memory layouts, float64, float16, bfloat16 and complex64 that it does not
    refuse; also after one with op=ReduceOp.AVG, MAX, MIN or PRODUCT that it does not refuse.

    Averages have 10 to 40, 300 to 900 and 2**13 to 2**18 elements, and come in the other dtypes,
    too. The sizes are drawn.
    """
    collective = run.scenario.options[0]
    if collective != "all_reduce":
        found.does_not_apply(f"{collective} is no all_reduce")
        return
    require_same_bits(run, found)
    if not found.checks and run.scenario.name == DTYPES.name:
        found.leaves_out("it refuses messages of other dtypes than float32")
    if not found.checks and run.scenario.name == OPERATED.name:
        found.leaves_out("it refuses other operations than a sum")
