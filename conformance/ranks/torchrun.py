"""The environment variables that torchrun sets for each rank, and the name of its host. Runs in
ranks only.

Ranks on this machine see the nodes of their scenario (``Scenario.nodes``), each with a host name of
its own. Ranks on hosts that torchrun has started keep the variables of torchrun, and see the real
nodes.

torch's documentation lists the variables (torchrun, Environment Variables); the agent of
``torch.distributed.elastic`` sets a few more. No store listens at ``MASTER_ADDR`` and
``MASTER_PORT``: a subject uses the process groups that it finds.
"""

import os
import platform
import socket
from collections.abc import Sequence
from itertools import accumulate

# The variables that torchrun sets alike on all ranks, with the values of a first start.
_COMMON = {
    "ROLE_NAME": "default",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "conformance",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
# The variables that torchrun sets unless the user has done so.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def node_sizes(nodes: Sequence[int], world: int, device: str = "cpu") -> tuple[int, ...]:
    """Return the number of ranks on each node.

    Args:
        nodes: the nodes of the scenario; () for one node.
        world: the number of ranks.
        device: the type of device. Ranks take the devices of the machine in turn, so that only
            ranks without a device can be on simulated nodes.
    """
    return tuple(nodes) if sum(nodes) == world and device == "cpu" else (world,)


def torchrun_environment(sizes: Sequence[int], rank: int) -> dict[str, str]:
    """Return the variables that torchrun would set for one rank.

    Args:
        sizes: the number of ranks on each node.
        rank: the global rank.
    """
    ends = list(accumulate(sizes))
    node = next(number for number, end in enumerate(ends) if rank < end)
    world = str(ends[-1])
    return {
        **_COMMON,
        "RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(rank - ends[node] + sizes[node]),
        "LOCAL_WORLD_SIZE": str(sizes[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(sizes)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world,
    }


def set_torchrun_environment(sizes: Sequence[int], rank: int) -> None:
    """Set these variables in this process."""
    os.environ.update(torchrun_environment(sizes, rank))
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def name_the_host(sizes: Sequence[int], rank: int) -> None:
    """Give this process the host name of its node, if the scenario has several.

    Python's functions return it. Programs in other languages see the real name.
    """
    if len(sizes) == 1:
        return
    name = f"{socket.gethostname()}-{torchrun_environment(sizes, rank)['GROUP_RANK']}"
    real = os.uname()
    named = os.uname_result((real.sysname, name, real.release, real.version, real.machine))
    os.environ["HOSTNAME"] = name
    os.uname = lambda: named
    platform.node = lambda: name
    socket.gethostname = lambda: name
    # A real look-up of the name would wait for a name server.
    socket.getfqdn = lambda name=name: name
