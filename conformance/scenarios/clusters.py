"""The scenarios of section 24: world sizes, nodes and groups as a cluster has them. One is of rule
4.1.

These scenarios bring their own ranks, whatever world sizes the profile has. The sizes, the nodes
and the groups are drawn (``draws.py``): the values here are examples. The parameters are few, since
eight ranks share the cores of one machine.
"""

from dataclasses import replace

from conformance.scenarios.hook import UNUSED, VALUES
from conformance.scenarios.model import DDPOptions, Param, Scenario

# 64 bytes: after the first step there are three buckets. The last one, which has the first
# parameter, has fewer elements than there are ranks, so that some ranks have an empty shard.
_CAP = 64 / 2**20

# The second shape is drawn.
_PARAMS = (
    Param((3,)),
    Param((307,)),
    Param((5, 3)),
    Param((1,)),
)

UNEQUAL_NODES = Scenario(
    name="unequal_nodes",
    summary="five or seven ranks on nodes of unequal size; all of it is drawn",
    params=_PARAMS,
    steps=("crafted", "crafted", "normal", "crafted"),
    ddp=DDPOptions(bucket_cap_mb=_CAP),
    size=5,
    nodes=(3, 2),
    prerequisite="buckets",
)

EQUAL_NODES = replace(
    UNEQUAL_NODES,
    name="equal_nodes",
    summary="six or eight ranks on nodes of equal size; all of it is drawn",
    size=8,
    nodes=(4, 4),
)

UNEVEN_GROUPS = replace(
    VALUES,
    name="uneven_groups",
    summary="two models on two disjoint groups, whose ranks have no constant distance; the groups "
    "are drawn",
    steps=("crafted", "crafted", "normal"),
    groups=((0, 1, 3, 4), (2, 5)),
    nodes=(2, 2, 2),
    prerequisite="subgroups",
)

# An odd number of equal nodes. Each node has one rank, as a job with one GPU on each.
LONE_NODES = replace(
    UNEQUAL_NODES,
    name="lone_nodes",
    summary="three ranks, each on a node of its own",
    steps=("crafted", "normal", "crafted"),
    size=3,
    nodes=(1, 1, 1),
)

TWO_GROUPS = replace(
    VALUES,
    name="two_groups",
    summary="every rank trains two models in turns, one on WORLD and one on a group of its own; "
    "the groups are drawn",
    steps=("crafted", "crafted", "normal", "crafted"),
    size=3,
    nodes=(1, 2),
    twin=True,
    twin_groups=((0, 2), (1,)),
    prerequisite="two_models",
)

# As the rows and the columns of ranks in a two-dimensional layout.
EQUAL_GROUPS = replace(
    TWO_GROUPS,
    name="equal_groups",
    summary="every rank trains two models in turns, each on a group of the same size with other "
    "ranks; the groups are drawn",
    size=0,
    nodes=(1, 3),
    groups=((0, 1), (2, 3)),
    twin_groups=((0, 2), (1, 3)),
    prerequisite="two_groups",
)

# The idle ranks register the subject on a model of their own, as all ranks may have to: a state
# that makes process groups needs all of them, by the documentation of torch.
BYSTANDERS = replace(
    VALUES,
    name="bystanders",
    summary="a model trains on some ranks, while the others wait and take part in nothing; the "
    "ranks and the number of steps are drawn",
    steps=("crafted",) * 40,
    groups=((0, 2), (1,)),
    idle=(1,),
    observe=replace(VALUES.observe, collectives=True),
    prerequisite="subgroups",
)

# A hook may take another path for some dtypes and for some sizes. All of the sizes are drawn.
WIDE_GROUPS = replace(
    UNEVEN_GROUPS,
    name="wide_groups",
    summary="parameters of float32, float64, float16 and bfloat16, from tens of elements to a "
    "million, in buckets of their own, on two disjoint groups; the groups and sizes are drawn",
    params=(
        Param((17,), "float64"),
        Param((19,), "bfloat16"),
        Param((1_000_003,)),
        Param((23,), "float16"),
        Param((40_009,), "bfloat16"),
        Param((13,)),
    ),
    steps=("tiled",) * 3,
    ddp=DDPOptions(bucket_cap_mb=16 / 2**20),
    groups=((0, 2), (1,)),
    nodes=(),
)

# A hook may take another path under find_unused_parameters: that one needs the group, too.
UNUSED_GROUPS = replace(
    UNUSED,
    name="unused_groups",
    summary="the scenario `unused` on two groups of ranks, which are drawn",
    world_sizes=(),
    groups=((0, 2), (1,)),
    prerequisite="unused",
)

CLUSTERS = (
    UNEQUAL_NODES,
    EQUAL_NODES,
    LONE_NODES,
    UNEVEN_GROUPS,
    WIDE_GROUPS,
    TWO_GROUPS,
    EQUAL_GROUPS,
    BYSTANDERS,
    UNUSED_GROUPS,
)


def with_groups_of(scenario: Scenario, least: int) -> Scenario:
    """Return a scenario of a cluster in which every group has at least ``least`` ranks.

    Nodes and groups stay uneven where they were.
    """
    if scenario.groups and scenario.twin_groups:
        ranks = tuple(range(2 * least))
        halves = (ranks[:least], ranks[least:])
        return replace(
            scenario,
            groups=halves,
            twin_groups=(ranks[::2], ranks[1::2]),
            nodes=(1, len(ranks) - 1),
        )
    if scenario.groups:
        sizes = [max(len(group), least) for group in scenario.groups]
        groups = _interleaved(sizes)
        nodes = (1, sum(sizes) - 1) if scenario.nodes else ()
        return replace(
            scenario, groups=groups, nodes=nodes, idle=groups[1] if scenario.idle else ()
        )
    if scenario.twin_groups:
        sizes = [max(len(group), least) for group in scenario.twin_groups]
        size = sum(sizes)
        nodes = (1, size - 1) if scenario.nodes else ()
        return replace(scenario, size=size, nodes=nodes, twin_groups=_interleaved(sizes))
    size = max(scenario.size, least)
    if set(scenario.nodes) == {1}:
        return replace(scenario, size=size, nodes=(1,) * size)
    if len(set(scenario.nodes)) > 1:
        return replace(scenario, size=size, nodes=(size - 1, 1))
    size += size % 2
    return replace(scenario, size=size, nodes=(size // 2, size // 2))


def _interleaved(sizes: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two groups of these sizes; the first has ranks 0 and 2, and ends with the last."""
    first = (0, *range(sum(sizes) - sizes[0] + 1, sum(sizes)))
    others = tuple(rank for rank in range(sum(sizes)) if rank not in first)
    return first, others
