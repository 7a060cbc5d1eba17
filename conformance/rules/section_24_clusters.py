"""Section 24: world sizes, nodes and groups as a cluster has them.

All scenarios bring their own ranks. Numbers of ranks, nodes and groups are drawn from the session's
seed; the requirements name the ranges (``scenarios/draws.py``). All ranks are on one machine: a
node is what the variables of torchrun describe.
"""

from conformance.judging.oracles import lossy
from conformance.judging.oracles.clusters import cause_in_nodes
from conformance.judging.requirements import (
    require_meeting,
    require_optimizer,
    require_own_group,
    require_same,
    require_steps,
)
from conformance.judging.rule import rule
from conformance.judging.twins import require_models_and_twins
from conformance.judging.verdict import Found
from conformance.records.run import Run
from conformance.scenarios.clusters import (
    BYSTANDERS,
    EQUAL_GROUPS,
    EQUAL_NODES,
    LONE_NODES,
    TWO_GROUPS,
    UNEQUAL_NODES,
    UNEVEN_GROUPS,
    WIDE_GROUPS,
)
from conformance.scenarios.mostly_zero import MOSTLY_ZERO
from conformance.subjects.claims import LOCAL, UNBIASED, Claims

_TORCHRUN = "torch documentation, torchrun, Environment Variables"
_GROUPS = "torch documentation, torch.distributed, Groups"
_OVERFLOWS = ("nan", "inf")


def _require_results(run: Run, claims: Claims, found: Found) -> None:
    """Require every step of a run to be right, and the parameters of a fused hook."""
    if not require_steps(run, claims, found, run.steps("crafted", "normal", *_OVERFLOWS)):
        if not claims.lossy:
            causes = (cause_in_nodes(run, step) for step in run.steps("crafted", "normal"))
            found.failures[-1].cause = next(filter(None, causes), found.failures[-1].cause)
    elif claims.fused:
        require_optimizer(run, claims, found)
    elif claims.lossy == LOCAL:
        require_meeting(run, claims, found)
    else:
        lossy.require_noise_of_group(run, claims, found)


@rule(
    "24.1",
    "Gives the mean on nodes of unequal size",
    on=(UNEQUAL_NODES,),
    owns=(UNEQUAL_NODES,),
    needs=("2.6", "1.8"),
    since="1.6",
    source=f"{_TORCHRUN}; Thakur, Rabenseifner and Gropp, Optimization of Collective Communication "
    "Operations in MPICH, section 4.5: what a number of ranks that is no power of two needs",
    remedy="means of the nodes' means, also for some dtypes or sizes alone; LOCAL_WORLD_SIZE of "
    "this node for all nodes; recursive halving or doubling without the ranks that are left over; "
    "a ring or a tail at odd sizes; an exchange between nodes that an overflow skips",
)
def unequal_nodes(run: Run, claims: Claims, found: Found) -> None:
    """Five or seven ranks on two or three nodes, not all of the same size, get the right result
    under the subject's claims.

    torchrun's variables describe the nodes: ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``, ``GROUP_RANK``
    and ``GROUP_WORLD_SIZE``. So does the host name, which is another one on each node. In all
    scenarios with nodes each has drawn numbers of cores, 1 to 256, and of bytes of memory, 1 GiB to
    2 TiB, as functions of ``os`` return them, and torch tells as many threads, and other
    instructions of the processor; variables of SLURM, and of a network, differ from node to node,
    too (``ranks/node_variables.py``). A rank must not choose by these alone. One of
    the parameters has a prime number of elements from 257 to 1019. Unless results are lossy or
    parameters are stepped, two others have 1,000 to 30,000 elements and 30,000 to 500,000, 20 to 60
    steps come before those on record, and there are parameters of float16, bfloat16 and float64
    with 1 to 300 elements, and one of a half dtype with 1,000 to 30,000. One rank has NaN in a
    step, and one an infinity in another, in a drawn parameter: all nodes get it. Compression
    without feedback gets steps in which one rank's gradients are far larger than those of the
    others, here and in 24.2, so that ranks that count unequally show. Under ``local`` the ranks of
    all nodes meet within 24 steps, and get the mean over all ranks at a claimed period; under
    ``unbiased(noise=d)`` there is the noise of as many ranks, here, in 24.2 and in 24.4.
    """
    _require_results(run, claims, found)


@rule(
    "24.2",
    "Gives the mean on six and eight ranks",
    on=(EQUAL_NODES, LONE_NODES),
    owns=(EQUAL_NODES, LONE_NODES),
    needs=("24.1",),
    since="1.6",
    source=f"{_TORCHRUN}; fairscale#132, hivemind#440: equal on two ranks, different on more",
    remedy="the first rank of a node that keeps the result; trees of a fixed depth; tables, "
    "buffers and tags for four ranks; sums in a dtype that overflows; a buffer that pieces of a "
    "large bucket share; a node of one rank that is taken for a single process",
)
def equal_nodes(run: Run, claims: Claims, found: Found) -> None:
    """Six or eight ranks on two nodes or more, all of the same size, get the right result under the
    subject's claims. The parameters and steps are those of 24.1, but that the largest parameter has
    80,000 to 260,000 elements. Lossy hooks run on 12 ranks, whose sums may need more bits, and
    those without feedback on 10. Under ``local`` all of eight ranks meet, as in 24.1, with 13 to 20
    buckets.

    Three ranks get the right result, too, if each is on a node of its own: an odd number of nodes.
    """
    if run.scenario.name != LONE_NODES.name:
        _require_results(run, claims, found)
    elif require_steps(run, claims, found, run.steps("crafted", "normal")) and claims.fused:
        require_optimizer(run, claims, found)


@rule(
    "24.3",
    "Gives bit-identical results on all nodes",
    on=(UNEQUAL_NODES, EQUAL_NODES),
    needs=("24.1", "3.1"),
    since="1.6",
    source="DDP's contract: replicas start equal and receive equal gradients",
    remedy="a sum in the order of the rank's own node first; a rank that keeps values which it has "
    "not sent over the wire",
)
def identical_results(run: Run, claims: Claims, found: Found) -> None:
    """On five to eight ranks the gradients of every step have the same bits on all ranks of all
    nodes."""
    if claims.lossy == LOCAL:
        found.does_not_apply("replicas drift apart under local: 13.5 bounds it")
        return
    first = run.ranks[0]
    for rank in run.ranks[1:]:
        pair = f"ranks 0 and {rank.rank}"
        require_same(first.tensors, rank.tensors, pair, found, run.element)


@rule(
    "24.4",
    "Averages over groups without a constant distance",
    on=(UNEVEN_GROUPS,),
    owns=(UNEVEN_GROUPS,),
    unless="world_only",
    needs=("2.7",),
    since="1.6",
    source=f"{_GROUPS}: new_group takes any list of ranks",
    remedy="neighbours that are computed from a first rank and a stride: "
    "dist.get_global_rank(group, rank) and dist.get_process_group_ranks(group) know them; numbers "
    "of ranks that all groups are taken to share; means of the nodes' means, if WORLD's nodes are "
    "equal but the group's are not; LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE, which describe WORLD; "
    "WORLD in a path for gradients that are mostly zeros",
)
def uneven_groups(run: Run, claims: Claims, found: Found) -> None:
    """Two models on two groups of four and two ranks get the means over their groups.

    The ranks of the larger group have two different distances or more, such as 0, 1, 3 and 4. The
    nodes have two ranks each, or three: the larger group has unequally many of them, as if others
    evaluate, and the smaller group leaves a whole node out. Unless results are lossy or parameters
    are stepped, there are the parameters of other dtypes than float32, and the steps with NaN and
    an infinity, that 24.1 has. An embedding of 500 rows or more, and of at most 2**16 elements, has
    zeros in most of its rows in two steps, as in 2.12.

    Under ``local`` all ranks of a group meet within 24 steps, in each of 24 buckets, and get its
    mean at a claimed period. A partner that follows the count of calls is the same in each step if
    the number of buckets is a multiple of the number of turns, as 24 is of 2, 3, 4, 6, 8 and 12.
    The number of 24.2 is drawn, so that in time it is one of each other number up to 20."""
    steps = run.steps("crafted", "normal", MOSTLY_ZERO, *_OVERFLOWS)
    if not require_steps(run, claims, found, steps):
        return
    if claims.fused:
        require_optimizer(run, claims, found)
    if claims.lossy == LOCAL:
        require_meeting(run, claims, found)
    else:
        lossy.require_noise_of_group(run, claims, found)


@rule(
    "24.5",
    "Trains two models on two groups in one process",
    on=(TWO_GROUPS, EQUAL_GROUPS),
    owns=(TWO_GROUPS, EQUAL_GROUPS),
    unless="world_only",
    needs=("2.7", "11.1"),
    since="1.6",
    source=f"{_GROUPS}; experts beside dense layers: the dense layers train on WORLD, the experts "
    "on the ranks that have the same expert; rows and columns of a two-dimensional DeviceMesh",
    remedy="a group, its size or this rank's number in it that a module keeps from the first call, "
    "or from the first model; a communicator, a buffer or a neighbour that is kept by the size of "
    "a group, which another group may have; state that models share",
)
def two_groups(run: Run, claims: Claims, found: Found) -> None:
    """Every rank trains two models in turns. One is on WORLD, and one is on a group with some of
    the ranks. In another run the two models of a rank are on groups of the same size, two or three,
    with other ranks: the one on 0 and 1, the other on 0 and 2. Each gets the mean over its own
    group, and of a fused hook its own rate, as in 11.7.

    Four ranks of WORLD are on two equal nodes, of which the other model's groups have unequally
    many ranks; three are on unequal nodes, as those of the second run are.

    A subject given as one object, instead of its class or factory, is shared by both models on
    purpose: the rule does not apply to it.
    """
    require_models_and_twins(run, claims, found)


@rule(
    "24.6",
    "Leaves ranks outside of the model's group alone",
    on=(BYSTANDERS,),
    owns=(BYSTANDERS,),
    unless="world_only",
    needs=("2.7",),
    since="1.6",
    source=f"{_GROUPS}: a collective of a group waits for all of its ranks, and new_group for all "
    "ranks of WORLD unless use_local_synchronization is set",
    remedy="dist.barrier() or another collective without group=; process groups that the hook "
    "itself makes: make them in the state's factory or the set-up, or pass "
    "use_local_synchronization=True; if WORLD is meant, claim world_only",
)
def bystanders(run: Run, claims: Claims, found: Found) -> None:
    """A model trains on two of three ranks for 33 to 80 steps. The third rank has registered the
    subject as well, and then takes part in nothing: no collective of the hook waits for it.

    The set-up and the factory of a state may use WORLD, and make process groups, because all ranks
    call them. In a step, only the ranks of the model's group are there.
    """
    if require_own_group(run, found):
        require_steps(run, claims, found, run.steps("crafted"))


@rule(
    "24.7",
    "Averages buckets of any size and dtype over the model's group",
    on=(WIDE_GROUPS,),
    owns=(WIDE_GROUPS,),
    unless="world_only",
    needs=("2.4", "24.4"),
    since="1.6",
    source=f"{_GROUPS}; hooks in the wild that send large buckets, or those of one dtype, by "
    "another function, without its group",
    remedy="a collective without group= in a path that only some buckets take: those of some "
    "sizes, of float64, of half precision",
)
def wide_groups(run: Run, claims: Claims, found: Found) -> None:
    """Two models on two groups of two ranks and one get the means over their groups, for parameters
    of float32, float64, float16 and bfloat16 with 16 to 700,000 elements, float32 to 4,000,000.
    Each has a bucket of its own after the first step.

    Each dtype has ten sizes, float32 eleven. They are drawn, one from each of eight equal parts of
    the range of logarithms up to 20,000, and of two or three parts of the range from there on.
    """
    if claims.lossy == UNBIASED:
        found.does_not_apply("an expectation shows over more steps than large buckets are worth")
        return
    require_steps(run, claims, found, run.steps("tiled"))
