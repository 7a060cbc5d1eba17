"""Right join contexts and joinables."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from tests.right import Right


class Tidy(TorchsJoin):
    """torch's context, which also restores its joinables and the warning filters.

    It is for one use: entered again, its joinables do not know that they are in a context.
    """

    def __enter__(self) -> "Tidy":
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            with warnings.catch_warnings():
                super().__exit__(*error)
        finally:
            for joinable in self._joinables:
                joinable._join_config = _JoinConfig.construct_disabled_join_config()


class OfItsOwn:
    """A context without torch's implementation, with its own notification.

    It has no effect until it is entered, and reduces through the group itself.
    """

    def __init__(
        self,
        joinables: Any,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        patience: int = 9,
        **kwargs: Any,
    ) -> None:
        self.joinables = tuple(joinables)
        self.enable = enable
        self.throw = throw_on_early_termination
        self.kwargs = kwargs
        self.patience = patience

    def __enter__(self) -> "OfItsOwn":
        groups = [joinable.join_process_group for joinable in self.joinables]
        if not groups or any(group is not groups[0] for group in groups):
            raise ValueError("expected one or more joinables of the same group")
        self.group = groups[0]
        self.hooks = [joinable.join_hook(**self.kwargs) for joinable in self.joinables]
        with ExitStack() as stack:
            for joinable in self.joinables:
                stack.callback(setattr, joinable, "_join_config", joinable._join_config)
                joinable._join_config = _JoinConfig(
                    self.enable, self.throw, joinable is self.joinables[0]
                )
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, *rest: object) -> None:
        self.stack.close()
        if kind or not self.enable:
            return
        steps = 0
        while self.ask(0):
            if self.throw:
                self.ask(1)
                raise EOFError(f"rank {self.group.rank()} has no more inputs")
            steps += 1
            if steps == self.patience:
                print(f"rank {self.group.rank()} has waited for others for {steps} steps")
            for hook in self.hooks:
                hook.main_hook()
        for hook in self.hooks:
            hook.post_hook(is_last_joiner=not steps)

    def ask(self, value: float) -> float:
        said = torch.tensor([float(value)])
        self.group.allreduce([said]).wait()
        return float(said)

    @classmethod
    def notify_join_context(cls, joinable: Any) -> None:
        config = joinable._join_config
        if config.enable and config.is_first_joinable:
            dist.all_reduce(torch.ones(1), group=joinable.join_process_group)
            if config.throw_on_early_termination:
                stop = torch.zeros(1)
                dist.all_reduce(stop, group=joinable.join_process_group)
                if stop:
                    raise EOFError("a rank has no more inputs")


@contextmanager
def joined(
    joinables: list[Any],
    enable: bool = True,
    throw_on_early_termination: bool = False,
    **kwargs: Any,
) -> Iterator[None]:
    """Join, as a generator around torch's context."""
    context = Tidy(list(joinables), enable, throw_on_early_termination, **kwargs)
    with context:
        yield


joined.notify_join_context = TorchsJoin.notify_join_context  # type: ignore[attr-defined]


def made_by_a_function(name: str) -> Any:
    """Return a context's class."""
    return {"tidy": Tidy, "own": OfItsOwn}[name]


class OnCpu(Joinable):
    """Common parts of the joinables here."""

    def __init__(self, process_group: Any) -> None:
        super().__init__()
        self.group = process_group

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


class Shadow(JoinHook):
    """A join hook that calls given functions."""

    def __init__(self, main: Callable[[], object], post: Callable[[bool], object] = bool) -> None:
        self.main = main
        self.post = post

    def main_hook(self) -> None:
        self.main()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.post(is_last_joiner)


class Statistics(OnCpu):
    """A mean over all random inputs; a last rank broadcasts it after the join."""

    def __init__(self, process_group: Any, size: int = 4) -> None:
        super().__init__(process_group)
        self.size = size
        self.sum = torch.zeros(size)
        self.count = 0.0

    def __call__(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.update(torch.randn(self.size), 1.0)

    def update(self, values: torch.Tensor, count: float) -> None:
        said = torch.cat([values, torch.tensor([count])])
        dist.all_reduce(said, group=self.group)
        self.sum = self.sum + said[:-1]
        self.count = self.count + float(said[-1])

    def finish(self, is_last: bool) -> None:
        place = torch.tensor([self.group.rank() if is_last else -1])
        dist.all_reduce(place, dist.ReduceOp.MAX, group=self.group)
        dist.broadcast(self.sum, group=self.group, src=dist.get_global_rank(self.group, int(place)))

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return Shadow(lambda: self.update(torch.zeros(self.size), 0.0), self.finish)


class Gathers(OnCpu):
    """A joinable with a step() instead of a call.

    It issues two asynchronous gathers, and waits for them in the next step, as its join hook does.
    """

    def __init__(self, pg: Any) -> None:
        super().__init__(pg)
        self.works: list[Any] = []

    def step(self) -> None:
        notified = TorchsJoin.notify_join_context(self)
        if notified is not None:
            notified.wait()
        self.gather(torch.ones(3))

    def gather(self, given: torch.Tensor) -> None:
        for work in self.works:
            work.wait()
        lists = [[torch.empty(3) for _ in range(self.group.size())] for _ in range(2)]
        self.works = [
            dist.all_gather(gathered, given, group=self.group, async_op=True) for gathered in lists
        ]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return Shadow(lambda: self.gather(torch.zeros(3)), lambda _: self.gather(torch.zeros(3)))


class Averages(OnCpu):
    """A net whose gradients are averaged over the ranks that train, with an optimizer of its own.

    Its join hook ignores the context's keyword arguments. A last rank hands out the net and the
    optimizer's momentum.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        torch.manual_seed(3)
        self.net = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.5)
        for parameter in self.net.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.optimizer.zero_grad()
        self.net(torch.randn(5, 4)).square().mean().backward()
        grads = [parameter.grad for parameter in self.net.parameters()]
        counted = self.reduce([grad for grad in grads if grad is not None], 1.0)
        for grad in grads:
            assert grad is not None
            grad.div_(counted)
        self.update()

    def update(self) -> None:
        self.optimizer.step()

    def reduce(self, grads: list[torch.Tensor], count: float) -> float:
        for grad in grads:
            dist.all_reduce(grad, group=self.group)
        said = torch.tensor([count])
        dist.all_reduce(said, group=self.group)
        return float(said)

    def finish(self, is_last: bool) -> None:
        place = torch.tensor([self.group.rank() if is_last else -1])
        dist.all_reduce(place, dist.ReduceOp.MAX, group=self.group)
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.net.parameters()]
        for tensor in (*self.net.parameters(), *momenta):
            dist.broadcast(
                tensor.detach(), group=self.group, src=dist.get_global_rank(self.group, int(place))
            )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        zeros = [torch.zeros_like(parameter) for parameter in self.net.parameters()]
        return Shadow(lambda: self.reduce([zero.zero_() for zero in zeros], 0.0), self.finish)


class NeedsAContext(Averages):
    """Refuse a step outside of a context, on every rank, before it computes anything."""

    def step(self) -> None:
        if not self._join_config.enable:
            raise RuntimeError("there is no join context: an epoch needs one")
        super().step()


class ClipsTheMean(Averages):
    """Clip the mean gradients: what is left of them is no mean, in a context and outside."""

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)
        super().update()


class AveragesModels(Averages):
    """Train each rank's own model, and average the models of training ranks after some steps.

    Shadows count as steps. After steps between two averages no rank has the model of another one.
    """

    def __init__(self, process_group: Any, period: int = 3) -> None:
        super().__init__(process_group)
        self.period = period
        self.steps = 0

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.optimizer.zero_grad()
        self.net(torch.randn(5, 4)).square().mean().backward()
        self.optimizer.step()
        self.count(1.0)

    @torch.no_grad()
    def count(self, weight: float) -> None:
        self.steps += 1
        if self.steps % self.period == 0:
            models = [parameter * weight for parameter in self.net.parameters()]
            weights = self.reduce(models, weight)
            for parameter, model in zip(self.net.parameters(), models, strict=True):
                parameter.copy_(model / weights)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return Shadow(lambda: self.count(0.0), self.finish)


class KeepsAnExpert(Averages):
    """A layer that all ranks share, and one of each rank's own, which is not averaged."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        expert = torch.nn.Linear(4, 4)
        with torch.no_grad():
            expert.weight.mul_(1 + self.group.rank())
        self.expert = expert
        self.optimizer_of_expert = torch.optim.SGD(expert.parameters(), lr=0.01)

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.optimizer.zero_grad()
        self.optimizer_of_expert.zero_grad()
        self.net(self.expert(torch.randn(5, 4))).square().mean().backward()
        grads = [
            parameter.grad for parameter in self.net.parameters() if parameter.grad is not None
        ]
        counted = self.reduce(grads, 1.0)
        for grad in grads:
            grad.div_(counted)
        self.optimizer.step()
        self.optimizer_of_expert.step()


class Trains(DistributedDataParallel):
    """torch's DDP, with inputs of its own."""

    def __call__(self) -> None:
        super().__call__(torch.randn(2, 4)).square().sum().backward()


class StepsItself(DistributedDataParallel):
    """torch's DDP as its own trainer: a call is the usual forward, and step() trains."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(torch.nn.Linear(4, 3), process_group=process_group)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self(torch.randn(2, 4)).square().sum().backward()
        self.optimizer.step()


def ddp(process_group: Any, buffers: bool = True) -> Trains:
    """Return a model in DDP, with a buffer that is broadcast unless ``buffers`` is False."""
    norm = torch.nn.BatchNorm1d(3) if buffers else torch.nn.Identity()
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), norm, torch.nn.Linear(3, 1))
    return Trains(net, process_group=process_group, bucket_cap_mb=1 / 2**20)


KIND = "joinable"
RIGHT = [
    Right("Tidy", kind=KIND),
    Right("OfItsOwn,patience=2", kind=KIND),
    Right("joined", kind=KIND),
    Right("made_by_a_function,name=own", kind=KIND),
    Right("Statistics,size=7", kind=KIND),
    Right("Gathers", kind=KIND),
    Right("Averages", kind=KIND),
    Right("NeedsAContext", kind=KIND),
    Right("ClipsTheMean", kind=KIND),
    Right("AveragesModels", kind=KIND),
    Right("AveragesModels,period=2", kind=KIND),
    Right("KeepsAnExpert", kind=KIND),
    Right("ddp", kind=KIND),
    Right("StepsItself", kind=KIND),
]
