"""Section 18, continued: quantized collectives that give sums: reduce_scatter and all_reduce."""

from conformance.judging.oracles.collective import require_calls
from conformance.judging.oracles.collective_forms import require_same_bits
from conformance.judging.rule import rule
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.collective import CALLED, PLAIN, SUMMING
from conformance.scenarios.collective_training import LARGE, LONG
from conformance.scenarios.kinds_in_clusters import COLLECTIVE as CLUSTERS
from conformance.subjects.claims import Claims


@rule(
    "18.33",
    "Other operations than a sum work, or are refused",
    on=(CALLED,),
    needs=("18.9", "18.11"),
    since="1.6",
    source="torch documentation, torch.distributed.ReduceOp; the argument op of all_reduce and "
    "reduce_scatter",
    remedy="an argument op that is not read; a division by the size of WORLD under ReduceOp.AVG",
)
def operations(run: Run, claims: Claims, found: Found) -> None:
    """With op=ReduceOp.AVG or op=ReduceOp.MAX the outputs are the averages or the largest values of
    the messages, within the bound of a sum, or an error refuses the operation."""
    collective = run.scenario.options[0]
    if collective not in SUMMING:
        found.does_not_apply(f"{collective} has no argument op")
        return
    require_calls(run, claims, found, forms=("average", "maximum"), may_refuse=True)


@rule(
    "18.34",
    "An all_reduce gives all ranks the same bits",
    on=(PLAIN, LARGE, LONG, *CLUSTERS),
    needs=("18.1", "18.2"),
    since="1.6",
    source="replicas of data parallelism, which add the same update to the same parameters: ranks "
    "that get other bits drift apart; DeepSpeed and b12x #44, an owner that keeps its unrounded "
    "values",
    remedy="decode the rank's own part of the sum from its code, like those of other ranks; add "
    "messages in the same order on all ranks",
)
def same_bits(run: Run, claims: Claims, found: Found) -> None:
    """After an all_reduce all ranks of the group hold the same bits, for messages of all sizes."""
    collective = run.scenario.options[0]
    if collective != "all_reduce":
        found.does_not_apply(f"{collective} is no all_reduce")
        return
    require_same_bits(run, found)
