"""Training runs that are watched, and say by themselves what has to be found in them. They check themselves, in their ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance import Case, Watcher, watch
from conformance.resolve import make_hook, resolve
from conformance.subject import SubjectSpec

CAP = 256 / 2**20  # several buckets


def once(check: Callable[[], None]) -> Case:
    return Case(None, hooks_ref.noop_hook, after_backward=check)


def network() -> torch.nn.Module:
    """The same on all ranks, without any random state."""
    net = torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.ReLU(), torch.nn.Linear(17, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return net


def loss_of(ddp: Any, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(6, 9, generator=generator), torch.randn(6, 5, generator=generator)
    return (ddp(x) - y).square().mean()


def model_with(process_group: Any, hook: str, state: str = "", **options: Any) -> DistributedDataParallel:
    """Return a model in several buckets, and register what is named as on the command line."""
    ddp = DistributedDataParallel(network(), process_group=process_group, **{"bucket_cap_mb": CAP, **options})
    if hook:
        register(ddp, process_group, hook, state)
    return ddp


def register(ddp: DistributedDataParallel, process_group: Any, hook: str, state: str = "") -> None:
    resolved = resolve(SubjectSpec(hook, state or None))
    names: dict[str, Callable[[], Any]] = {
        "process_group": lambda: process_group,
        "model": lambda: ddp,
        "rank": lambda: dist.get_rank(process_group),
        "world_size": lambda: dist.get_world_size(process_group),
        "device": lambda: torch.device("cpu"),
    }
    made, value = make_hook(resolved, names, "--hook")
    ddp.register_comm_hook(process_group if value is None and resolved.state is None else value, made)


def batches(ddp: DistributedDataParallel, rank: int, steps: int, shares: int = 1) -> Iterator[int]:
    """Train, and yield after each backward pass that averages, before the optimizer steps."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for share in range(shares - 1):
            with ddp.no_sync():
                loss_of(ddp, rank, 100 * step + share).backward()
        loss_of(ddp, rank, 100 * step + 99).backward()
        yield step
        optimizer.step()


def rules_of(watcher: Watcher) -> list[str]:
    return list(dict.fromkeys(finding.rule for finding in watcher.findings))


def trains(
    process_group: Any,
    rank: int,
    *,
    hook: str = "",
    state: str = "",
    claims: str = "exact",
    steps: int = 8,
    every: int = 2,
    finds: tuple[str, ...] = (),
    says: str = "",
    shares: int = 1,
    late: bool = False,
    elements: int = 400,
    **options: Any,
) -> Case:
    """``finds`` are the rules that fail, and no other does; ``says`` is among the words of the first finding."""

    def check() -> None:
        ddp = model_with(process_group, "" if late else hook, state, **options)
        state_before = torch.get_rng_state()
        with watch(ddp, every, claims, elements=elements, timeout=20.0) as watcher:
            if late:
                register(ddp, process_group, hook, state)
            for _ in batches(ddp, rank, steps, shares):
                pass
        said = [str(finding) for finding in watcher.findings]
        assert not watcher.ended, watcher.ended
        assert tuple(rules_of(watcher)) == finds, said
        assert says in "\n".join(said[:1]), said
        cost = watcher.cost()
        assert (cost.steps, cost.samples) == (steps, len([step for step in range(steps) if step % every == 1 % every])), cost
        assert len(watcher.figures) == cost.samples
        assert torch.equal(state_before, torch.get_rng_state())
        assert not ddp._forward_hooks
        assert "join_hook" not in ddp.__dict__
        assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in ddp.parameters())

    return once(check)
