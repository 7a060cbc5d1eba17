"""Mutants of rule 24.1 whose sums by nodes are taken for large buckets, or after some steps."""

from collections.abc import Callable

from tests.mutants import Mutant
from tests.mutants._helpers import Bucket, Result, average, is_dense, step_number
from tests.mutants.clusters import Nodes, mean_of_node_means

Hook = Callable[[Nodes, Bucket], Result]


def node_means_of_large(numel: int) -> Hook:
    """Take the mean of the nodes' means of large buckets, and the mean of all ranks of others."""

    def hook(state: Nodes, bucket: Bucket) -> Result:
        if is_dense(bucket) and bucket.buffer().numel() >= numel:
            return mean_of_node_means(state, bucket)
        return average(bucket, state.group)

    return hook


def node_means_after(steps: int) -> Hook:
    """Take the mean of all ranks in the first steps, and then that of the nodes' means."""

    def hook(state: Nodes, bucket: Bucket) -> Result:
        if is_dense(bucket) and step_number(bucket) >= steps:
            return mean_of_node_means(state, bucket)
        return average(bucket, state.group)

    return hook


_NODES = "tests.mutants.clusters:Nodes"

MUTANTS = [
    Mutant(name, ("24.1",), state=_NODES, worlds=(1, 2, 3, 4))
    for name in (
        "node_means_of_large,numel=16_384",
        "node_means_of_large,numel=1_000",
        "node_means_after,steps=10",
        "node_means_after,steps=19",
    )
]
