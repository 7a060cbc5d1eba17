"""Environment variables that differ between simulated nodes. Runs in ranks only.

A scheduler that starts torchrun once on each node leaves variables behind, and a cluster's own
profile sets some for its network, which may be another one on each machine. A choice of collectives
by these is another one on each node. torch reads none of them, and Gloo neither: NCCL's would be
read on GPUs, where no nodes are simulated.
"""

import os
import random
from collections.abc import Sequence

from conformance.ranks.torchrun import torchrun_environment

# Each node has one of a variable's values, and neighbours have different ones; None: it is not set.
_OF_NETWORKS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("NCCL_SOCKET_IFNAME", ("eth0", "ens5", "ib0", "bond0")),
    ("NCCL_IB_DISABLE", ("0", "1", None)),
    ("NCCL_IB_HCA", ("mlx5_0", "mlx5_2", "mlx5_0,mlx5_1", None)),
    ("NCCL_NET_GDR_LEVEL", ("PIX", "SYS", None)),
    ("NCCL_P2P_DISABLE", ("1", None)),
    ("UCX_NET_DEVICES", ("mlx5_0:1", "eth0", None)),
    ("FI_PROVIDER", ("efa", "tcp", None)),
)


def node_variables(sizes: Sequence[int], rank: int, seed: str) -> dict[str, str | None]:
    """Return the variables that a rank's node has of its own; None for one that is not set there.

    Args:
        sizes: the number of ranks on each node.
        rank: the global rank.
        seed: another one for each scenario of a session.
    """
    node = torchrun_environment(sizes, rank)["GROUP_RANK"]
    numbers = random.Random(f"{seed}/variables")
    nodes = str(len(sizes))
    variables: dict[str, str | None] = {
        "NODE_RANK": node,
        "SLURM_NODEID": node,
        # torchrun is the one task of its node.
        "SLURM_PROCID": node,
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": nodes,
        "SLURM_NNODES": nodes,
        "SLURM_TASKS_PER_NODE": f"1(x{nodes})",
        "SLURM_JOB_ID": str(numbers.randint(10_000, 10_000_000)),
        "SLURMD_NODENAME": f"node{numbers.randint(1, 900) + int(node)}",
        "SLURM_CPUS_ON_NODE": str(os.cpu_count()),
    }
    for name, values in _OF_NETWORKS:
        order = numbers.sample(values, len(values))
        variables[name] = order[int(node) % len(order)]
    return variables


def set_node_variables(sizes: Sequence[int], rank: int, seed: str) -> None:
    """Set these variables in this process, if the scenario has several nodes."""
    if len(sizes) == 1:
        return
    for name, value in node_variables(sizes, rank, seed).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
