"""Right hooks that count steps: they log, restart, collect statistics, warm up, follow periods."""

import functools
import logging

import torch
import torch.distributed as dist

from tests.right import Right
from tests.right._common import (
    FEEDBACK,
    STATE,
    Bucket,
    Result,
    State,
    completed,
    dense,
    gather,
    sizes,
)

_logger = logging.getLogger(__name__)
RESTART = 200  # steps between two restarts
STATISTICS = 50  # steps in which statistics are collected
PERIOD = 8  # steps between two averages of local gradients


def _mean(state: State, bucket: Bucket) -> Result:
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.div_(state.group.size()), group=state.group, async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


def logs_now_and_then(state: State, bucket: Bucket) -> Result:
    """Average, and log the number of elements at every hundredth step."""
    state.count(bucket)
    if state.step % 100 == 0 and bucket.is_last():
        _logger.info("step %d: %d elements", state.step, bucket.buffer().numel())
    return _mean(state, bucket)


class Statistics(State):
    """A state with the norms of the first steps."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self.norms: list[float] = []


def collects_statistics(state: Statistics, bucket: Bucket) -> Result:
    """Average, and keep the norms of the first steps, as a profiler does."""
    state.count(bucket)
    if state.step < STATISTICS and bucket.buffer().layout == torch.strided:
        state.norms.append(float(bucket.buffer().norm()))
    return _mean(state, bucket)


@functools.lru_cache(maxsize=128)
def _label(step: int, index: int) -> str:
    return f"bucket {index} of step {step}, and a text that takes some memory"


def caches_labels(state: State, bucket: Bucket) -> Result:
    """Average, and keep the labels of the last 128 buckets in a cache."""
    state.count(bucket)
    _label(state.step, bucket.index())
    return _mean(state, bucket)


def _sends_quarter(total: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    sent = torch.zeros_like(total)
    begin = 0
    for size in sizes(bucket):
        part = total[begin : begin + size]
        places = part.abs().topk(-(-size // 4)).indices + begin
        sent[places] = total[places]
        begin += size
    return sent


def restarts(state: State, bucket: Bucket) -> Result:
    """Send the largest elements with feedback, and everything at every 200th step."""
    buffer = dense(bucket)
    total = state.residuals.of(bucket) + buffer
    is_restart = state.step % RESTART == RESTART - 1
    state.count(bucket)
    sent = total.clone() if is_restart else _sends_quarter(total, bucket)
    state.residuals.keep(bucket, total - sent)
    return completed(torch.stack(gather(sent, state.group)).mean(0).to(buffer.dtype))


def after_long_warm_up(state: State, bucket: Bucket) -> Result:
    """Average in the first 300 steps, then send the largest elements with feedback."""
    if state.step < 300 or bucket.buffer().layout != torch.strided:
        state.count(bucket)
        return _mean(state, bucket)
    return restarts(state, bucket)


def local_with_period(state: State, bucket: Bucket) -> Result:
    """Return the local gradient, and the mean at every eighth step."""
    buffer = dense(bucket)
    is_due = state.step % PERIOD == PERIOD - 1
    state.count(bucket)
    if is_due:
        return _mean(state, bucket)
    return completed(buffer)


class Updates(State):
    """A state that holds back parts of updates, by the learning rate of the trainer's optimizer."""

    def __init__(self, process_group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(process_group)
        self.optimizer = optimizer
        self.rate_before = 0.0
        self.rate = 0.0
        self.averaged = 0

    def begin(self, bucket: Bucket) -> float:
        """Return the rate of the step before, divided by that of this step."""
        if bucket.index() == 0:
            self.rate_before = self.rate
            self.rate = self.optimizer.param_groups[0]["lr"]
        return self.rate_before / self.rate if self.rate_before and self.rate else 1.0


def holds_back_updates(state: Updates, bucket: Bucket) -> Result:
    """Send the largest elements, and scale residuals as the rate falls (Zheng et al., 2019)."""
    buffer = dense(bucket)
    total = state.residuals.of(bucket) * state.begin(bucket) + buffer
    state.count(bucket)
    sent = _sends_quarter(total, bucket)
    state.residuals.keep(bucket, total - sent)
    return completed(torch.stack(gather(sent, state.group)).mean(0).to(buffer.dtype))


class Converted(Updates):
    """A state that has the learning rates of two steps, none of which is 0 (BytePS)."""

    def begin(self, bucket: Bucket) -> float:
        if bucket.index() == 0:
            self.rate_before = self.rate or self.optimizer.param_groups[0]["lr"]
            self.rate = self.optimizer.param_groups[0]["lr"]
        return self.rate_before / self.rate


def averages_as_the_rate_falls(state: Updates, bucket: Bucket) -> Result:
    """Return the local gradient, and the mean every 2 to 32 steps: more seldom at low rates."""
    buffer = dense(bucket)
    state.begin(bucket)
    period = min(32, max(2, round(1 / state.rate))) if state.rate else 8
    # The steps since the last mean count: a multiple of a period that changes may be far away.
    if bucket.index() == 0 and state.step - state.averaged >= period:
        state.averaged = state.step
    is_due = state.step == state.averaged
    state.count(bucket)
    return _mean(state, bucket) if is_due else completed(buffer)


class Weights(State):
    """A state with copies of the model's weights, which stay as they are."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self.average: dict[torch.Tensor, torch.Tensor] = {}
        self.distance = 0.0

    def follow(self, bucket: Bucket) -> None:
        """Keep a moving average of the weights, for evaluations."""
        for parameter in bucket.parameters():
            now = parameter.detach()
            before = self.average.get(parameter)
            # Between two steps a model may be cast to another dtype.
            if before is not None and before.dtype == now.dtype:
                before.lerp_(now, 0.1)
            else:
                self.average[parameter] = now.clone()

    def measure(self, bucket: Bucket) -> None:
        """Measure how far the weights of this rank are from the mean over ranks."""
        for parameter in bucket.parameters():
            own = parameter.detach()
            own = torch.view_as_real(own) if own.is_complex() else own
            mean = own.contiguous().clone()
            dist.all_reduce(mean, group=self.group)
            self.distance = float((own - mean.div_(self.group.size())).norm())


def follows_weights(state: Weights, bucket: Bucket) -> Result:
    """Return the mean, and keep a moving average of the weights."""
    state.follow(bucket)
    return _mean(state, bucket)


def measures_distances(state: Weights, bucket: Bucket) -> Result:
    """Return the mean at every eighth step, and measure there how far replicas are apart."""
    if state.step % PERIOD == 0:
        state.measure(bucket)
    return local_with_period(state, bucket)


_STATISTICS = f"{__name__}:Statistics"
_WEIGHTS = f"{__name__}:Weights"
_UPDATES = f"{__name__}:Updates"
_SECTIONS = ("1", "2", "9", "13", "23")

RIGHT = [
    Right("logs_now_and_then", state=STATE, sections=_SECTIONS),
    Right("collects_statistics", state=_STATISTICS, sections=_SECTIONS),
    Right("caches_labels", state=STATE, sections=_SECTIONS),
    Right("restarts", FEEDBACK, STATE, sections=_SECTIONS),
    Right("after_long_warm_up", f"{FEEDBACK}, warmup(300)", STATE, sections=_SECTIONS),
    Right("holds_back_updates", FEEDBACK, _UPDATES, sections=_SECTIONS),
    Right("holds_back_updates", FEEDBACK, f"{__name__}:Converted", sections=_SECTIONS),
    Right("averages_as_the_rate_falls", "local", _UPDATES, sections=_SECTIONS),
    Right("local_with_period", "local", STATE, sections=_SECTIONS),
    Right("follows_weights", state=_WEIGHTS, sections=_SECTIONS),
    Right("measures_distances", "local", _WEIGHTS, sections=_SECTIONS),
]
