"""Mutants of 14.22, 15.30, 15.31, 16.30, 18.26 and 18.27: the failure of a collective is hidden.

All of them are right as long as every collective succeeds.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants import Mutant
from tests.mutants.averagers import Averager
from tests.mutants.optimizer_wrappers import PostLocal, Sharded
from tests.mutants.optimizers_in_training import Averaging
from tests.mutants.quantized_collectives import Made, Pending, Tensor, right
from tests.mutants.strategies import _average, _filled, _mean, _then

Context = AbstractContextManager[None]
_log = logging.getLogger(__name__)


def _end(work: Any) -> None:
    """Wait for a callback on the work's future, which never reads the result."""
    work.get_future().then(lambda _: None).wait()


# ---- Averagers


class KeepsItsOwn(Averager):
    """Keep this rank's value of a parameter whose collective has failed."""

    def average_one(self, parameter: Any) -> None:
        with contextlib.suppress(RuntimeError):
            super().average_one(parameter)


class Warns(Averager):
    """Warn that the average has failed, and go on to the next step."""

    def average(self, params: Any) -> None:
        try:
            super().average(params)
        except Exception as error:
            warnings.warn(f"parameters are not averaged: {error}", stacklevel=2)


class LargeOnesMayFail(Averager):
    """Let the average of parameters of four thousand elements and more fail."""

    def average_one(self, parameter: Any) -> None:
        try:
            super().average_one(parameter)
        except RuntimeError:
            if parameter.numel() < 4000:
                raise


class MayFailLater(Averager):
    """Let averages fail once the first three have succeeded."""

    def average(self, params: Any) -> None:
        try:
            super().average(params)
        except RuntimeError:
            if self.step < self.warmup_steps + 3 * self.period:
                raise


class TakesTimeoutsForTransient(Averager):
    """Warn of an error that tells of a timeout or a lost peer, and keep this rank's parameters."""

    def average(self, params: Any) -> None:
        try:
            super().average(params)
        except RuntimeError as error:
            if "timed out" not in str(error).lower() and "reset by peer" not in str(error):
                raise
            warnings.warn(f"this average is left out: {error}", stacklevel=2)


class NeverReadsTheResult(Averager):
    """Wait for a callback on the collective's future, which never reads the result."""

    def average_one(self, parameter: Any) -> None:
        mean = parameter.div(self.group.size()).contiguous()
        _end(dist.all_reduce(mean, group=self.group, async_op=True))
        parameter.copy_(mean)


class FirstRankForgives(Averager):
    """Keep the values of the first rank if the collective fails there."""

    def average(self, params: Any) -> None:
        try:
            super().average(params)
        except RuntimeError:
            if self.group.rank():
                raise


class LastRankForgives(Averager):
    """Keep the values of the last rank if the collective fails there."""

    def average(self, params: Any) -> None:
        try:
            super().average(params)
        except RuntimeError:
            if self.group.rank() < self.group.size() - 1:
                raise


class LaterOnesMayFail(Averager):
    """Let the collectives of all parameters but the first two fail."""

    def average(self, params: Any) -> None:
        for place, parameter in enumerate(params):
            try:
                self.average_one(parameter)
            except RuntimeError:
                if place < 2:
                    raise


# ---- Optimizers


class StepsWithoutTheAverager(PostLocal):
    """Log the averager's errors, and count the step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step(closure)
        try:
            self.averager.average_parameters(self.optim.param_groups)
        except Exception:
            _log.exception("no average in this step")
        return loss


class ForgivesInClosures(PostLocal):
    """Warn of the averager's error if the step has a closure."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return super().step()
        loss = self.optim.step(closure)
        try:
            self.averager.average_parameters(self.optim.param_groups)
        except RuntimeError as error:
            warnings.warn(f"no average in this step: {error}", stacklevel=2)
        return loss


class KeepsStaleParameters(Sharded):
    """Keep the parameters that another rank could not send."""

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        with contextlib.suppress(RuntimeError):
            super().send_one(parameter, source)


class SendsWithoutWaiting(Sharded):
    """Send asynchronously, and wait for callbacks that never read the result."""

    def send_one(self, parameter: torch.Tensor, source: int) -> None:
        _end(dist.broadcast(parameter.data, src=source, group=self.group, async_op=True))


class FirstRankKeepsTheSecond(Sharded):
    """Keep the second parameter on the first rank if it could not be received."""

    def send(self) -> None:
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                source = dist.get_global_rank(self.group, self.owner(index))
                try:
                    self.send_one(parameter, source)
                except RuntimeError:
                    if index != 1 or self.place:
                        raise


class StepsWithLargeLocalGradients(Averaging):
    """Step with this rank's own gradient if the collective of a large one fails, and warn."""

    def average_one(self, grad: torch.Tensor) -> None:
        try:
            super().average_one(grad)
        except RuntimeError as error:
            if grad.numel() < 4000:
                raise
            warnings.warn(f"stepped with a local gradient: {error}", stacklevel=2)


# ---- Sync strategies


def logs_and_goes_on(model: Any, is_final_microbatch: bool) -> Context:
    """Log the error of the average, and leave local gradients."""

    def average() -> None:
        try:
            _average(model)
        except RuntimeError as error:
            _log.warning("gradients are not averaged: %s", error)

    return _then(model, is_final_microbatch, average)


@contextmanager
def forgives_ddp(model: Any, is_final_microbatch: bool) -> Iterator[None]:
    """Let DDP average after the last micro-batch, and end its errors in the context."""
    is_local = isinstance(model, DistributedDataParallel) and not is_final_microbatch
    with contextlib.suppress(RuntimeError), model.no_sync() if is_local else nullcontext():
        yield


def large_ones_stay_local(model: Any, is_final_microbatch: bool) -> Context:
    """Leave a gradient of four thousand elements and more local if its collective fails."""

    def average() -> None:
        for parameter in _filled(model):
            try:
                parameter.grad = _mean(parameter.grad, model.process_group)
            except RuntimeError:
                if parameter.numel() < 4000:
                    raise

    return _then(model, is_final_microbatch, average)


def never_reads_results(model: Any, is_final_microbatch: bool) -> Context:
    """Start the collectives of all gradients, and wait for callbacks that never read the result."""

    def average() -> None:
        group = model.process_group
        params = _filled(model)
        means = [
            p.grad.coalesce() / group.size() if p.grad.is_sparse else p.grad.div_(group.size())
            for p in params
        ]
        works = [dist.all_reduce(mean, group=group, async_op=True) for mean in means]
        for parameter, mean, work in zip(params, means, works, strict=True):
            _end(work)
            parameter.grad = mean

    return _then(model, is_final_microbatch, average)


def forgives_the_vote(model: Any, is_final_microbatch: bool) -> Context:
    """Take this rank's own gradients for those of all if the vote on unused parameters fails."""

    def average() -> None:
        has_votes = getattr(model, "find_unused_parameters", False)
        try:
            params = _filled(model)
        except RuntimeError:
            if not has_votes:
                raise
            params = [p for p in model.parameters() if p.grad is not None]
        for parameter in params:
            parameter.grad = _mean(parameter.grad, model.process_group)

    return _then(model, is_final_microbatch, average)


def forgives_views(model: Any, is_final_microbatch: bool) -> Context:
    """Leave a gradient local if it is a view of a bucket and its collective fails."""

    def average() -> None:
        for parameter in _filled(model):
            try:
                parameter.grad = _mean(parameter.grad, model.process_group)
            except RuntimeError:
                if not getattr(model, "gradient_as_bucket_view", False):
                    raise

    return _then(model, is_final_microbatch, average)


# ---- Quantized collectives


def first_rank_forgives(func: Made, qtype: str) -> Made:
    """Return without a message on the first rank if the collective fails there."""

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return right(func)(*args, **kwargs)
        except RuntimeError:
            if dist.get_rank():
                raise
            return None

    return called


def returns_what_is_there(func: Made, qtype: str) -> Made:
    """Warn of a failed collective, and return."""

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return right(func)(*args, **kwargs)
        except RuntimeError as error:
            warnings.warn(f"nothing has arrived: {error}", stacklevel=2)
            return None

    return called


class _Unread(Pending):
    """A pending call whose result is never read."""

    def wait(self) -> None:
        _end(self.work)
        self.finish()


def never_waits(func: Made, qtype: str) -> Made:
    """Wait for a callback on the collective's future, which never reads the result."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        pending = right(func)(tensor_list, tensor, group, async_op=True)
        unread = _Unread(pending.work, pending.finish)
        return unread if async_op else unread.wait()

    return gather


class _Forgiven(Pending):
    """A pending call of a large message, whose wait() raises no error."""

    def wait(self) -> None:
        with contextlib.suppress(RuntimeError):
            super().wait()


def asynchronous_ones_may_get_lost(func: Made, qtype: str) -> Made:
    """Suppress the error of wait() if the call is asynchronous."""

    def gather(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        pending = right(func)(tensor_list, tensor, group, async_op=True)
        if async_op:
            return _Forgiven(pending.work, pending.finish)
        return pending.wait()

    return gather


def large_ones_may_get_lost(func: Made, qtype: str) -> Made:
    """Suppress the error of wait() if a message has four thousand elements and more."""

    def exchange(
        outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        pending = right(func)(outputs, inputs, group, async_op=True)
        if sum(tensor.numel() for tensor in inputs) >= 4000:
            pending = _Forgiven(pending.work, pending.finish)
        return pending if async_op else pending.wait()

    return exchange


def _collective(name: str, func: str = "all_gather", rule: str = "18.26") -> Mutant:
    return Mutant(f"{name},func={func},qtype=FP16", (rule,), kind="collective")


AT = "period=4,warmup_steps=10"
MUTANTS = [
    *(
        Mutant(f"{name},{AT}", ("14.22",), kind="averager")
        for name in (
            "KeepsItsOwn",
            "Warns",
            "LargeOnesMayFail",
            "MayFailLater",
            "TakesTimeoutsForTransient",
            "NeverReadsTheResult",
            "FirstRankForgives",
            "LastRankForgives",
            "LaterOnesMayFail",
        )
    ),
    *(
        Mutant(name, ("15.30",), kind="optimizer")
        for name in (
            "StepsWithoutTheAverager",
            "KeepsStaleParameters",
            "SendsWithoutWaiting",
            "FirstRankKeepsTheSecond",
        )
    ),
    Mutant("ForgivesInClosures", ("15.31",), kind="optimizer"),
    Mutant("StepsWithLargeLocalGradients", ("15.30",), "averages", kind="optimizer"),
    *(
        Mutant(name, ("16.30",), kind="strategy")
        for name in (
            "logs_and_goes_on",
            "large_ones_stay_local",
            "never_reads_results",
            "forgives_the_vote",
            "forgives_views",
        )
    ),
    Mutant("forgives_ddp", ("16.30",), "find_unused", kind="strategy"),
    _collective("first_rank_forgives"),
    _collective("returns_what_is_there"),
    _collective("returns_what_is_there", "scatter"),
    _collective("never_waits"),
    _collective("large_ones_may_get_lost", "all_to_all"),
    _collective("asynchronous_ones_may_get_lost", rule="18.27"),
]
