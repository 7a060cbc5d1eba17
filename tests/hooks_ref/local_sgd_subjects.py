"""Post-local SGD inside its ranks.

Machines differ by name, subgroups are given, and ours runs beside torch's.
"""

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torchs
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from conformance import Case
from hooks_ref import local_sgd as ours

WHOSE: dict[str, Any] = {"ours": ours, "torchs": torchs}


def name_machine(name: str) -> None:
    """Let this process believe that it runs on machine ``name``."""
    socket.gethostname = lambda: name


def _case(whose: str, *arguments: Any, **more: Any) -> Case:
    return Case(WHOSE[whose].PostLocalSGDState(*arguments), WHOSE[whose].post_localSGD_hook, **more)


def by_machine(process_group: dist.ProcessGroup, rank: int, hosts: str, start: int = 4) -> Case:
    """No subgroup is given; ``hosts`` has a letter per place in the group: the machine's name."""
    name_machine(hosts[rank])
    return _case("ours", process_group, None, start)


def by_machine_or_never(
    process_group: dist.ProcessGroup, world_size: int, rank: int, hosts: str
) -> Case:
    """The same, but in a group of one, which has no local step.

    In the end all make one group more, of everyone.
    """
    case = by_machine(process_group, rank, hosts, 4 if world_size > 1 else 1000)
    case.close = lambda: dist.all_reduce(torch.ones(1), group=dist.new_group())
    return case


def by_default(start: int = 4, whose: str = "ours") -> Case:
    """Everything as it comes: the default group, and the machine that the test runs on."""
    return _case(whose, None, None, start)


def by_group(
    rank: int,
    subgroups: list[list[int]],
    start: int = 4,
    allreduce: bool = True,
    whose: str = "ours",
) -> Case:
    """With subgroups of the default group."""
    mine = [dist.new_group(ranks) for ranks in subgroups][
        next(i for i, ranks in enumerate(subgroups) if rank in ranks)
    ]
    return _case(whose, None, mine, start, allreduce)


def averaged(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    subgroups: list[list[int]],
    whose: str,
) -> Case:
    """Two plain steps, then local ones.

    Parameters are averaged after the third and every second one from there.
    """
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer.register_step_post_hook(lambda *_: averager.average_parameters(model.parameters()))
    return by_group(rank, subgroups, 2, True, whose)


def starts_at_8() -> ours.PostLocalSGDState:
    """Between its steps 6 and 12 it turns local."""
    return ours.PostLocalSGDState(None, None, 8)


def own_from_8() -> ours.PostLocalSGDState:
    """The same, with no communication then."""
    return ours.PostLocalSGDState(None, None, 8, False)


def hook_on_machines_of_their_own(
    state: ours.PostLocalSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The hook, every rank on another machine."""
    name_machine(f"machine {dist.get_rank()}")
    return ours.post_localSGD_hook(state, bucket)


def counts_on(whose: str) -> Case:
    """Check ``iter`` after every step: ours counts on, torch's stops."""
    case = by_group(dist.get_rank(), [[0, 1]], 2, True, whose)
    seen: list[int] = []

    def check() -> None:
        expected = {"ours": [1, 2, 3, 4], "torchs": [1, 2, 2, 2]}[whose]
        assert seen == expected, seen

    case.after_backward = lambda: seen.append(case.state.iter)
    case.close = check
    return case


def makes_groups_where_it_says(rank: int, start: int) -> Case:
    """Check that there is one subgroup from the first local step on, and none before."""
    name_machine(f"machine {rank}")
    case = _case("ours", None, None, start)
    made: list[Any] = []

    def check() -> None:
        assert made[:start] == [None] * start, made
        assert len(set(map(id, made[start:]))) == 1, made
        assert made[-1].size() == 1, made

    case.after_backward = lambda: made.append(case.state.subgroup)
    case.close = check
    return case
