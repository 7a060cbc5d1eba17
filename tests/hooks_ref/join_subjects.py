"""Joinables of their own, and torch's, on inputs of any lengths.

They check themselves, in their ranks.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.nn.parallel import DistributedDataParallel

import hooks_ref
from conformance import Case
from hooks_ref import Join, Joinable, JoinHook


class Counter(Joinable):
    """Sums over ranks how many train, in every step.

    ``factor`` comes by a keyword argument of the context.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.factor = 1
        self.sums: list[int] = []
        self.shadowed: list[int] = []
        self.posts: list[bool] = []

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.sums.append(self._sum(self.factor))

    def _sum(self, value: int) -> int:
        said = torch.tensor([value])
        dist.all_reduce(said, group=self.group)
        return int(said)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        counter = self
        self.factor = kwargs.get("factor", 1)

        class Hook(JoinHook):
            def main_hook(self) -> None:
                counter.shadowed.append(counter._sum(0))

            def post_hook(self, is_last_joiner: bool) -> None:
                counter.posts.append(is_last_joiner)

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.group


def once(check: Callable[[], None]) -> Case:
    return Case(None, hooks_ref.noop_hook, after_backward=check)


def counts(
    process_group: Any, rank: int, *, lengths: tuple[int, ...], joinables: int = 1, factor: int = 1
) -> Case:
    """Check the number of training ranks in every step, and how often each hook is called."""
    made = [Counter(process_group) for _ in range(joinables)]

    def check() -> None:
        for _ in range(2):  # entered again, another time
            with Join(made, factor=factor):
                for _ in range(lengths[rank]):
                    for counter in made:
                        counter()
            training = [sum(length > step for length in lengths) for step in range(max(lengths))]
            for counter in made:
                assert counter.sums == [factor * many for many in training[: lengths[rank]]], (
                    counter.sums
                )
                assert counter.shadowed == [factor * many for many in training[lengths[rank] :]], (
                    counter.shadowed
                )
                assert counter.posts == [lengths[rank] == max(lengths)], counter.posts
                assert not counter._join_config.enable
                for seen in (counter.sums, counter.shadowed, counter.posts):
                    seen.clear()

    return once(check)


def disabled(process_group: Any, rank: int) -> Case:
    """Nothing is communicated, and no hook called."""
    counter = Counter(process_group)

    def check() -> None:
        with Join([counter], enable=False):
            counter()
        assert (counter.sums, counter.posts) == ([2], []), counter.sums
        counter.sums.clear()

    return once(check)


def made_ahead(process_group: Any, rank: int) -> Case:
    """Contexts that are made before another one is entered leave nothing behind, and one inside
    another gives back its settings.
    """
    counter = Counter(process_group)

    def check() -> None:
        first, second = Join([counter]), Join([counter])
        for context in (first, second):
            with context:
                assert counter._join_config.enable
            assert not counter._join_config.enable
        with first:
            with Join([counter], enable=False):
                assert not counter._join_config.enable
            assert counter._join_config.enable
        assert not counter._join_config.enable

    return once(check)


def throws(process_group: Any, rank: int) -> Case:
    """All ranks raise, those that still train in the step after the shortest."""
    counter = Counter(process_group)

    def check() -> None:
        said = ""
        try:
            with Join([counter], throw_on_early_termination=True):
                for _ in range(2 + rank):
                    counter()
        except RuntimeError as error:
            said = str(error)
        detected = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        assert said == ("Rank 0 exhausted all inputs." if rank == 0 else detected), said
        assert len(counter.sums) == 2
        assert not counter._join_config.enable
        counter.sums.clear()

    return once(check)


def raises_inside(process_group: Any, rank: int) -> Case:
    """An exception comes out as it is, on the rank that has it, and nothing is shadowed."""
    counter = Counter(process_group)

    def check() -> None:
        try:
            with Join([counter]):
                counter()
                raise ArithmeticError("inside")
        except ArithmeticError:
            assert counter.posts == []
            assert not counter._join_config.enable
            counter.sums.clear()
            return
        raise AssertionError("no exception came out")

    return once(check)


def trains(
    process_group: Any,
    rank: int,
    *,
    lengths: tuple[int, ...],
    hook: str = "",
    zero: bool = False,
    sync_bn: bool = False,
) -> Case:
    """torch's DDP, and ZeRO with it, train to the same bits in our context as in torch's.

    Replicas are the same then.
    """

    def train(join: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        net = torch.nn.Sequential(
            torch.nn.Linear(6, 5),
            torch.nn.BatchNorm1d(5) if sync_bn else torch.nn.ReLU(),
            torch.nn.Linear(5, 3),
        )
        ddp = DistributedDataParallel(net, process_group=process_group)
        if hook == "powerSGD_hook":
            ddp.register_comm_hook(
                hooks_ref.PowerSGDState(process_group, 1, 2, 1), hooks_ref.powerSGD_hook
            )
        elif hook:
            ddp.register_comm_hook(process_group, getattr(hooks_ref, hook))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        joinables = [ddp]
        if zero:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.SGD, process_group=process_group, lr=0.1, momentum=0.9
            )
            joinables = [ddp, optimizer]
        with join(joinables):
            for step in range(lengths[rank]):
                torch.manual_seed(100 * step + rank)
                ddp(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [tensor.detach().clone() for tensor in net.state_dict().values()]

    def check() -> None:
        state = torch.get_rng_state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = train(TorchsJoin)
            mine = train(Join)
        torch.set_rng_state(state)
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
        for tensor in mine:
            root = copy.deepcopy(tensor)
            # torch 2.4 and 2.5 have no group_src.
            dist.broadcast(root, dist.get_global_rank(process_group, 0), group=process_group)
            assert torch.equal(root, tensor), "replicas differ"

    return once(check)


def divides(process_group: Any, rank: int, world_size: int) -> Case:
    """``divide_by_initial_world_size=False`` divides by the ranks that still train.

    With a communication hook it has no effect, since a hook does not get their number.
    """

    def mean(join: Any, hook: bool, by_initial: bool) -> float:
        ddp = DistributedDataParallel(
            torch.nn.Linear(1, 1, bias=False), process_group=process_group
        )
        if hook:
            ddp.register_comm_hook(process_group, hooks_ref.allreduce_hook)
        with join([ddp], divide_by_initial_world_size=by_initial):
            for _ in range(1 if rank else 2):
                ddp.zero_grad()
                ddp(torch.full((1, 1), 6.0)).sum().backward()
        grad = next(ddp.parameters()).grad
        assert grad is not None
        return grad.item()

    def check() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for join in (TorchsJoin, Join):
                found = {
                    (hook, by_initial): mean(join, hook, by_initial)
                    for hook in (False, True)
                    for by_initial in (True, False)
                }
                if rank == 0:  # whose second step is its own alone
                    assert found == {
                        (False, True): 3.0,
                        (False, False): 6.0,
                        (True, True): 3.0,
                        (True, False): 3.0,
                    }, found

    return once(check)


def steps_alone(process_group: Any, rank: int) -> Case:
    """ZeroRedundancyOptimizer alone, whose main hook is a step.

    It ends, and replicas are the same.
    """

    def check() -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
        zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, process_group=process_group, lr=0.5)
        with Join([zero]):
            for _ in range(1 + 2 * rank):
                for parameter in params:
                    parameter.grad = torch.ones(3)
                zero.step()
        assert all(
            torch.equal(parameter.detach(), torch.full((3,), -1.5)) for parameter in params
        ), params

    return once(check)
