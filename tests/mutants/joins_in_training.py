"""Mutants of section 17 that are right in short, even or single epochs, and wrong in training.

The contexts are the right one with one method changed. The joinables are models and optimizers
whose join hooks are nearly right.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchsJoin
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants.joins import Right


class Averages(Joinable):
    """The right joinable: a net whose gradients are averaged in one vector.

    It is trained by an optimizer with momentum of its own. A last rank hands out the net and the
    optimizer's state after the join.
    """

    def __init__(self, process_group: Any) -> None:
        super().__init__()
        self.group = process_group
        torch.manual_seed(5)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.5)
        # Their state exists before the first step, also on a rank without inputs.
        for parameter in self.net.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.by_all = True
        self.seen = 0

    def step(self) -> None:
        TorchsJoin.notify_join_context(self)
        self.seen += 1
        self.optimizer.zero_grad()
        self.net(torch.randn(5, 4)).square().mean().backward()
        own = torch.cat([parameter.grad.reshape(-1) for parameter in self.net.parameters()])
        self.put(self.mean(own, 1.0))
        self.optimizer.step()

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        said = torch.cat([own, torch.tensor([count])])
        dist.all_reduce(said, group=self.group)
        return said[:-1] / self.divisor(float(said[-1]))

    def divisor(self, training: float) -> float:
        return self.group.size() if self.by_all else training

    def put(self, mean: torch.Tensor) -> None:
        sizes = [parameter.numel() for parameter in self.net.parameters()]
        for parameter, values in zip(self.net.parameters(), mean.split(sizes), strict=True):
            parameter.grad = values.view_as(parameter).clone()

    def shadow(self) -> None:
        self.mean(torch.zeros(sum(p.numel() for p in self.net.parameters())), 0.0)

    def tensors(self) -> list[torch.Tensor]:
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.net.parameters()]
        return [*self.net.parameters(), *momenta]

    def source(self, is_last: bool) -> int:
        place = torch.tensor([self.group.rank() if is_last else -1])
        dist.all_reduce(place, dist.ReduceOp.MAX, group=self.group)
        return int(place)

    @torch.no_grad()
    def hand_out(self, is_last: bool) -> None:
        source = self.source(is_last)
        for tensor in self.tensors():
            dist.broadcast(tensor, group=self.group, src=dist.get_global_rank(self.group, source))

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


class _Hook(JoinHook):
    def __init__(self, joinable: Averages) -> None:
        self.joinable = joinable

    def main_hook(self) -> None:
        self.joinable.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.joinable.hand_out(is_last_joiner)


class RepeatsItsGradient(Averages):
    """Add the rank's last gradient in every shadow, which is still in its buffer."""

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        self.buffer = own.clone()
        return super().mean(own, count)

    def shadow(self) -> None:
        if not self.seen:
            super().shadow()
            return
        super().mean(self.buffer, 0.0)


class RepeatsTheMean(Averages):
    """Add the last mean in every shadow: the parameters still hold it as their gradients."""

    def shadow(self) -> None:
        grads = [p.grad for p in self.net.parameters()]
        if None in grads:
            super().shadow()
            return
        self.mean(torch.cat([grad.reshape(-1) for grad in grads]), 0.0)


class CountsShadows(Averages):
    """Count shadowing ranks among those that train, so that the divisor never falls."""

    def shadow(self) -> None:
        self.mean(torch.zeros(sum(p.numel() for p in self.net.parameters())), 1.0)


class DividesTheOtherWay(Averages):
    """Take divide_by_initial_world_size for its opposite."""

    def divisor(self, training: float) -> float:
        return training if self.by_all else self.group.size()


class DividesNanByZero(Averages):
    """Scale each gradient by its norm and back, which gives NaN for the zeros of a shadow."""

    def mean(self, own: torch.Tensor, count: float) -> torch.Tensor:
        norm = own.norm()
        return super().mean(own / norm * norm, count)


class KeepsItsMomentum(Averages):
    """Hand out the parameters, and leave each rank its own momentum."""

    def tensors(self) -> list[torch.Tensor]:
        return list(self.net.parameters())


class HandsOutNothing(Averages):
    """Do nothing after the join, as all ranks had the same parameters in every step."""

    def hand_out(self, is_last: bool) -> None:
        pass


class HandsOutTheFirst(Averages):
    """Hand out the model of the first rank, as at the beginning of training."""

    def source(self, is_last: bool) -> int:
        return 0


class HandsOutTheFirstJoiner(Averages):
    """Take is_last_joiner for its opposite, unless all ranks are last."""

    def source(self, is_last: bool) -> int:
        everybody = torch.tensor([int(is_last)])
        dist.all_reduce(everybody, dist.ReduceOp.MIN, group=self.group)
        return super().source(is_last == bool(everybody))


class ForgetsDivisor(DistributedDataParallel):
    """torch's DDP, whose join_hook drops the keyword arguments."""

    def __call__(self) -> None:
        super().__call__(torch.randn(2, 4)).square().sum().backward()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return super().join_hook()


class ShadowsButKeepsItsModel(ForgetsDivisor):
    """torch's DDP, whose last model is handed out in a main hook that only the joined ranks have.

    The author moved it there, as the post hook seemed to be for logging, and lost the broadcast.
    """

    def join_hook(self, **kwargs: Any) -> JoinHook:
        inner = DistributedDataParallel.join_hook(self, **kwargs)
        inner.post_hook = lambda is_last_joiner: None  # type: ignore[method-assign]
        return inner


def _net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))


def forgets_divisor(process_group: Any) -> ForgetsDivisor:
    """Drop divide_by_initial_world_size on its way to torch's DDP."""
    return ForgetsDivisor(_net(), process_group=process_group)


def keeps_its_model(process_group: Any) -> ShadowsButKeepsItsModel:
    """Replace the post hook of torch's DDP, which hands out the last model."""
    return ShadowsButKeepsItsModel(_net(), process_group=process_group)


class Limited(Right):
    """Shadow up to a limit of steps, against endless loops."""

    limit = 64

    def anybody_trains(self) -> bool:
        return super().anybody_trains() and self.shadowed < self.limit


class LimitedToAThousand(Limited):
    """Stop where torch's context warns of very uneven inputs."""

    limit = 1000


class CountsToSixtyFour(Right):
    """Forget the shadowed steps when there are 64 of them, so that a rank looks like the last."""

    def is_last(self) -> bool:
        return self.shadowed == 0 or self.shadowed >= 64


class JoinsAfterInterrupts(Right):
    """Ask for an Exception where there may be an interrupt, and run the post hooks then."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        result = super().__exit__(kind, error, trace)
        if kind is not None and not issubclass(kind, Exception):
            self.finish()
        return result


class SwallowsInterrupts(Right):
    """Take an interrupt for the end of training, and leave the context in peace."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        super().__exit__(kind, error, trace)
        return kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit))


class EndsAtStopIteration(Right):
    """Take StopIteration for the end of the inputs, which a loop over next() raises."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        super().__exit__(kind, error, trace)
        return kind is not None and issubclass(kind, StopIteration)


class LogsHooks(Right):
    """Log an exception of a post hook, and go on."""

    def finish(self) -> None:
        for hook in self.hooks:
            try:
                hook.post_hook(self.is_last())
            except Exception as error:
                print(f"post_hook failed: {error}")


class WrapsHooks(Right):
    """Raise an exception of its own for that of a main hook."""

    def call_main_hooks(self) -> None:
        try:
            super().call_main_hooks()
        except Exception as error:
            raise RuntimeError("a main hook failed") from error


class FinishesInAnyCase(Right):
    """Run the post hooks in a finally clause, also after a main hook that has failed."""

    def shadow(self) -> None:
        try:
            super().shadow()
        except RuntimeError:
            raise
        except Exception:
            self.finish()
            raise


_KNOWN: dict[tuple[int, ...], dict[str, Any]] = {}


class CachesKeywords(Right):
    """Keep the keyword arguments of the first context of the same joinables."""

    def ask(self, kwargs: dict[str, Any]) -> list[Any]:
        key = tuple(sorted(id(joinable) for joinable in self.joinables))
        return super().ask(_KNOWN.setdefault(key, kwargs))


class ForgetsFourthEpochs(Right):
    """Free resources after the fourth context, and call no post hooks from then on."""

    contexts = 0

    def finish(self) -> None:
        cls = ForgetsFourthEpochs
        cls.contexts += 1
        if cls.contexts <= 4 or not self.has_models():
            super().finish()

    def has_models(self) -> bool:
        return any(isinstance(joinable, torch.nn.Module) for joinable in self.joinables)


KIND = "joinable"
MUTANTS = [
    Mutant("RepeatsItsGradient", ("17.18",), kind=KIND),
    Mutant("RepeatsTheMean", ("17.18",), kind=KIND),
    Mutant("CountsShadows", ("17.18",), kind=KIND),
    Mutant("DividesTheOtherWay", ("17.18",), kind=KIND),
    Mutant("DividesNanByZero", ("17.18",), kind=KIND),
    Mutant("forgets_divisor", ("17.18",), kind=KIND),
    Mutant("KeepsItsMomentum", ("17.19",), kind=KIND),
    Mutant("HandsOutNothing", ("17.19",), kind=KIND),
    Mutant("keeps_its_model", ("17.19",), kind=KIND),
    Mutant("HandsOutTheFirst", ("17.20",), kind=KIND),
    Mutant("HandsOutTheFirstJoiner", ("17.20",), kind=KIND),
    Mutant("Limited", ("17.21",), kind=KIND, hangs=True),
    Mutant("LimitedToAThousand", ("17.21",), kind=KIND, hangs=True),
    Mutant("CountsToSixtyFour", ("17.21",), kind=KIND),
    Mutant("JoinsAfterInterrupts", ("17.22",), kind=KIND),
    Mutant("SwallowsInterrupts", ("17.22",), kind=KIND),
    Mutant("EndsAtStopIteration", ("17.22",), kind=KIND),
    Mutant("LogsHooks", ("17.23",), kind=KIND),
    Mutant("WrapsHooks", ("17.23",), kind=KIND),
    Mutant("FinishesInAnyCase", ("17.23",), kind=KIND),
    Mutant("CachesKeywords", ("17.24",), kind=KIND),
    Mutant("ForgetsFourthEpochs", ("17.24",), kind=KIND),
]
